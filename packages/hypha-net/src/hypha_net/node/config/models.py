"""Pydantic model of the configuration that all daemons share; each program extends it with its own keys.

`loader` fills these models from flags, environment and TOML and reports every error at once; `toml_output` turns the
field descriptions into the commented file that ``init`` writes. So a description here is user documentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from hypha_net.addresses import check_dial_address, check_listen_address
from hypha_net.bandwidth import MIN_RATE
from hypha_net.connectors.s3_client import S3Settings
from hypha_net.redaction import has_url_secrets, redact_urls

RESERVED_NETWORKS: Final = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/128",
    "::1/128",
    "100::/64",
    "2001:db8::/32",
    "fc00::/7",
    "fe80::/10",
    "ff00::/8",
)
"""Networks that are not part of the public internet (IANA special-purpose registries)."""


def _network(text: str) -> str:
    try:
        return str(ip_network(text))
    except ValueError as error:
        raise ValueError(f"{error}; write a network such as 10.0.0.0/8") from None


def read_pairs(text: str, *, decode: bool = False) -> dict[str, str]:
    """Parse ``k=v,k2=v2``, with percent-encoding as in variables of OpenTelemetry if `decode`.

    Raises:
        ValueError: a part is not a pair; the error does not repeat the text, which may be a secret.
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(sign and key.strip() for key, sign, _ in pairs):
        raise ValueError('must be "key=value,key2=value2" or a table')
    read = unquote if decode else str
    return {read(key.strip()): read(value.strip()) for key, _, value in pairs}


def _endpoint(text: str) -> str:
    if not is_web_url(text):
        raise ValueError(WEB_URL_WANTED)
    return text


WEB_URL_WANTED: Final = "must be a URL that starts with http:// or https:// and names a host"


def is_web_url(text: str) -> bool:
    """Return whether text is an HTTP or HTTPS URL with a host and a valid port."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, invalid port
        return False


_SECRET: Final = re.compile(
    r"(^|[._])(telemetry_headers|(?<!max_new_)tokens?|secrets?|passwords?|credentials?|api_?keys?|authorization)($|[._\[])"
)

ListenAddress = Annotated[str, AfterValidator(check_listen_address)]
DialAddress = Annotated[str, AfterValidator(check_dial_address)]
Network = Annotated[str, AfterValidator(_network)]
Pairs = Annotated[dict[str, str], BeforeValidator(lambda value: read_pairs(value) if isinstance(value, str) else value)]

Sampler = Literal[
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
]


class Section(BaseModel):
    """Base class of the tables of a configuration file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


Rate = Annotated[int, Field(ge=MIN_RATE)] | None


class Limits(Section):
    """``[limits]``."""

    max_connections: int = Field(default=1024, ge=1, description="Connections to peers, in and out, at the same time.")
    upload_rate: Rate = Field(
        default=None, description="Upload limit of files in bytes per second, for all peers together."
    )
    download_rate: Rate = Field(
        default=None, description="Download limit of files in bytes per second, for all peers together."
    )
    peer_upload_rate: Rate = Field(
        default=None, description="Upload limit of files in bytes per second, for each peer."
    )
    peer_download_rate: Rate = Field(
        default=None, description="Download limit of files in bytes per second, for each peer."
    )


