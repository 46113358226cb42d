"""The blocks of the users' documents, word for word in `fixtures/blocks`, and what surrounds one that is a part."""

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
"""What every job must say, for blocks that show one table of it."""


@dataclass(frozen=True)
class Block:
    """One block as it stands in a document."""

    file: str
    document: str
    line: int
    language: str

    @property
    def text(self) -> str:
        """Word for word."""
        return (FOLDER / self.file).read_text()

    @property
    def name(self) -> str:
        """Document and line, as the table of docs/blocks.md has it."""
        return f"{self.document}:{self.line}"


def blocks(document: str = "", language: str = "") -> list[Block]:
    """Every block, or those of one document or language."""
    found = [Block(**entry) for entry in tomllib.loads((FOLDER / "blocks.toml").read_text())["block"]]
    return [block for block in found if document in ("", block.document) and language in ("", block.language)]


def block(name: str) -> Block:
    """The block of a document and line such as ``worker:25``."""
    [found] = [each for each in blocks() if each.name == name]
    return found


def completed_worker(text: str) -> str:
    """A part of a worker's file with what else must stand in one above it; the part's own lines are not changed."""
    return "".join(_missing(text, (CERTIFICATES, GATEWAYS, WORK_DIR))) + text


def completed_scheduler(text: str) -> str:
    """A part of a scheduler's file with what else must stand in one around it."""
    above = "".join(_missing(text, (CERTIFICATES, GATEWAYS)))
    job = [f"\n{header}\n{body}" for header, body in JOB.items() if header not in text]
    return f"{above}{text}{''.join(job)}" if "[scheduler.job" in text else above + text


def _missing(text: str, parts: tuple[str, ...]) -> Iterator[str]:
    return (part for part in parts if part.split(" ")[0] not in text)
