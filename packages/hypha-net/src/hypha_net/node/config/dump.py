"""Dump of a merged configuration, key by key with the origin of each value; secrets are masked.

Called by ``config show`` in `node.cli`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypha_net.node.config.introspection import dotted, leaves
from hypha_net.node.config.loader import DEFAULT, Loaded
from hypha_net.node.config.models import NodeConfig, mask_secrets
from hypha_net.node.config.template import key_text, to_toml
from hypha_net.node.config.toml_positions import Key


@dataclass(frozen=True, slots=True)
class Row:
    """One value and its origin."""

    key: str
    value: Any
    origin: str
    written: str
    """The key in TOML syntax: a part with a dot is quoted."""

    def __str__(self) -> str:
        if self.value is None:
            return f"# {self.written} is not set  # {self.origin}"
        return f"{self.written} = {to_toml(self.value, width=None)}  # {self.origin}"


def rows(loaded: Loaded[NodeConfig]) -> list[Row]:
    """Return every key of a configuration, in the model's order."""
    data = mask_secrets(loaded.config.model_dump(mode="json", by_alias=True))
    return [Row(key := dotted(at), value, _origin(loaded, key), _written(at)) for at, value in leaves(data)]


def _written(at: Key) -> str:
    return dotted(tuple(key_text(part) if isinstance(part, str) else part for part in at))


def _origin(loaded: Loaded[NodeConfig], key: str) -> str:
    """Return the origin of the key, of a key inside it (for a masked table), or of the table that contains it."""
    for known, origin in loaded.origins.items():
        if known == key or known.startswith((f"{key}.", f"{key}[")) or key.startswith((f"{known}.", f"{known}[")):
            return origin
    return DEFAULT