class NodeConfig(Section):
    """Configuration keys of every daemon."""

    needs_gateway: ClassVar[bool] = True
    """Whether at least one gateway address must be given; a gateway overrides it."""

    cert_pem: Path = Field(description="This node's certificate, followed by the intermediate CAs (PEM).")
    key_pem: Path = Field(description="The certificate's Ed25519 private key (PKCS#8 PEM).")
    trust_pem: Path = Field(description="CAs whose nodes are trusted: the organisation's and the root (PEM).")
    crls_pem: Path | None = Field(
        default=None, description="Revocation lists of all CAs in one file (PEM). With it, revoked peers are refused."
    )
    listen_addresses: list[ListenAddress] = Field(
        default=["/ip4/0.0.0.0/tcp/0"], description="Multiaddrs to listen on; port 0 takes any free port."
    )
    external_addresses: list[DialAddress] = Field(
        default=[], description="Multiaddrs at which others reach this node, if they differ from those it listens on."
    )
    gateway_addresses: list[DialAddress] = Field(
        default=[],
        validate_default=True,
        description="Multiaddrs of gateways through which the network is joined, with or without /p2p/<id>.",
    )
    exclude_cidr: list[Network] = Field(
        default=list(RESERVED_NETWORKS),
        description="Networks whose addresses are neither dialled nor passed on when peers report them. "
        "The default holds every reserved range, which includes loopback and every LAN: "
        "in a local network write exclude_cidr = [].",
    )
    relay_circuit: bool = Field(
        default=True, description="Be reachable through a gateway's relay when this node cannot be dialled directly."
    )
    require_roles: bool = Field(
        default=False,
        description="Accept what only a scheduler, worker or data node may send only from peers whose certificate "
        "names that role, not from peers without a role. Peers with another role are refused in either case.",
    )
    telemetry_endpoint: Annotated[str, AfterValidator(_endpoint)] | None = Field(
        default=None,
        description="Base URL of an OpenTelemetry collector; /v1/traces, /v1/metrics and /v1/logs are appended (HTTP).",
    )
    telemetry_headers: Pairs = Field(
        default={}, description='Headers for the collector, as a table or as "key=value,key2=value2". Kept secret.'
    )
    telemetry_protocol: Literal["http/protobuf", "grpc"] = Field(
        default="http/protobuf", description="OTLP protocol of the collector: http/protobuf or grpc."
    )
    telemetry_sampler: Sampler = Field(
        default="parentbased_always_on", description=f"Which traces are recorded: {', '.join(get_args(Sampler))}."
    )
    telemetry_sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of traces that a traceidratio sampler records, 0 to 1."
    )
    telemetry_attributes: Pairs = Field(
        default={}, description='Attributes of everything exported, as a table or as "key=value,key2=value2".'
    )
    limits: Limits = Field(default=Limits(), description="Limits of this node's network use.")

    @field_validator("gateway_addresses")
    @classmethod
    def _knows_a_gateway(cls, value: list[str]) -> list[str]:
        if cls.needs_gateway and not value:
            raise ValueError("names no gateway: give the multiaddr of at least one")
        return value

    def config_warnings(self) -> list[str]:
        """Return warnings about accepted values, for the log; programs extend it."""
        return []

    @classmethod
    def for_document(cls, data: dict[str, Any]) -> type[Self]:
        """Return the model for a TOML document that may name tables of plug-ins; programs with plug-ins override it."""
        return cls


def is_secret(key: str) -> bool:
    """Return whether the value at a dotted key must not be shown."""
    return bool(_SECRET.search(key.lower()))


def mask_secrets(value: Any, key: str = "") -> Any:
    """Return a configuration value with every secret replaced by ``***``; `key` is its dotted key."""
    if key and is_secret(key):
        return value if value is None or value == {} else "***"  # an unset value is not a secret
    if isinstance(value, Mapping):
        return {name: mask_secrets(part, f"{key}.{name}" if key else str(name)) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_secrets(part, key) for part in value]
    return redact_urls(value) if isinstance(value, str) else value


class S3ServiceSection(Section):
    """Endpoint, region and credentials."""

    s3_endpoint: str | None = Field(
        default=None, description="URL of the S3 service; if unset, that of AWS in s3_region."
    )
    s3_region: str | None = Field(default=None, description="Region of the buckets; needed without s3_endpoint.")
    s3_access_key: str | None = Field(default=None, description="Key id for S3; if unset, requests are not signed.")
    s3_secret_key: str | None = Field(default=None, description="Secret key for S3.")

    @property
    def s3_settings(self) -> S3Settings:
        """The service, for `S3Client`."""
        return S3Settings(self.s3_endpoint, self.s3_region, self.s3_access_key, self.s3_secret_key)

    @field_validator("s3_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and (not is_web_url(value) or has_url_secrets(value)):
            raise ValueError("must be a URL such as https://s3.example.org, without user, query and fragment")
        return value

    @model_validator(mode="after")
    def _has_both_keys(self) -> S3ServiceSection:
        if (self.s3_access_key is None) != (self.s3_secret_key is None):
            raise ValueError("s3_access_key and s3_secret_key belong together: set both, or neither")
        return self
