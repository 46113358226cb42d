"""Tells a training job of another parameter server, when the scheduler says so.

Called by `executors.process` with `ServerChanged`. The executor notices nothing: its update of the open round is sent
once more, and an outer update that the server before has not delivered is pulled from the scheduler.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio

from hypha_net import backoff
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import ServerChanged, ServerKnown
from hypha_proto.transfer import OUTER_UPDATE, PushHeader
from hypha_worker.bridge.backend import JobBridgeBackend
from hypha_worker.bridge.delivery_queue import DeliveryQueue
from hypha_worker.errors import BridgeError

_log = logging.getLogger(__name__)

PAUSES: Final = (1.0, 2.0, 5.0, 10.0)
"""Seconds before an outer update is pulled from the scheduler again; the last repeats."""


class ServerChanges:
    """Changes of the parameter server of one job."""

    def __init__(self, backend: JobBridgeBackend, queue: DeliveryQueue) -> None:
        """Prepare; `run` sends and pulls files.

        Args:
            backend: the job's bridge.
            queue: gets outer updates that were pulled.
        """
        self._backend = backend
        self._server = backend.server
        self._queue = queue
        self._next: ServerChanged | None = None
        self._changed = anyio.Event()

    async def handle(self, _scheduler: PeerId, message: ServerChanged) -> ServerKnown:
        """Go on with another parameter server; a repeated message changes nothing."""
        if message.lease != self._backend.lease:
            return ServerKnown(accepted=False, reason=f"lease: the job runs here on another lease than {message.lease}")
        if (reason := self._server.reason_against(message.server, message.term)) is not None:
            return ServerKnown(accepted=False, reason=reason)
        if self._server.replace(message.server, message.term):
            _log.info("parameter server of job %s is %s, term %d", message.job_id, message.server, message.term)
            self._queue.change_senders(self._server.senders, message.term)
            self._next = message
            self._changed.set()
        return ServerKnown(accepted=True, sends=self._backend.updates.digest_of(message.round))

    async def run(self) -> None:
        """Send and pull what a new parameter server makes necessary, until cancelled."""
        while True:
            while (message := self._next) is None:
                self._changed = anyio.Event()
                await self._changed.wait()
            self._next = None
            with self._server.until_replaced():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._backend.updates.send_again, message.round)
                    tasks.start_soon(self._pull_outer_update, message)

    async def _pull_outer_update(self, message: ServerChanged) -> None:
        """Pull the outer update of the round before from the scheduler, and queue it as if it had been pushed."""
        number, digest, address = message.round - 1, message.update, message.outer_update
        if digest is None or address is None:
            return
        failures = 0
        while not self._queue.has_passed(number, digest):
            path = self._queue.new_path()
            try:
                pulled = await self._backend.pull_from_scheduler(address, path, digest)
            except BridgeError as error:
                path.unlink(missing_ok=True)
                _log.warning("outer update of round %d could not be pulled: %s", number, error.detail)
                await anyio.sleep(backoff.jittered(PAUSES, failures))
                failures += 1
                continue
            header = PushHeader(
                job_id=message.job_id,
                round=number,
                kind=OUTER_UPDATE,
                name=f"outer-{number}.safetensors",
                size=pulled.size,
                digest=pulled.digest,
                scheduler=self._backend.scheduler,
                term=message.term,
            )
            self._queue.add_pulled(message.server, header, path)
            return
