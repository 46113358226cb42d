"""The parameter server of a training job: which peer it is now, and under which term.

The task's settings name the first one; the scheduler may replace it. The executor notices nothing: its update of the
open round is sent once more, and an outer update that the server before has not delivered is pulled from the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import msgspec

from hypha_net import retries
from hypha_proto.commands import ChangeServer, CommandAnswer
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference, TrainConfig
from hypha_proto.transfer import OUTER_UPDATE, PushHeader
from hypha_worker.errors import BridgeError
from hypha_worker.tasks.spec_references import reference_peers

if TYPE_CHECKING:
    from hypha_worker.bridge.training import TrainingBridge


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


_log = logging.getLogger(__name__)


class ServerChanges:
    """Changes of the parameter server of one attempt."""

    def __init__(self, training: TrainingBridge) -> None:
        """Prepare; `run` sends updates again, and pulls outer updates."""
        self._training = training
        self._server = training.server
        self._next: ChangeServer | None = None
        self._changed = anyio.Event()

    def handle(self, number: int, command: ChangeServer) -> CommandAnswer:
        """Go on with another parameter server; a repeated command changes nothing."""
        if (reason := self._server.reason_against(command.server, command.term)) is not None:
            return CommandAnswer(number=number, accepted=False, reason=reason)
        if self._server.replace(command.server, command.term):
            job = self._training.context.attempt.job_id
            _log.info("parameter server of job %s is %s, term %d", job, command.server, command.term)
            self._training.queue.change_senders(self._server.senders, command.term)
            self._next = command
            self._changed.set()
        return CommandAnswer(number=number, accepted=True, sends=self._training.updates.digest_of(command.round))

    async def run(self) -> None:
        """Send and pull what a new parameter server makes necessary, until cancelled."""
        while True:
            while (command := self._next) is None:
                self._changed = anyio.Event()
                await self._changed.wait()
            self._next = None
            with self._server.until_replaced():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._training.updates.send_again, command.round)
                    tasks.start_soon(self._pull_outer_update, command)

    async def _pull_outer_update(self, command: ChangeServer) -> None:
        """Pull the outer update of the round before from the scheduler, and queue it as if it had been pushed."""
        number, digest, address = command.round - 1, command.update, command.outer_update
        if digest is None or address is None:
            return
        failures, queue = 0, self._training.queue
        while not queue.has_passed(number, digest):
            path = queue.new_path()
            try:
                pulled = await self._training.pull_outer_update(address, path, digest)
            except BridgeError as error:
                path.unlink(missing_ok=True)
                _log.warning("outer update of round %d could not be pulled: %s", number, error.detail)
                await retries.MISSED_UPDATE.wait(failures)
                failures += 1
                continue
            header = PushHeader(
                attempt=self._training.context.attempt,
                round=number,
                kind=OUTER_UPDATE,
                name=f"outer-{number}.safetensors",
                size=pulled.size,
                digest=pulled.digest,
                scheduler=self._training.context.scheduler,
                term=command.term,
            )
            queue.add_pulled(command.server, header, path)
            return
