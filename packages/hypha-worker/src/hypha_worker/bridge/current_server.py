"""The parameter server of a training job: which peer it is now, and under which term.

The task's settings name the first one; `server_changes` replaces it when the scheduler says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import anyio
import msgspec

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference, TrainConfig
from hypha_worker.tasks.spec_references import reference_peers


class CurrentServer:
    """Translates the parameter server that a task's settings name into the current one."""

    def __init__(self, config: TrainConfig) -> None:
        self._named = reference_peers([config.updates])
        self._results = reference_peers([config.results])
        self._replacement: PeerId | None = None
        self._under_way: set[anyio.CancelScope] = set()
        self.term = config.term
        """Term of the current parameter server; None if the job has no terms."""

    @property
    def senders(self) -> frozenset[PeerId]:
        """Peers that send outer updates now."""
        return self.translate(self._results)

    def translate(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Return `peers` with the current parameter server in place of the one that the settings name."""
        return frozenset(self._translate(peer) for peer in peers)

    def translate_reference(self, reference: PeersReference) -> PeersReference:
        """Return a reference with the current parameter server in place of the one that the settings name."""
        peers = tuple(dict.fromkeys(map(self._translate, reference.peers)))
        return msgspec.structs.replace(reference, peers=peers)

    def _translate(self, peer: PeerId) -> PeerId:
        return self._replacement if self._replacement is not None and peer in self._named else peer

    def reason_against(self, peer: PeerId, term: int) -> str | None:
        """Return why `peer` is not the parameter server under `term`, or None if it is or may become it."""
        if self.term is None:
            return "term: the job has no terms"
        if term < self.term:
            return f"term: {term} is over, the parameter server of term {self.term} has taken its place"
        if term == self.term and self.translate(self._named) != {peer}:
            return f"server: another peer than {peer} is the parameter server of term {term}"
        return None

    def replace(self, peer: PeerId, term: int) -> bool:
        """Make `peer` the parameter server, against which there is no reason; return whether the term is new."""
        if self.term is not None and term <= self.term:
            return False
        self._replacement, self.term = peer, term
        for scope in self._under_way:
            scope.cancel()
        return True

    @contextmanager
    def until_replaced(self) -> Iterator[None]:
        """Cancel the body when the parameter server is replaced."""
        with anyio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                yield
            finally:
                self._under_way.discard(scope)
