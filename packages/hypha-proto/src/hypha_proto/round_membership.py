"""The members of a round, and the parameter server's report of an update that it cannot use."""

from __future__ import annotations

from typing import Annotated, Final

from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.protocols import AGGREGATE, RpcMethod
from hypha_proto.wire_schema import OMIT, U32, U64, Digest, Message


class Member(Message, frozen=True):
    """One contributor to a round."""

    peer: PeerId
    samples: U64
    """Number of samples behind its update: the weight in the mean."""
    update: Annotated[Digest | None, OMIT] = None
    """Digest of its update as stated to the scheduler; an update with another digest is refused."""


class UpdateRefused(Message, frozen=True):
    """Report of the parameter server to the scheduler that it cannot use a member's update."""

    attempt: AttemptId
    """Attempt of the parameter server."""
    round: U32
    peer: PeerId
    """The member."""
    reason: str
    missing: Annotated[bool | None, OMIT] = None
    """Whether the update did not arrive in time; its content is then not at fault."""
    traceparent: Annotated[str | None, OMIT] = None


class RefusalKnown(Message, frozen=True):
    """Acknowledgement of `UpdateRefused`."""


UPDATE_REFUSED: Final = RpcMethod(AGGREGATE, UpdateRefused, RefusalKnown, "UpdateRefused")
