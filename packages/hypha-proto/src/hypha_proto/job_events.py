"""Lines for the events of a job that change who works on it, as the scheduler's commands and the demo show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hypha_proto.ids import describe_peer

MEMBER_CHANGES: Final[Mapping[str, str]] = {
    "lease_added": "worker found",
    "lease_draining": "worker drains",
    "worker_joined": "worker joined",
    "worker_left": "worker left",
    "worker_lost": "worker lost",
    "worker_suspected": "worker suspected",
    "worker_late": "worker late",
    "worker_restarted": "executor restarted",
    "worker_replaced": "worker replaced",
    "worker_excluded": "worker excluded",
    "paused": "paused",
    "continued": "continued",
}
"""Events of a scheduler's ``metrics.jsonl`` that change who works on a job, and what each is called."""


def describe_event(event: Mapping[str, Any], labels: Mapping[str, str] = MEMBER_CHANGES) -> str | None:
    """Return the line for an event, or None for one without a label.

    Args:
        event: a line of ``metrics.jsonl``.
        labels: by kind of event, what the line begins with.
    """
    label = labels.get(str(event.get("event")))
    if label is None:
        return None
    name = event.get("worker_name", event.get("name"))
    who = [describe_peer(str(event[key]), name) for key in ("worker", "peer") if key in event]
    who += [str(event["role"])] if "role" in event else []
    who += [f"round {event['round']}"] if "round" in event else []
    what = str(event.get("reason") or event.get("text") or "").partition("\n")[0]  # an executor's last lines may follow
    return ": ".join([label, *([", ".join(who)] if who else []), *([what] if what else [])])
