"""The references in a task's spec: which peers the task may communicate with, and which secrets its process never sees.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec
from msgspec.structs import asdict, astuple

from hypha_net.redaction import has_url_secrets, without_url_secrets
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    HuggingFaceReference,
    PeersReference,
    Reference,
    SchedulerReference,
    TrainConfig,
    UriReference,
)
from hypha_proto.tasks import TaskSpec
from hypha_worker.errors import not_allowed

Settings = TypeVar("Settings", bound=msgspec.Struct)


def training_references(settings: msgspec.Struct) -> Iterator[Reference]:
    """Yield every reference in the settings of a task that trains."""
    for field in astuple(settings):
        if isinstance(field, Reference):
            yield field
        elif isinstance(field, msgspec.Struct):
            yield from training_references(field)


def named_peers(spec: TaskSpec) -> frozenset[PeerId]:
    """Return every peer that a task's specification names."""
    trained = () if spec.training is None else training_references(spec.training)
    sources = [resource.peers for resource in spec.resources if resource.peers is not None]
    return reference_peers(trained) | frozenset(peer for source in sources for peer in source.peers)


def reference_peers(references: Iterable[Reference]) -> frozenset[PeerId]:
    """Return every peer that the references name."""
    peers: set[PeerId] = set()
    for reference in references:
        if isinstance(reference, PeersReference):
            peers.update(reference.peers)
        elif isinstance(reference, SchedulerReference):
            peers.add(reference.peer)
    return frozenset(peers)


def check_peers(spec: TaskSpec, reference: Reference) -> None:
    """Refuse a reference to peers that the task's own specification does not name.

    Raises:
        BridgeError: it names such a peer.
    """
    known = named_peers(spec)
    unknown = reference_peers([reference]) - known
    if unknown:
        field = "peers" if isinstance(reference, PeersReference) else "peer"
        named = ", ".join(map(str, sorted(known)[:8])) or "none"
        raise not_allowed(f"{field}: {min(unknown)} is in none of this task's references, whose peers are {named}")


def without_secrets(config: TrainConfig) -> TrainConfig:
    """Return the settings as an executor's process may see them: tokens are null, and URLs without user and query.

    In place of the query a URL has ``hidden=`` and a number, so that `with_secrets` can tell several apart.
    """
    own = list(training_references(config))
    return _change_references(config, lambda reference: _without_secret(reference, own.index(reference)))


def _change_references(settings: Settings, change: Callable[[Reference], Reference]) -> Settings:
    changed: dict[str, msgspec.Struct] = {}
    for name, field in asdict(settings).items():
        if isinstance(field, Reference):
            changed[name] = change(field)
        elif isinstance(field, msgspec.Struct):
            changed[name] = _change_references(field, change)
    return msgspec.structs.replace(settings, **changed)


def with_secrets(spec: TaskSpec, reference: Reference) -> Reference:
    """Return the task's own reference if `reference` is one without its secret, or a repository with its token."""
    if spec.training is not None:
        for number, own in enumerate(training_references(spec.training)):
            if _without_secret(own, number) == reference:
                return own
    if isinstance(reference, HuggingFaceReference) and reference.token is None:
        for resource in spec.resources:
            named = resource.huggingface
            if named is not None and named.repository == reference.repository:
                return msgspec.structs.replace(reference, token=named.token)
    return reference


def _without_secret(reference: Reference, number: int) -> Reference:
    if isinstance(reference, HuggingFaceReference) and reference.token is not None:
        return msgspec.structs.replace(reference, token=None)
    if isinstance(reference, UriReference) and has_url_secrets(reference.value):
        return msgspec.structs.replace(reference, value=without_url_secrets(reference.value, f"hidden={number}"))
    return reference
