"""List of the datasets that a gateway knows, for the command ``list``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hypha_data.config import ListConfig
from hypha_net.errors import NetError, UnreachableError, UnsupportedProtocolError
from hypha_proto.dataset_listing import ListedDataset
from hypha_proto.protocols import DIRECTORY

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint

_SHOWN_DIGEST = len("blake3:") + 12


class CannotListError(NetError):
    """The gateway speaks no protocol by which it could list datasets."""


def as_table(datasets: Sequence[ListedDataset]) -> Iterator[str]:
    """Yield the lines of a table."""
    rows = [("name", "slices", "data nodes", "manifest"), *map(_row, datasets)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, slices, providers, manifest in rows:
        yield f"{name:<{widths[0]}}  {slices:>{widths[1]}}  {providers:>{widths[2]}}  {manifest}".rstrip()


def _row(dataset: ListedDataset) -> tuple[str, str, str, str]:
    digest = "none" if dataset.manifest is None else f"{dataset.manifest[:_SHOWN_DIGEST]}…"
    others = f" and {dataset.manifests - 1} more" if dataset.manifests > 1 else ""
    return dataset.name, str(dataset.num_slices), str(dataset.providers), f"{digest}{others}"


async def ask_gateways(config: ListConfig, timeout: float) -> tuple[str, Sequence[ListedDataset]]:
    """Ask the configured gateways one after the other; return the first that lists its datasets, and these.

    Args:
        timeout: seconds for each gateway.

    Raises:
        IdentityError: this node's own certificates cannot be used.
        CannotListError: no gateway can list datasets; one that was reached does not speak the protocol.
        UnreachableError: no gateway could be reached, or one side refused the other.
        RequestError: a gateway was reached and did not answer as it should.
    """
    from hypha_net import open_endpoint
    from hypha_net.identity import load_identity
    from hypha_net.settings import EndpointSettings

    identity = load_identity(config.cert_pem, config.key_pem, config.trust_pem, config.crls_pem)
    failures: list[NetError] = []
    async with open_endpoint(identity, EndpointSettings(listen_addresses=(), relay_circuit=False)) as endpoint:
        for address in config.gateway_addresses:
            try:
                return address, await _ask(endpoint, address, timeout)
            except NetError as error:
                failures.append(error)
    # the failure of a gateway that was reached says more than that of one that was not
    raise min(failures, key=lambda error: isinstance(error, UnreachableError))


async def _ask(endpoint: Endpoint, address: str, timeout: float) -> Sequence[ListedDataset]:
    from hypha_net.dataset_directory import list_datasets

    gateway = await endpoint.connect(address, timeout=timeout)
    try:
        return await list_datasets(endpoint, gateway, timeout=timeout)
    except UnsupportedProtocolError:
        raise CannotListError(
            f"gateway {address} cannot list datasets: it does not speak {DIRECTORY}, "
            "as hypha-gateway does from 0.1.1 on"
        ) from None
