"""Sends an executor's updates to the current parameter server, and once more to one that takes its place.

Of the newest update the file stays open until the executor sends the next one or begins anew, whatever becomes of its
path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from io import FileIO
from typing import Final

import anyio
import msgspec

from hypha_net import retries
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference
from hypha_proto.transfer import NO_JOB, NO_ROOM, PushHeader
from hypha_worker.bridge.current_server import CurrentServer
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import BridgeError, PushRefusedError, update_refused

_log = logging.getLogger(__name__)

_TERM_OVER: Final = "term:"
"""Begin of the reason of a parameter server that is not the one of the update's term."""


@dataclass(slots=True)
class _KeptUpdate:
    reference: PeersReference
    """Its receivers, as the job's specification names them."""
    header: PushHeader
    file: FileIO
    is_delivered: bool = False
    """Whether a parameter server has confirmed it."""


class UpdateSender:
    """Sends the updates of one executor."""

    def __init__(self, files: PeerFiles, server: CurrentServer, *, waits: bool) -> None:
        """Prepare.

        Args:
            files: pushes files.
            server: the parameter server.
            waits: whether the parameter server may be replaced, so that an update waits while it is away.
        """
        self._files = files
        self._server = server
        self._waits = waits
        self._newest: _KeptUpdate | None = None

    def keep(self, reference: PeersReference, file: FileIO, header: PushHeader) -> None:
        """Keep the update of a round, which is about to be stated and sent, in place of the one before."""
        self.forget()
        self._newest = _KeptUpdate(reference, header, _duplicate(file))

    def forget(self) -> None:
        """Keep no update any more: its round goes on without it."""
        if self._newest is not None:
            self._newest.file.close()
            self._newest = None

    def digest_of(self, number: int) -> str | None:
        """Return the digest of the kept update if it is of round `number`."""
        update = self._newest
        return update.header.digest if update is not None and update.header.round == number else None

    async def send(self, state_again: Callable[[], Awaitable[object]]) -> dict[PeerId, int]:
        """Push the kept update to the parameter server; return the bytes sent.

        Where the parameter server may be replaced, it is pushed until one has it or the job ends.

        Args:
            state_again: called before it is pushed to the same parameter server again; raises if the round goes on
                without the update.

        Raises:
            BridgeError: it is refused; or not delivered, and the parameter server is not replaced.
        """
        update, failures = self._newest, 0
        assert update is not None
        with _duplicate(update.file) as file:
            while True:
                term = self._server.term
                if (sent := await self._attempt(update, file, failures)) is not None:
                    return sent
                failures += 1
                if term == self._server.term:
                    await state_again()

    async def send_again(self, number: int) -> None:
        """Push the kept update to a new parameter server, if it is of round `number` and another one had it."""
        update, failures = self._newest, 0
        if update is None or update.header.round != number or not update.is_delivered:
            return  # one that is under way goes to the new parameter server anyway
        _log.info("update of round %d is sent to the parameter server of term %s", number, self._server.term)
        with _duplicate(update.file) as file:
            while self._newest is update:
                try:
                    if await self._attempt(update, file, failures) is not None:
                        return
                except BridgeError as error:
                    _log.warning("the update of round %d was not sent again: %s", number, error.detail)
                    return
                failures += 1

    async def _attempt(self, update: _KeptUpdate, file: FileIO, failures: int) -> dict[PeerId, int] | None:
        """Push an update once; return None, after a pause, if it is to be pushed again."""
        term = self._server.term
        header = msgspec.structs.replace(update.header, term=term)
        try:
            with self._server.until_replaced():
                sent = await self._files.push(self._server.translate_reference(update.reference), file, header)
                if term == self._server.term:
                    update.is_delivered = True
                    return sent
        except BridgeError as error:
            if not self._waits or not _may_succeed_later(error):
                raise _as_refusal(error) from error
            pause = retries.UPDATE.pause(failures)
            _log.info("update of round %d is sent again in %.1f s: %s", header.round, pause, error.detail)
            with self._server.until_replaced():
                await anyio.sleep(pause)
        return None


def _duplicate(file: FileIO) -> FileIO:
    return FileIO(os.dup(file.fileno()))


def _may_succeed_later(error: BridgeError) -> bool:
    """Return whether an update that was not delivered may be, later or to another parameter server."""
    if not isinstance(error, PushRefusedError):
        return True
    return all(reason.startswith((NO_ROOM, NO_JOB, _TERM_OVER)) for reason in error.reasons)


def _as_refusal(error: BridgeError) -> BridgeError:
    """Return what the executor is answered: a refused update costs it its round only."""
    return update_refused(error.detail) if isinstance(error, PushRefusedError) else error
