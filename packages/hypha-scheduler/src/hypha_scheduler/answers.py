"""Answers that were given, for peers that ask again because one did not reach them: what they said counts once."""

from __future__ import annotations

import uuid
from collections import OrderedDict, defaultdict
from typing import Final, Generic, TypeVar

from hypha_proto.ids import PeerId

Answer = TypeVar("Answer")

KEPT: Final = 32
"""Answers of each peer; it asks for a few things at a time, and again within seconds."""


class ResponseCache(Generic[Answer]):
    """The last answers to each peer, by the ids of its requests."""

    def __init__(self) -> None:
        self._given: defaultdict[PeerId, OrderedDict[uuid.UUID, Answer]] = defaultdict(OrderedDict)

    def given(self, peer: PeerId, request: uuid.UUID | None) -> Answer | None:
        """What was answered to this request before; none if nothing was, or it has no id."""
        return None if request is None or peer not in self._given else self._given[peer].get(request)

    def note(self, peer: PeerId, request: uuid.UUID | None, answer: Answer) -> Answer:
        """Keep an answer, and return it."""
        if request is not None:
            answers = self._given[peer]
            answers[request] = answer
            if len(answers) > KEPT:
                answers.popitem(last=False)
        return answer
