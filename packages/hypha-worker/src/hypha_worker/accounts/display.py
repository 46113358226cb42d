"""Shows accounts to people, as JSON and as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypha_net.node.accounts import render_csv, render_json, time_text
from hypha_proto.ids import describe_peer
from hypha_worker.accounts.storage import LeaseAccount

FIELDS = ("lease", "job", "scheduler", "name", "began", "updated", "seconds", "price", "tokens", "outcome")


def render_accounts(accounts: Sequence[LeaseAccount], form: str) -> str:
    """Return accounts as ``text``, ``json`` (an array of objects) or ``csv``; times are UTC."""
    rows = [_row(account) for account in accounts]
    if form == "json":
        return render_json(rows)
    return render_csv(rows, FIELDS) if form == "csv" else _render_text(accounts, rows)


def _row(account: LeaseAccount) -> dict[str, Any]:
    return {name: getattr(account, name) for name in FIELDS} | {
        "began": time_text(account.began),
        "updated": time_text(account.updated),
    }


def _render_text(accounts: Sequence[LeaseAccount], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"{row['began']}  lease {row['lease']}  job {row['job'] or 'none'}  "
        f"scheduler {describe_peer(row['scheduler'], row['name'])}  "
        f"{row['seconds']:.1f} s at {row['price']:g} an hour = {row['tokens']:.4f} tokens  {row['outcome']}"
        for row in rows
    ]
    seconds, tokens = sum(account.seconds for account in accounts), sum(account.tokens for account in accounts)
    total = f"{len(accounts)} leases, {seconds:.1f} s, {tokens:.4f} tokens"
    return "".join(f"{line}\n" for line in [*lines, total])
