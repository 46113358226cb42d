"""Dataset listing: the datasets that data nodes announce to a gateway, in pages, by name.

Uses the extension ``/hypha-directory/0.1.0``, which gateways answer.
"""

from __future__ import annotations

from typing import Annotated, Final

from hypha_proto.protocols import DIRECTORY, RpcMethod
from hypha_proto.wire_schema import OMIT, U32, U64, Digest, Message

MAX_PAGE: Final = 1000
"""Datasets in one answer."""
MAX_NAME: Final = 255
"""Characters in the name of a dataset; longer ones are not listed."""


def is_listable(name: str) -> bool:
    """Return whether a dataset's name may be listed: not empty, of at most `MAX_NAME` characters, all printable."""
    return 0 < len(name) <= MAX_NAME and name.isprintable()


class ListDatasets(Message, frozen=True):
    """Request for the datasets that are announced to a gateway."""

    after: Annotated[str | None, OMIT] = None
    """Name after which the page begins; None for the first page."""
    limit: Annotated[U32 | None, OMIT] = None
    """Maximum number of datasets in the answer; None and larger numbers mean `MAX_PAGE`."""


class ListedDataset(Message, frozen=True):
    """A dataset as its data nodes announce it, not verified."""

    name: str
    num_slices: U64
    """As in the newest record."""
    providers: U32
    """Data nodes whose records have not expired."""
    manifests: U32
    """Different manifests among the providers' records; records without a manifest count as one."""
    manifest: Annotated[Digest | None, OMIT] = None
    """Digest of the manifest, as in the newest record."""


class DatasetPage(Message, frozen=True):
    """One page of the list, in the order of the names' code points."""

    datasets: tuple[ListedDataset, ...]
    next: Annotated[str | None, OMIT] = None
    """`ListDatasets.after` of the next page; None on the last one."""


LIST_DATASETS: Final = RpcMethod(DIRECTORY, ListDatasets, DatasetPage, max_request=4 << 10, max_response=2 << 20)
