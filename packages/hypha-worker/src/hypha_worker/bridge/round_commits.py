"""What a task that trains asks its scheduler about rounds: which one to begin with, whether an update may be sent, and
whether an outer update is committed.

Only jobs whose `TrainConfig` has a `term` ask.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from hypha_net import retries
from hypha_net.errors import NetError
from hypha_proto.attempt_id import AttemptId
from hypha_proto.contributions import (
    AWAIT_COMMIT,
    MAX_RANGES,
    OPTIMIZER_KEPT,
    OPTIMIZER_RESET,
    STATE_CONTRIBUTION,
    AwaitCommit,
    CommitStatus,
    Contribution,
    ContributionKnown,
    StateContribution,
)
from hypha_proto.job_membership import JOIN_ROUND, JoinRound, RoundToJoin
from hypha_proto.protocols import RpcMethod
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.errors import bad_request, to_bridge_error

Req = TypeVar("Req")
Resp = TypeVar("Resp")

TIMEOUT: Final = 40.0
"""Seconds that one request may take; the scheduler answers `AwaitCommit` within about 20."""


@dataclass(frozen=True, slots=True)
class RoundClient:
    """The rounds of one job, as its scheduler records them."""

    attempt: AttemptId
    contact: SchedulerContact
    """Reaches the scheduler, and knows whether it has taken up the job, if it was started again."""

    async def state_contribution(
        self, round_number: int, update: str, samples: int, contribution: Contribution | None
    ) -> ContributionKnown:
        """Tell the scheduler that an update is about to be sent; return its answer.

        Waits while it cannot be reached, for as long as the task runs.

        Args:
            round_number: round of the update.
            update: digest of its file.
            samples: number of samples that the executor states; 0 if none.
            contribution: what the executor states; None if it states nothing.

        Raises:
            BridgeError: the contribution is too large.
        """
        statement = StateContribution(
            attempt=self.attempt,
            round=round_number,
            update=update,
            samples=samples,
            contribution=contribution,
            id=uuid.uuid4(),
        )
        return await self._ask(STATE_CONTRIBUTION, statement)

    async def wait(self, round_number: int, update: str) -> CommitStatus:
        """Wait until the scheduler has committed an outer update, or never will; return its answer."""
        question = AwaitCommit(self.attempt, round_number, update)
        return await self._ask_until(AWAIT_COMMIT, question, lambda answer: answer.committed or bool(answer.reason))

    async def join(self) -> RoundToJoin:
        """Wait until the scheduler says with which round the executor begins, or that it never will."""
        question = JoinRound(self.attempt)
        return await self._ask_until(
            JOIN_ROUND, question, lambda answer: answer.round is not None or bool(answer.reason)
        )

    async def _ask_until(self, method: RpcMethod[Req, Resp], question: Req, is_decided: Callable[[Resp], bool]) -> Resp:
        """Ask, with pauses, until the answer is a decision."""
        asked = 0
        while not is_decided(answer := await self._ask(method, question)):
            await retries.ROUND.wait(asked)
            asked += 1
        return answer

    async def _ask(self, method: RpcMethod[Req, Resp], request: Req) -> Resp:
        """Repeat a request until it is answered."""
        try:
            return await self.contact.call(
                method, request, is_refusal=_is_refusal, timeout=TIMEOUT, policy=retries.ROUND
            )
        except NetError as error:
            raise to_bridge_error(error) from error


def _is_refusal(answer: object) -> bool:
    """Return whether a scheduler that has not taken up the job yet may have given an answer for this reason."""
    if isinstance(answer, ContributionKnown):
        return not answer.accepted
    return isinstance(answer, (CommitStatus, RoundToJoin)) and bool(answer.reason)


def check_contribution(contribution: Contribution, round_number: int, update: str) -> None:
    """Check what an executor states about the update that it sends.

    Args:
        contribution: what it states.
        round_number: round of the update.
        update: digest of the file, computed here.

    Raises:
        BridgeError: it does not describe this update, or a range holds no sample.
    """
    if contribution.round != round_number:
        raise bad_request(
            f"contribution.round: {contribution.round} is not {round_number}, the round of the request: state the same"
        )
    if contribution.update != update:
        raise bad_request(
            f"contribution.update: {contribution.update} is not {update}, the digest of the file: compute it when the "
            "file is complete"
        )
    if contribution.optimizer not in (OPTIMIZER_KEPT, OPTIMIZER_RESET):
        raise bad_request(
            f"contribution.optimizer: {contribution.optimizer!r} is neither {OPTIMIZER_KEPT!r} nor "
            f"{OPTIMIZER_RESET!r}: state what the inner optimizer began with"
        )
    if len(contribution.ranges) > MAX_RANGES:
        raise bad_request(
            f"contribution.ranges: {len(contribution.ranges)} are more than {MAX_RANGES}: merge consecutive ones"
        )
    for number, span in enumerate(contribution.ranges):
        if span.first >= span.end:
            raise bad_request(
                f"contribution.ranges[{number}]: first {span.first} is not before end {span.end}: leave empty ones out"
            )
