"""Slices of datasets: which one a worker gets next, and the record by which a dataset is found."""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.dispatch import NotFound, WireError
from hypha_proto.ids import PeerId
from hypha_proto.protocols import API, RpcMethod
from hypha_proto.wire_schema import EXTERNAL, OMIT, U32, U64, Digest, Message


class DataRequest(Message, frozen=True):
    """A worker asks its scheduler for one more slice."""

    dataset: str
    job_id: Annotated[uuid.UUID | None, OMIT] = None
    traceparent: Annotated[str | None, OMIT] = None
    id: Annotated[uuid.UUID | None, OMIT] = None
    """Of this request: the same when it is sent again because no answer came, so that it counts once."""


class SliceAssigned(Message, frozen=True, tag="Success"):
    """The slice `index`, to be pulled from `data_provider`."""

    data_provider: PeerId
    index: U64
    epoch: Annotated[U32 | None, OMIT] = None
    """Which pass over the dataset this belongs to, from 0."""
    digest: Annotated[Digest | None, OMIT] = None
    others: Annotated[tuple[PeerId, ...] | None, OMIT] = None
    """Who else has this very slice, to be asked when `data_provider` does not give it."""


DATA: Final = RpcMethod[DataRequest, SliceAssigned | NotFound | WireError](
    API, DataRequest, Annotated[SliceAssigned | NotFound | WireError, EXTERNAL], "Data"
)


class DatasetRecord(Message, frozen=True):
    """What a data node announces in the DHT under the dataset's name (JSON)."""

    num_slices: U64
    seq: Annotated[U64 | None, OMIT] = None
    """Grows with every announcement by one publisher."""
    manifest: Annotated[Digest | None, OMIT] = None
    """Digest of the dataset's manifest (JSON of `Manifest`)."""


class SliceEntry(Message, frozen=True):
    """One slice in a manifest."""

    file: str
    samples: U64
    size: U64
    """Bytes."""
    digest: Digest


class Manifest(Message, frozen=True):
    """What a dataset consists of: pulled from a data node as the file ``manifest``."""

    dataset: str
    slices: tuple[SliceEntry, ...]
