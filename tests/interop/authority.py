"""Certificates for the tests, by the tool that operators use."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from hypha_local.processes import script


class Authority:
    """A root and an organisation in a folder; nodes get their certificate, key, trust bundle and revocation lists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tool("root")
        self._tool("org")

    def _tool(self, *words: str) -> None:
        command = [script("hypha-certutil"), *words, "--dir", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr

    def node(self, name: str, role: str | None = None) -> Path:
        """Make a node's files; gives their prefix."""
        nodes = self.folder / "nodes"
        self._tool("node", name, "--out", str(nodes), *(("--role", role) if role else ()))
        shutil.copy(self.folder / "crls.pem", nodes / f"{name}-crls.pem")
        return nodes / name

    def revoke(self, prefix: Path) -> None:
        """Withdraw a node, and give the new lists to all nodes made so far."""
        self._tool("revoke", f"{prefix}-cert.pem")
        for lists in (self.folder / "nodes").glob("*-crls.pem"):
            shutil.copy(self.folder / "crls.pem", lists)
