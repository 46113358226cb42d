"""Targets of incoming pushes: files, as the callback of `serve_pushes` chooses for each push.

Called by `push_server`; calls `io.sinks`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from hypha_net.errors import NoSpaceError
from hypha_net.transfer.io.integrity import IncomingContent
from hypha_net.transfer.io.sinks import FileSink
from hypha_net.transfer.io.storage_quota import StorageQuota
from hypha_net.transfer.push_slots import SlotKey
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PushHeader


@dataclass(frozen=True, slots=True)
class FilePushTarget:
    """Accepts a push into a file."""

    path: Path
    max_bytes: int
    on_complete: Callable[[int, str], Awaitable[None]]
    """Awaited with size and digest when the file is complete at `path`, before the pusher gets its receipt."""
    slot: str | None = None
    """Of one peer's pushes into one slot only the last is received; earlier ones are cancelled."""
    quota: StorageQuota | None = None
    """Bounds what this and other transfers store together."""
    on_disk_error: Callable[[NoSpaceError | OSError], None] | None = None
    """Called when the file cannot be stored on this machine; the pusher gets a refusal."""


def slot_key(target: FilePushTarget, peer: PeerId, header: PushHeader) -> SlotKey:
    """Return the target's slot, or a key that only a repetition of this push shares.

    Equal content under another name is not a repetition: all empty files are equal.
    """
    if target.slot is not None:
        return peer, target.slot
    what = (header.job_id, header.lease, header.round, header.kind[:200], header.name[:200], header.digest)
    return peer, "\0".join((str(target.path.parent), *map(str, what)))


@asynccontextmanager
async def open_target(target: FilePushTarget, header: PushHeader) -> AsyncIterator[IncomingContent]:
    """Start receiving a push, or resume what is there of it; see `Sink.open`."""
    try:
        async with FileSink(target.path, target.quota).open(header.size, header.digest) as content:
            yield content
    except (NoSpaceError, OSError) as error:
        if target.on_disk_error is not None:
            target.on_disk_error(error)
        raise
