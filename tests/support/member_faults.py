"""Moments of a running DiLoCo job on a real network at which a fault is injected, and what must follow it.

The journal says where a round is: `contributed` before a worker sends its update, `announced` before the parameter
server takes the step, `round` after it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

import anyio
from blake3 import blake3

from hypha_net import open_endpoint, transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.identity import load_identity
from hypha_net.settings import EndpointSettings
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PushHeader
from support.local_network import Job, LocalNetwork

JOINED: Final = "worker_joined"
LOST: Final = "worker_lost"
LEFT: Final = "worker_left"
SUSPECTED: Final = "worker_suspected"
RESTARTED: Final = "worker_restarted"
REPLACED: Final = "worker_replaced"
PAUSED: Final = "paused"
CONTINUED: Final = "continued"
_POLL: Final = 0.001
"""Seconds between two looks at the journal: a moment may last for a few milliseconds only."""
Record = dict[str, Any]


def await_record(job: Job, wanted: Callable[[Record], bool], timeout: float = 60.0) -> Record:
    """Return the first record from now on that is wanted; fail if the job ends first."""
    deadline = time.monotonic() + timeout
    for record in _new_records(job):
        if record is not None and wanted(record):
            return record
        assert time.monotonic() < deadline, f"no such record of the job within {timeout:g} s\n{job.log}"
        assert job.child.process.poll() is None, job.log
    raise AssertionError("unreachable")


def _new_records(job: Job) -> Iterator[Record | None]:
    """Yield the records that are written from now on, and None after each pause without one."""
    with (job.directory / "journal.jsonl").open("rb") as file:
        file.seek(0, 2)
        rest = b""
        while True:
            lines = (rest + file.read()).splitlines(keepends=True)
            rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
            yield from map(json.loads, lines)
            if not lines:
                yield None
                time.sleep(_POLL)


def wait_until_complete(job: Job, workers: int, timeout: float = 60.0) -> int:
    """Wait for a round from now on of so many members; return its number."""

    def is_complete(record: Record) -> bool:
        return record["record"] == "round" and len(record["members"]) >= workers

    return int(await_record(job, is_complete, timeout)["round"])


def name_of(network: LocalNetwork, peer: str) -> str:
    """Return the name of the node with a peer id."""
    [name] = [name for name in network.daemons if network.peer_id(name) == peer]
    return name


def servers_of(job: Job) -> list[str]:
    """Return the peer ids of the parameter servers by term."""
    return [record["server"] for record in job.records("term")]


def first_round_with(job: Job, peer: str, after: int) -> int | None:
    """Return the first round after another in which an update of a worker counts."""
    members = ((record["round"], {member["peer"] for member in record["members"]}) for record in job.records("round"))
    return next((number for number, peers in members if number > after and peer in peers), None)


def rounds_done_again(job: Job) -> set[int]:
    """Return the rounds whose members were announced to more than one parameter server."""
    terms = defaultdict(set)
    for record in job.records("announced"):
        terms[record["round"]].add(record["term"])
    return {number for number, found in terms.items() if len(found) > 1}


def cut_last_record(job: Job) -> Record:
    """Cut the last record of a journal in the middle, as a crash while it is written does; return the record."""
    path = job.directory / "journal.jsonl"
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    os.truncate(path, len(whole) - len(last) // 2)
    record: Record = json.loads(last)
    return record


def refusal_of(network: LocalNetwork, job: Job, sender: str, receiver: str, kind: str, term: int) -> str | None:
    """Push an update of the open round under a term, as one node to another; return why it is refused, if it is.

    The sender's identity and task are its own ones, so that only the term may be wrong.
    """
    content = b"an update"
    leases = [lease for name in ("placed", "leased") for record in job.records(name) for lease in record["leases"]]
    own = {lease["peer"]: lease["lease"] for lease in leases}[network.peer_id(sender)]
    started = [record for record in job.records("started") if record["lease"] == own][-1]
    certificates = (network.folders.certificates / f"{sender}-{part}.pem" for part in ("cert", "key", "trust"))
    header = PushHeader(
        attempt=AttemptId(uuid.UUID(job.directory.name), started["task"], started["attempt"]),
        round=len(job.records("round")) + 1,
        kind=kind,
        name="update.safetensors",
        size=len(content),
        digest=f"blake3:{blake3(content).hexdigest()}",
        scheduler=PeerId.parse(network.peer_id(job.name)),
        term=term,
    )

    async def push() -> str | None:
        settings = EndpointSettings(listen_addresses=(), relay_circuit=False)
        async with open_endpoint(load_identity(*certificates), settings) as endpoint:
            peer = await endpoint.connect(network.nodes[receiver].address, timeout=10.0)
            try:
                await transfer.push(endpoint, peer, content, header, timeout=10.0)
            except TransferRefusedError as refused:
                return refused.reason
        return None

    return anyio.run(push, backend="trio")
