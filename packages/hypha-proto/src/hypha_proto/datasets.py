"""Datasets: requesting the next slice of one, and the DHT record and manifest that describe it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Final, cast

from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.protocols import API, RpcMethod
from hypha_proto.wire_schema import EXTERNAL, OMIT, U32, U64, Digest, IntRange, Message, Newtype, Unit

SAFETENSORS: Final = "safetensors"
"""Format of slices whose tensors share their first dimension, the samples."""
JSONL: Final = "jsonl"
"""Format of slices with one JSON object a line, in UTF-8: https://jsonlines.org."""
MANIFEST: Final = "manifest.json"
"""Name of a `Manifest` in the folder of its slices."""
MAX_MANIFEST: Final = 256 << 20
"""Bytes of a manifest, at most."""
MAX_ASSIGNED: Final = 32
"""Slices that one request may ask for, at most."""
SliceCount = Annotated[int, IntRange(1, MAX_ASSIGNED)]
SLICE_SUFFIXES: Final[Mapping[str, str]] = {SAFETENSORS: ".safetensors", JSONL: ".jsonl"}
"""Suffix of a slice's file name by the dataset's format."""


class ProviderFailure(Message, frozen=True):
    """Why one data node could not provide a slice."""

    provider: PeerId
    reason: str
    """One line for people."""


class UnusableSlice(Message, frozen=True):
    """Report that no provider of an assigned slice has it as the manifest describes it."""

    index: U64
    """Position of the slice in the dataset, from 0."""
    failures: tuple[ProviderFailure, ...]
    """One entry for each provider that was asked."""
    epoch: Annotated[U32 | None, OMIT] = None
    """`SliceAssigned.epoch` of the assignment."""


class DataRequest(Message, frozen=True):
    """Request of a worker to its scheduler for further slices."""

    attempt: AttemptId
    dataset: str
    id: uuid.UUID
    """Idempotency key: unchanged when the request is repeated for lack of a response, so that it counts once."""
    traceparent: Annotated[str | None, OMIT] = None
    unusable: Annotated[UnusableSlice | None, OMIT] = None
    """Slice that was assigned before and cannot be used; this request is for one in its place."""
    most: Annotated[SliceCount | None, OMIT] = None
    """Number of slices to assign at most, answered with `SlicesAssigned`; None asks for one, as `SliceAssigned`."""
    ahead: Annotated[bool | None, OMIT] = None
    """True for an executor that is not ready yet: it asks with which round it begins before it uses the slices."""


class AssignedSlice(Message, frozen=True):
    """Slice `index`, to be pulled from `data_provider`."""

    data_provider: PeerId
    index: U64
    """Position of the slice in the dataset, from 0."""
    epoch: Annotated[U32 | None, OMIT] = None
    """Pass over the dataset that the slice belongs to, from 0."""
    digest: Annotated[Digest | None, OMIT] = None
    """Digest of the slice file, where the manifest gives one."""
    others: Annotated[tuple[PeerId, ...] | None, OMIT] = None
    """Further providers of the same slice, to try when `data_provider` fails."""
    format: Annotated[str | None, OMIT] = None
    """`Manifest.format` of the dataset."""
    first: Annotated[U64 | None, OMIT] = None
    """Position of the first sample to use in the slice's order; None means 0."""
    end: Annotated[U64 | None, OMIT] = None
    """Position after the last sample to use; None means all that follow."""


class SliceAssigned(AssignedSlice, frozen=True, tag="Success"):
    """Assignment of one slice."""


class SlicesAssigned(Message, frozen=True, tag="Slices"):
    """Assignment of one or more slices, to be used in this order."""

    slices: tuple[AssignedSlice, ...]


class NotFound(Unit, frozen=True, tag="NotFound"):
    """The requested item does not exist."""


class WireError(Newtype, frozen=True, tag="Error"):
    """Failure with a message for people."""

    message: str


SlicesAnswer = SliceAssigned | SlicesAssigned | NotFound | WireError
DATA: Final = RpcMethod(API, DataRequest, cast(type[SlicesAnswer], Annotated[SlicesAnswer, EXTERNAL]), "Data")


NO_FREE_SLICE: Final = "no slice is free yet; ask again"
"""Message of a `WireError` after which a worker may ask again: all slices are assigned, and some may be returned. It is
a message because a `WireError` has no other field."""


class DatasetRecord(Message, frozen=True):
    """Record (JSON) that a data node announces in the DHT under the dataset's name."""

    num_slices: U64
    seq: Annotated[U64 | None, OMIT] = None
    """Sequence number; increases with every announcement of one publisher."""
    manifest: Annotated[Digest | None, OMIT] = None
    """Digest of the dataset's manifest (`Manifest` as JSON)."""
    withheld: Annotated[tuple[U64, ...] | None, OMIT] = None
    """Indices of slices that this publisher does not serve, because its files do not match the manifest."""


class ContentRecord(Message, frozen=True):
    """Record (JSON) that a holder of a file announces in the DHT under the file's SHA-256."""

    size: U64
    """Size in bytes."""


class SliceEntry(Message, frozen=True):
    """One slice in a manifest."""

    file: str
    """Name of the file that holds the slice."""
    samples: U64
    """Number of samples in the slice."""
    size: U64
    """Size in bytes."""
    digest: Digest


class Manifest(Message, frozen=True):
    """List of a dataset's slices; pulled from a data node as the file ``manifest``."""

    dataset: str
    slices: tuple[SliceEntry, ...]
    format: Annotated[str | None, OMIT] = None
    """Format of the slices, a key of `SLICE_SUFFIXES`; None means `SAFETENSORS`."""
    columns: Annotated[dict[str, str] | None, OMIT] = None
    """Name and kind of each column, None where unknown.

    A tensor's kind is dtype and shape of one sample, such as ``float32[3,32,32]``; a JSON column's is ``text``,
    ``number``, ``integer``, ``boolean``, ``object`` or ``list``, or ``null`` if it has no other value.
    """
    labels: Annotated[tuple[str, ...] | None, OMIT] = None
    """Names of the classes that the tensor ``labels`` numbers, in the order of their numbers; None where unknown."""
