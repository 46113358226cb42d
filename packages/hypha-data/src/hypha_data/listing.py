"""List of the datasets that a gateway knows, for the command ``list``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypha_data.config import ListConfig
from hypha_net.errors import NetError, UnreachableError, UnsupportedProtocolError
from hypha_proto.dataset_listing import ListedDataset
from hypha_proto.protocols import DIRECTORY

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint

_SHOWN_DIGEST = len("blake3:") + 12


class CannotListError(NetError):
    """The gateway speaks no protocol by which it could list datasets."""


@dataclass(frozen=True, slots=True)
class DatasetListing:
    """What one gateway answered."""

    gateway: str
    """Its address, as configured."""
    datasets: Sequence[ListedDataset]

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as a dictionary of plain values."""
        return {
            "gateway": self.gateway,
            "datasets": [{name: getattr(each, name) for name in each.__struct_fields__} for each in self.datasets],
        }

    def lines(self) -> Iterator[str]:
        """Yield the answer as a table."""
        if not self.datasets:
            yield f"no dataset is announced to gateway {self.gateway}"
            return
        rows = [("name", "slices", "data nodes", "manifest"), *map(_row, self.datasets)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for name, slices, providers, manifest in rows:
            yield f"{name:<{widths[0]}}  {slices:>{widths[1]}}  {providers:>{widths[2]}}  {manifest}".rstrip()


def _row(dataset: ListedDataset) -> tuple[str, str, str, str]:
    digest = "none" if dataset.manifest is None else f"{dataset.manifest[:_SHOWN_DIGEST]}…"
    others = f" and {dataset.manifests - 1} more" if dataset.manifests > 1 else ""
    return dataset.name, str(dataset.num_slices), str(dataset.providers), f"{digest}{others}"


async def ask_gateways(config: ListConfig, timeout: float) -> DatasetListing:
    """Ask the configured gateways one after the other; return the answer of the first that lists its datasets.

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
                return await _ask(endpoint, address, timeout)
            except NetError as error:
                failures.append(error)
    # the failure of a gateway that was reached says more than that of one that was not
    raise min(failures, key=lambda error: isinstance(error, UnreachableError))


async def _ask(endpoint: Endpoint, address: str, timeout: float) -> DatasetListing:
    from hypha_net.dataset_directory import list_datasets

    gateway = await endpoint.connect(address, timeout=timeout)
    try:
        return DatasetListing(address, await list_datasets(endpoint, gateway, timeout=timeout))
    except UnsupportedProtocolError:
        raise CannotListError(
            f"gateway {address} cannot list datasets: it does not speak {DIRECTORY}, "
            "as hypha-gateway does from 0.1.1 on"
        ) from None
