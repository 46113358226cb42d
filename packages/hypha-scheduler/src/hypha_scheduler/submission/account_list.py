"""What the jobs of a scheduler have cost, from the files in its output directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypha_net.node.accounts import render_csv, render_json, time_text
from hypha_proto.ids import describe_peer
from hypha_scheduler.jobs.lease_accounts import FILE, LeaseCost, read_accounts

FIELDS: Final = ("lease", "job", "worker", "name", "role", "began", "updated", "seconds", "price", "tokens", "ended")


@dataclass(frozen=True, slots=True)
class JobLease:
    """The account of a lease, with its job."""

    job: str
    account: LeaseCost


def list_accounts(runs: Path, since: float = 0.0) -> list[JobLease]:
    """Return the leases of all jobs in `runs` that were held since a time, the earliest first.

    Args:
        runs: the scheduler's output directory.
        since: seconds since the epoch.

    Raises:
        OSError: a file cannot be read.
        AccountsFileError: a file contains something else.
    """
    found = [
        JobLease(file.parent.name, account)
        for file in runs.glob(f"*/{FILE}")
        for account in read_accounts(file)
        if account.updated >= since
    ]
    return sorted(found, key=lambda lease: lease.account.began)


def render_accounts(leases: Sequence[JobLease], form: str) -> str:
    """Return accounts as ``text``, ``json`` (an array of objects) or ``csv``; times are UTC."""
    rows = [_row(lease) for lease in leases]
    if form == "json":
        return render_json(rows)
    return render_csv(rows, FIELDS) if form == "csv" else _render_text(leases, rows)


def _row(lease: JobLease) -> dict[str, Any]:
    account = lease.account
    return {
        "lease": account.lease,
        "job": lease.job,
        "worker": account.peer,
        "name": account.name,
        "role": account.role,
        "began": time_text(account.began),
        "updated": time_text(account.updated),
        "seconds": round(account.seconds, 3),
        "price": account.price,
        "tokens": round(account.tokens, 6),
        "ended": account.has_ended,
    }


def _render_text(leases: Sequence[JobLease], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"{row['began']}  job {row['job']}  {describe_peer(row['worker'], row['name'])} ({row['role']})  "
        f"lease {row['lease']}  {row['seconds']:.1f} s at {row['price']:g} an hour = {row['tokens']:.4f} tokens"
        + ("" if row["ended"] else "  held")
        for row in rows
    ]
    seconds, tokens = sum(each.account.seconds for each in leases), sum(each.account.tokens for each in leases)
    return "".join(f"{line}\n" for line in [*lines, f"{len(leases)} leases, {seconds:.1f} s, {tokens:.4f} tokens"])
