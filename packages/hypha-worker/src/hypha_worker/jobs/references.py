"""The references in a job's spec: which peers the job may communicate with, and which secrets its process never sees.

Pure. Called by `bridge.backend` for each request of an executor, and by `executors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from hypha_net.redaction import has_url_secrets, without_url_secrets
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    AggregateJob,
    HuggingFaceReference,
    JobSpec,
    PeersReference,
    Reference,
    SchedulerReference,
    TrainJob,
    UriReference,
)
from hypha_worker.errors import not_allowed


def job_references(spec: JobSpec) -> Iterator[Reference]:
    """Yield every reference in a job's spec."""
    config = spec.executor.config
    yield config.updates
    yield config.results
    if isinstance(spec.executor, TrainJob):
        yield spec.executor.config.data
        yield spec.executor.config.model.artifact
        if spec.executor.config.preprocessor is not None:
            yield spec.executor.config.preprocessor.artifact
        if spec.executor.config.evaluation is not None:
            yield spec.executor.config.evaluation.data
        if spec.executor.config.weights is not None:
            yield spec.executor.config.weights


def reference_peers(references: Iterable[Reference]) -> frozenset[PeerId]:
    """Return every peer that the references name."""
    peers: set[PeerId] = set()
    for reference in references:
        if isinstance(reference, PeersReference):
            peers.update(reference.peers)
        elif isinstance(reference, SchedulerReference):
            peers.add(reference.peer)
    return frozenset(peers)


def check_peers(spec: JobSpec, reference: Reference) -> None:
    """Refuse a reference to peers that the job's own references do not name.

    Raises:
        BridgeError: it names such a peer.
    """
    known = reference_peers(job_references(spec))
    unknown = reference_peers([reference]) - known
    if unknown:
        field = "peers" if isinstance(reference, PeersReference) else "peer"
        named = ", ".join(map(str, sorted(known)[:8])) or "none"
        raise not_allowed(f"{field}: {min(unknown)} is in none of this job's references, whose peers are {named}")


def without_secrets(spec: JobSpec) -> JobSpec:
    """Return the spec as an executor's process may see it: tokens are null, and URLs without user and query.

    In place of the query a URL has ``hidden=`` and a number, so that `with_secrets` can tell several apart.
    """
    if isinstance(spec.executor, AggregateJob):
        return spec
    config = spec.executor.config
    own = list(job_references(spec))

    def show(reference: Reference) -> Reference:
        return _without_secret(reference, own.index(reference))

    redacted = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, artifact=show(config.model.artifact)),
        preprocessor=config.preprocessor
        and msgspec.structs.replace(config.preprocessor, artifact=show(config.preprocessor.artifact)),
        evaluation=config.evaluation and msgspec.structs.replace(config.evaluation, data=show(config.evaluation.data)),
        data=show(config.data),
        updates=show(config.updates),
        results=show(config.results),
        weights=config.weights and show(config.weights),
    )
    return msgspec.structs.replace(spec, executor=msgspec.structs.replace(spec.executor, config=redacted))


def with_secrets(spec: JobSpec, reference: Reference) -> Reference:
    """Return the job's own reference, if `reference` equals one without its secret; else `reference`."""
    for number, own in enumerate(job_references(spec)):
        if _without_secret(own, number) == reference:
            return own
    return reference


def _without_secret(reference: Reference, number: int) -> Reference:
    if isinstance(reference, HuggingFaceReference) and reference.token is not None:
        return msgspec.structs.replace(reference, token=None)
    if isinstance(reference, UriReference) and has_url_secrets(reference.value):
        return msgspec.structs.replace(reference, value=without_url_secrets(reference.value, f"hidden={number}"))
    return reference
