"""Idempotency cache: earlier responses, returned again to peers that repeat a request because the response was lost."""

from __future__ import annotations

import uuid
from collections import OrderedDict, defaultdict
from typing import Final, Generic, TypeVar

from hypha_proto.ids import PeerId

Response = TypeVar("Response")

MAX_PER_PEER: Final = 32
"""Responses kept for each peer, which has few requests in flight and repeats them within seconds."""


class ResponseCache(Generic[Response]):
    """Last responses to each peer, by request id."""

    def __init__(self) -> None:
        self._responses: defaultdict[PeerId, OrderedDict[uuid.UUID, Response]] = defaultdict(OrderedDict)

    def get(self, peer: PeerId, request: uuid.UUID | None) -> Response | None:
        """Return the earlier response to a request, or None if there is none or the request has no id."""
        return None if request is None or peer not in self._responses else self._responses[peer].get(request)

    def put(self, peer: PeerId, request: uuid.UUID | None, response: Response) -> Response:
        """Store a response and return it."""
        if request is not None:
            responses = self._responses[peer]
            responses[request] = response
            if len(responses) > MAX_PER_PEER:
                responses.popitem(last=False)
        return response
