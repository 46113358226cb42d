"""Tables of configuration keys for docs/configuration.md, generated from the descriptions that `init` also writes.

``python tests/support/config_reference.py`` rewrites them; `test_docs_configuration` compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from hypha_data.config import DataConfig
from hypha_gateway.config import GatewayConfig
from hypha_net.node.config.introspection import fields_by_key, listed_tables, table_types
from hypha_net.node.config.models import RESERVED_NETWORKS, NodeConfig
from hypha_net.node.config.toml_output import to_toml
from hypha_scheduler.config import SchedulerConfig
from hypha_worker.config import WorkerConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
PROGRAMS: dict[str, type[NodeConfig]] = {
    "every daemon": NodeConfig,
    "hypha-gateway": GatewayConfig,
    "hypha-data": DataConfig,
    "hypha-worker": WorkerConfig,
    "hypha-scheduler": SchedulerConfig,
}
_MARK = "<!-- keys of {} -->"


def keys(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, default and description of every field; nested tables follow plain keys, lists are marked ``[]``."""
    later = []
    for name, info in fields_by_key(model).items():
        key = f"{at}.{name}" if at else name
        lists = listed_tables(info.annotation)
        inner = lists or table_types(info.annotation)
        default = "required" if info.is_required() else None
        if default is None:
            value = info.get_default(call_default_factory=True, validated_data={})
            shown = "the reserved networks" if value == list(RESERVED_NETWORKS) else None
            plain = value is None or isinstance(value, BaseModel)
            default = shown or ("" if plain else f"`{to_toml(value, width=None)}`")
        if not (inner and isinstance(default, str) and default in ("", "`[]`") and not _also_plain(info.annotation)):
            yield key, default, info.description or ""
        if inner:
            later.append((f"{key}[]" if lists else key, inner[0]))
    for key, table in later:
        yield from keys(table, key)


def _also_plain(annotation: object) -> bool:
    return "Literal" in str(annotation)


def table(program: str) -> str:
    """Return the table of a program: the keys it adds to those of every daemon, and the defaults it changes."""
    model = PROGRAMS[program]
    common = set() if model is NodeConfig else set(keys(NodeConfig))
    seen = set()
    lines = ["| key | default | |", "| --- | --- | --- |"]
    for row in keys(model):
        shared = row[0].removeprefix("scheduler.jobs[]")
        if row in common or (shared != row[0] and shared):  # a table of scheduler.jobs is one of scheduler.job
            continue
        assert row[0] not in seen
        seen.add(row[0])
        lines.append(f"| `{row[0]}` | {row[1]} | {row[2].replace('<', '&lt;')} |".replace("  ", " "))
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the page with every table regenerated from the models."""
    for program in PROGRAMS:
        mark = re.escape(_MARK.format(program))
        made = f"{_MARK.format(program)}\n\n{table(program)}\n\n"
        page, count = re.subn(rf"{mark}\n+(\|.*\n)*\n?", lambda _: made, page)  # noqa: B023 - used at once
        assert count == 1, program
    return page.rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
