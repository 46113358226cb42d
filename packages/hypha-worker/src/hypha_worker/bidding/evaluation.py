"""Evaluations: which of several competing requests a worker answers first.

The modules of the package `strategies` hold one each. They are imported when a name is looked up, so a further
evaluation is one new file there, or a class that registers itself with `register_evaluation` before the configuration
is read.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from typing import ClassVar, Final, TypeVar

from hypha_proto.resources import Resources
from hypha_worker.bidding import strategies
from hypha_worker.bidding.policy import OfferPolicy
from hypha_worker.bidding.request_batch import ReceivedRequest


class RequestEvaluation(ABC):
    """Scores requests; stateless."""

    name: ClassVar[str]
    """Value of the key ``offer.evaluation``."""

    @abstractmethod
    def score(self, received: ReceivedRequest, policy: OfferPolicy, free: Resources) -> tuple[float, ...]:
        """Return the score of a request; the largest tuple is answered first.

        Requests with equal scores alternate between their schedulers.
        """


E = TypeVar("E", bound=type[RequestEvaluation])
_registered: Final[dict[str, type[RequestEvaluation]]] = {}


def register_evaluation(evaluation: E) -> E:
    """Make an evaluation available under its name; use as a class decorator.

    Raises:
        ValueError: another evaluation has this name.
    """
    if _registered.setdefault(evaluation.name, evaluation) is not evaluation:
        raise ValueError(f"the evaluation {evaluation.name!r} is registered twice")
    return evaluation


def evaluation_names() -> tuple[str, ...]:
    """Return the names of all evaluations."""
    for module in pkgutil.iter_modules(strategies.__path__, f"{strategies.__name__}."):
        importlib.import_module(module.name)
    return tuple(sorted(_registered))


def find_evaluation(name: str) -> RequestEvaluation:
    """Return the evaluation of this name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    names = evaluation_names()
    if name not in names:
        raise ValueError(f"no such evaluation; there are {', '.join(names)}")
    return _registered[name]()
