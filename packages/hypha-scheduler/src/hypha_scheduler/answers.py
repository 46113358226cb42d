"""Answers that were given, for peers that ask again because one did not reach them: what they said counts once."""

from __future__ import annotations

import uuid
from collections import OrderedDict, defaultdict
from typing import Final, Generic, TypeVar

from hypha_proto.ids import PeerId

Response = TypeVar("Response")

MAX_PER_PEER: Final = 32
"""Answers of each peer; it asks for a few things at a time, and again within seconds."""


class ResponseCache(Generic[Response]):
    """The last answers to each peer, by the ids of its requests."""

    def __init__(self) -> None:
        self._responses: defaultdict[PeerId, OrderedDict[uuid.UUID, Response]] = defaultdict(OrderedDict)

    def get(self, peer: PeerId, request: uuid.UUID | None) -> Response | None:
        """What was answered to this request before; none if nothing was, or it has no id."""
        return None if request is None or peer not in self._responses else self._responses[peer].get(request)

    def put(self, peer: PeerId, request: uuid.UUID | None, answer: Response) -> Response:
        """Keep an answer, and return it."""
        if request is not None:
            answers = self._responses[peer]
            answers[request] = answer
            if len(answers) > MAX_PER_PEER:
                answers.popitem(last=False)
        return answer
