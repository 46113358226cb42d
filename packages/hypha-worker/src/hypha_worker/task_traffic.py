"""Traffic of one task: the bytes of its files, whichever way they come or go."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypha_net.transfer import FilePushTarget


@dataclass(slots=True)
class TaskTraffic:
    """Bytes of complete files, without what the protocols add."""

    sent: int = 0
    """Of pushes, to each peer; repeated ones included."""
    received: int = 0
    """Of pushes, pulls and downloads."""

    def counting(self, target: FilePushTarget) -> FilePushTarget:
        """Return a push target that also counts what it receives."""

        async def on_complete(size: int, digest: str) -> None:
            self.received += size
            await target.on_complete(size, digest)

        return replace(target, on_complete=on_complete)
