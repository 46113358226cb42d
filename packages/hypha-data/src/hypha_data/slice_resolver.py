"""Resolver of pull requests: finds the slice or manifest that a peer asks for.

Called by `hypha_net.transfer`, which sends the file; the peer is a worker to which a scheduler assigned the slice.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from hypha_data.catalog import Dataset
from hypha_net import instrumentation
from hypha_net.transfer import PullSource
from hypha_proto.codec import to_json
from hypha_proto.datasets import Manifest
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest, Refusal

_log = logging.getLogger(__name__)

_SERVED: Final = instrumentation.Counter("hypha.data.slices", "{slice}", "Slices that were given to workers.")


def slice_resolver(
    datasets: Mapping[str, Dataset], state_dir: Path
) -> Callable[[PeerId, PullRequest], Awaitable[PullSource | Refusal]]:
    """Return the function that finds a requested file: a slice by index, or the dataset's ``manifest``.

    Args:
        state_dir: existing folder of this process, into which the manifests to serve are written.
    """
    manifests = {
        name: _write_manifest(dataset, state_dir / f"{i}.json") for i, (name, dataset) in enumerate(datasets.items())
    }

    async def resolve(peer: PeerId, request: PullRequest) -> PullSource | Refusal:
        dataset = datasets.get(request.dataset)
        if dataset is None:
            return Refusal(reason=f"no dataset {request.dataset[:200]!r} here; there are: {', '.join(datasets)}")
        if request.name == "manifest":
            return PullSource(manifests[dataset.name], dataset.digest)
        path = dataset.slice_path(request.index)
        if request.name is not None or path is None:
            what = request.name[:200] if request.name is not None else f"slice {request.index}"
            return Refusal(reason=f"dataset {dataset.name} has {len(dataset.manifest.slices)} slices, no {what}")
        entry = dataset.manifest.slices[request.index]
        if not path.is_file() or path.stat().st_size != entry.size:
            _log.error("%s was changed or removed since the node started; restart the node to serve it again", path)
            return Refusal(reason=f"slice {request.index} of {dataset.name} is not what was announced")
        _SERVED.add(1, {"hypha.dataset": dataset.name})
        _log.info("slice %d of %s for %s, %d bytes", request.index, dataset.name, peer, entry.size)
        return PullSource(path, entry.digest)

    return resolve


def _write_manifest(dataset: Dataset, path: Path) -> Path:
    path.write_bytes(to_json(Manifest, dataset.manifest))
    return path
