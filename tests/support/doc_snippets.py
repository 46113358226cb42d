"""Code blocks of the user's documents, verbatim in `fixtures/blocks`, and the context that partial ones need."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "fixtures" / "blocks"

CERTIFICATES = """\
cert_pem = "/etc/hypha/cert.pem"
key_pem = "/etc/hypha/key.pem"
trust_pem = "/etc/hypha/trust.pem"
"""
GATEWAYS = 'gateway_addresses = ["/ip4/203.0.113.50/tcp/4001"]\n'
WORK_DIR = 'work_dir = "/var/hypha/work"\n'
JOB = {
    "[scheduler.job.model]": 'repository = "owner/repo"\ntype = "causal-lm"\n',
    "[scheduler.job.dataset]": 'dataset = "imagenet"\n',
    "[scheduler.job.inner_optimizer]": "learning_rate = 0.001\n",
}
"""Keys that every job needs, for blocks that show only one of its tables."""


@dataclass(frozen=True)
class Block:
    """One code block of a document."""

    file: str
    document: str
    line: int
    language: str

    @property
    def text(self) -> str:
        """Return the block verbatim."""
        return (FOLDER / self.file).read_text()

    @property
    def name(self) -> str:
        """Return document and line, as in the table of docs/blocks.md."""
        return f"{self.document}:{self.line}"


def blocks(document: str = "", language: str = "") -> list[Block]:
    """Return all blocks, or those of one document or language."""
    found = [Block(**entry) for entry in tomllib.loads((FOLDER / "blocks.toml").read_text())["block"]]
    return [block for block in found if document in ("", block.document) and language in ("", block.language)]


def block(name: str) -> Block:
    """Return the block at a document and line such as ``worker:25``."""
    [found] = [each for each in blocks() if each.name == name]
    return found


def completed_worker(text: str) -> str:
    """Return a partial worker file preceded by the required keys it lacks; its own lines are unchanged."""
    return "".join(_missing(text, (CERTIFICATES, GATEWAYS, WORK_DIR))) + text


def completed_scheduler(text: str) -> str:
    """Return a partial scheduler file completed with the required keys it lacks."""
    above = "".join(_missing(text, (CERTIFICATES, GATEWAYS)))
    job = [f"\n{header}\n{body}" for header, body in JOB.items() if header not in text]
    return f"{above}{text}{''.join(job)}" if "[scheduler.job" in text else above + text


def _missing(text: str, parts: tuple[str, ...]) -> Iterator[str]:
    return (part for part in parts if part.split(" ")[0] not in text)
