"""Tells a task that trains of another parameter server, when the scheduler says so.

The executor notices nothing: its update of the open round is sent once more, and an outer update that the server before
has not delivered is pulled from the scheduler.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from hypha_net import retries
from hypha_proto.commands import ChangeServer, CommandAnswer
from hypha_proto.transfer import OUTER_UPDATE, PushHeader
from hypha_worker.errors import BridgeError

if TYPE_CHECKING:
    from hypha_worker.bridge.training import TrainingBridge

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
