"""What the jobs of a scheduler have cost, from the files in its output directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hypha_net.node.accounts import render_accounts, time_text
from hypha_proto.ids import describe_peer
from hypha_scheduler.jobs.lease_accounts import FILE, LeaseCost, read_accounts

FIELDS: Final = ("lease", "job", "worker", "name", "role", "began", "updated", "seconds", "price", "tokens", "ended")


def show_accounts(runs: Path, since: float, form: str) -> str:
    """Return the leases of all jobs in `runs` that were held since a time, the earliest first; times are UTC.

    Args:
        runs: the scheduler's output directory.
        since: seconds since the epoch.
        form: ``text``, ``json`` (an array of objects) or ``csv``.

    Raises:
        OSError: a file cannot be read.
        AccountsFileError: a file contains something else.
    """
    found = [
        (file.parent.name, account)
        for file in runs.glob(f"*/{FILE}")
        for account in read_accounts(file)
        if account.updated >= since
    ]
    rows = [_row(job, account) for job, account in sorted(found, key=lambda each: each[1].began)]
    return render_accounts(rows, FIELDS, form, _describe)


def _row(job: str, account: LeaseCost) -> dict[str, Any]:
    return {
        "lease": account.lease,
        "job": job,
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


def _describe(row: Mapping[str, Any]) -> str:
    return (
        f"{row['began']}  job {row['job']}  {describe_peer(row['worker'], row['name'])} ({row['role']})  "
        f"lease {row['lease']}  {row['seconds']:.1f} s at {row['price']:g} an hour = {row['tokens']:.4f} tokens"
        + ("" if row["ended"] else "  held")
    )
