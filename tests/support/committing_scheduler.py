"""Scheduler of a fake worker whose rounds are committed: it states the digests of the weights and serves them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from hypha_proto.bridge_api import read_transfer
from hypha_proto.contributions import Contribution
from hypha_proto.update_file import UpdateMetadata, open_update, write_update
from hypha_proto.weights_digest import digest_weights

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
WEIGHTS = {
    "type": "peers",
    "peers": [PEER],
    "strategy": {"type": "One"},
    "resource": {"dataset": "job/weights", "index": 0},
    "filenames": ["weights.safetensors"],
}
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class CommittingScheduler:
    """Adds the outer updates to weights of its own, states their digests, and serves them."""

    worker: Any
    weights: Arrays
    round: int = 0
    contributions: list[Contribution | None] = field(default_factory=list)
    refusals: set[int] = field(default_factory=set)
    """Rounds of which it refuses the contribution."""
    false_outer: dict[int, Callable[[Arrays], Arrays]] = field(default_factory=dict)
    """Round -> what a faulty connection makes of the outer update on its way to the executor."""
    served: list[Callable[[Path], None]] = field(default_factory=list)
    """Replacements for the next answers to requests for the weights: each writes a file."""
    requests: int = 0
    """Requests for the weights."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the weights after each round."""

    def __post_init__(self) -> None:
        self.digests[0] = digest_weights(self.weights.items())
        self.worker.answers |= {"/resources/send": self.send, "/resources/fetch": self.fetch}

    def send(self, body: Any) -> tuple[int, Any]:
        self.contributions.append(read_transfer("send", body).contribution)
        number, worker = body["round"], self.worker
        worker.sent.append(body)
        kept = worker.work_dir.parent / f"kept-{number}.safetensors"
        shutil.copy(worker.work_dir / body["path"], kept)
        worker.updates.append(kept)
        outer = worker.work_dir.parent / f"outer-{number}.safetensors"
        worker.outer.step(kept, outer)
        worker.outers.append(outer)
        self.advance(number, outer)
        self.push(number, outer)
        if number in self.refusals:
            return 409, {"error": "update-refused", "detail": f"ranges of round {number} are not yours"}
        return 200, {"sent": {PEER: 1}}

    def advance(self, number: int, outer: Path) -> None:
        file, _ = open_update(outer)
        with file:
            for name, value in self.weights.items():
                change = file.tensor(name)
                if np.issubdtype(value.dtype, np.integer):
                    change = np.rint(value + change.astype(np.float64)).astype("i8") - value
                self.weights[name] = np.asarray(value + change)
        self.round = number
        self.digests[number] = digest_weights(self.weights.items())

    def push(self, number: int, outer: Path) -> None:
        incoming = self.worker.work_dir / "incoming" / outer.name
        incoming.parent.mkdir(exist_ok=True)
        shutil.copy(outer, incoming)
        if (change := self.false_outer.get(number)) is not None:
            file, metadata = open_update(outer)
            with file:
                tensors = change({name: file.tensor(name) for name in file.tensors})
            about = UpdateMetadata(metadata.round, statistics=metadata.statistics)
            write_update(incoming, {name: value.shape for name, value in tensors.items()}, tensors.items(), about)
        event = {"path": f"incoming/{outer.name}", "size": 1, "from_peer": PEER, "round": number}
        self.worker.events.put(event | {"weights": self.digests[number]})

    def fetch(self, body: Any) -> tuple[int, Any]:
        if body.get("filenames") != WEIGHTS["filenames"]:
            return self.worker.fetch(body)  # type: ignore[no-any-return]
        self.requests += 1
        path = self.worker.work_dir / body["out_dir"] / "weights.safetensors"
        path.parent.mkdir(exist_ok=True)
        (self.served.pop(0) if self.served else self.write)(path)
        if not path.exists():
            return 502, {"error": "peer-failed", "detail": "the scheduler is away"}
        name = path.relative_to(self.worker.work_dir).as_posix()
        return 200, [{"path": name, "size": 1, "checksum": "blake3:" + "0" * 64, "metadata": {}}]

    def write(self, path: Path, **about: str) -> None:
        """Write the weights as they are."""
        safetensors.numpy.save_file(self.weights, path, {"round": str(self.round)} | about)

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each round as reported."""
        told = [report["metrics"] for report in self.worker.reports if isinstance(report, dict) and "metrics" in report]
        return [each["metrics"] for each in told]
