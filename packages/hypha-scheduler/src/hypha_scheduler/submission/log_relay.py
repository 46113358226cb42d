"""Asks the workers of a job what its executors have printed, for the clients of the scheduler's socket."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import msgspec

from hypha_net import rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.job_logs import LIST_LOGS, MAX_TEXT, READ_LOG, ListLogs, ReadLog

_TIMEOUT: Final = 10.0
"""Seconds for a worker's answer."""
_MAX_REQUESTS: Final = 16
"""Requests to workers at a time; further ones wait."""


@dataclass(slots=True)
class LogRelay:
    """Requests for logs, each of one worker."""

    endpoint: Endpoint
    _requests: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(_MAX_REQUESTS))

    async def ask(self, job_id: uuid.UUID, worker: str, run: str | None, position: int) -> dict[str, Any]:
        """Return the fields of `LogsListed`, or with `run` those of `LogPart`; or ``error`` and ``code``."""
        try:
            peer = PeerId.parse(worker)
            async with self._requests:
                if run is None:
                    listed = await rpc.call(self.endpoint, peer, LIST_LOGS, ListLogs(job_id=job_id), timeout=_TIMEOUT)
                    return dict(msgspec.to_builtins(listed))
                request = ReadLog(job_id=job_id, run=run, position=position, limit=MAX_TEXT)
                return dict(
                    msgspec.to_builtins(await rpc.call(self.endpoint, peer, READ_LOG, request, timeout=_TIMEOUT))
                )
        except InvalidIdError as error:
            return {"error": f"worker: {error}", "code": "invalid"}
        except UnsupportedProtocolError:
            remedy = "its owner updates hypha-worker, or reads them there with `hypha-worker logs`"
            return {"error": f"it gives no logs to schedulers: {remedy}", "code": "unsupported"}
        except NetError as error:
            return {"error": str(error), "code": "unreachable"}
