"""Resolver of pull requests: finds the slice or manifest that a peer asks for.

The peer is a worker to which a scheduler assigned the slice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import anyio

from hypha_data.verification import SliceVerifier, VerifiedSlice
from hypha_net import instrumentation
from hypha_net.transfer import PullSource, TransferError
from hypha_proto.ids import PeerId
from hypha_proto.texts import quote
from hypha_proto.transfer import PullRequest, Refusal

_log = logging.getLogger(__name__)

_SERVED: Final = instrumentation.Counter("hypha.data.slices", "{slice}", "Slices that were given to workers.")


OPEN_TIMEOUT: Final = 20.0
"""Seconds that a request waits for its dataset to be opened; then it fails as if the node were away."""


class OpenDatasets:
    """Datasets of this node by name, some of which may still have to be read before they are open."""

    def __init__(self, names: Iterable[str]) -> None:
        """Start with none of the datasets `names` open."""
        self._opened: dict[str, SliceVerifier] = {}
        self._events = {name: anyio.Event() for name in names}

    def add(self, verifier: SliceVerifier) -> None:
        """Serve a dataset from now on."""
        self._opened[verifier.dataset.name] = verifier
        self._events[verifier.dataset.name].set()

    async def find(self, name: str) -> SliceVerifier | None:
        """Return the dataset `name` once it is open, or None if there is none of this name.

        Raises:
            TransferError: it was not open within `OPEN_TIMEOUT`.
        """
        if name not in self._events:
            return None
        with anyio.move_on_after(OPEN_TIMEOUT):
            await self._events[name].wait()
            return self._opened[name]
        raise TransferError(f"dataset {name} is still being read")

    async def resolve(self, peer: PeerId, request: PullRequest) -> PullSource | Refusal:
        """Find what a peer requests: a slice by index, or the dataset's ``manifest``."""
        verifier = await self.find(request.dataset)
        if verifier is None:
            return Refusal(reason=f"no dataset {quote(request.dataset)} here; there are: {', '.join(self._events)}")
        dataset = verifier.dataset
        if request.name == "manifest":
            return PullSource(dataset.manifest_json, dataset.digest)
        if request.name is not None or request.index >= len(dataset.manifest.slices):
            what = quote(request.name) if request.name is not None else f"slice {request.index}"
            return Refusal(reason=f"dataset {dataset.name} has {len(dataset.manifest.slices)} slices, no {what}")
        verified = await verifier.verify(request.index)
        if verified is None:
            return Refusal(reason=f"slice {request.index} of {dataset.name} is not what was announced")
        _SERVED.add(1, {"hypha.dataset": dataset.name})
        _log.info("slice %d of %s for %s, %d bytes", request.index, dataset.name, peer, verified.fingerprint.size)
        return PullSource(verified.path, verified.entry.digest, lambda: _check_unchanged(verifier, verified))


async def _check_unchanged(verifier: SliceVerifier, verified: VerifiedSlice) -> None:
    """Raise `TransferError` if the file of a slice has changed since it was verified, so that its end is not sent."""
    if await verifier.is_unchanged(verified):
        return
    await verifier.verify(verified.index)  # logs what it contains now
    raise TransferError(f"slice {verified.index} of {verifier.dataset.name} changed while it was sent")
