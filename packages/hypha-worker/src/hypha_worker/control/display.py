"""Shows the status of a worker to people, and its accounts as text, as JSON and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypha_net.node.accounts import render_accounts, time_text
from hypha_net.node.descriptors import FEW
from hypha_net.peer_names import name_peers
from hypha_proto.ids import describe_peer
from hypha_worker.accounts.storage import LeaseAccount

NONE = "none"
FIELDS = ("lease", "job", "scheduler", "name", "began", "updated", "seconds", "price", "tokens", "outcome")


def render_status(status: Mapping[str, Any]) -> str:
    """Return the answer to ``status`` as text; control characters of other peers' texts are escaped."""
    return "".join(f"{_printable(name_peers(line, status['names']))}\n" for line in _lines(status))


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    reason = ", ready" if status["ready"] else f", not ready: {status['reason']}"
    yield f"{status['state']}{reason}"
    yield f"peer id   {status['peer_id']}"
    yield f"free      {_amounts(status['free'])}"
    yield f"today     {status['earned_today']:.4g} tokens earned"
    if status["open_files"] is not None and status["open_files"] < FEW:
        yield f"warning   at most {status['open_files']} open files and connections (ulimit -n), allow {FEW}"
    for executor in status["excluded"]:
        yield f"not offered  {executor['executor']}: {executor['reason']}"
    yield from _section("gateways", [_gateway(each) for each in status["gateways"]])
    yield from _section("leases", [_lease(each) for each in status["leases"]])
    yield from _section("jobs", [_job(each) for each in status["jobs"]])
    yield from _section("requests, the latest first", [_request(each) for each in status["requests"]])


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"{title}:" if lines else f"{title}: {NONE}"
    yield from (f"  {line}" for line in lines)


def _gateway(gateway: Mapping[str, Any]) -> str:
    failure = gateway["failure"] or "no attempt has ended"
    state = f"not connected: {failure}" if gateway["peer"] is None else f"connected, {gateway['peer']}"
    return f"{gateway['address']}  {state}"


def _lease(lease: Mapping[str, Any]) -> str:
    about = f"{lease['lease']}  {lease['state']}  scheduler {lease['scheduler']}"
    charged = f"{lease['seconds']:.0f} s at {lease['price']:g} an hour = {lease['tokens']:.4g} tokens"
    return f"{about}, {_amounts(lease['resources'])}, {charged}"


def _job(job: Mapping[str, Any]) -> str:
    task = "" if job["task"] is None else f" task {job['task']}"
    price = "" if job["price"] is None else f", price {job['price']:g}"
    return f"{job['job']}{task}  {job['executor']}  scheduler {job['scheduler']}, since {job['since']}{price}"


def _request(request: Mapping[str, Any]) -> str:
    wanted = f"{', '.join(request['executors']) or 'no executor'} with {_amounts(request['resources'])}"
    about = f"{request['at']}  scheduler {request['scheduler']}  {wanted}, bid {request['bid']:g}"
    if request["price"] is not None:
        return f"{about}: offered at {request['price']:g}"
    return f"{about}: no offer: {'; '.join(request['reasons'])}"


def _amounts(resources: Mapping[str, float]) -> str:
    return " ".join(f"{name} {amount:g}" for name, amount in resources.items()) or "nothing"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def show_accounts(accounts: Sequence[LeaseAccount], form: str) -> str:
    """Return accounts as ``text``, ``json`` (an array of objects) or ``csv``; times are UTC."""
    return render_accounts([_account(account) for account in accounts], FIELDS, form, _describe)


def _account(account: LeaseAccount) -> dict[str, Any]:
    return {name: getattr(account, name) for name in FIELDS} | {
        "began": time_text(account.began),
        "updated": time_text(account.updated),
    }


def _describe(row: Mapping[str, Any]) -> str:
    return (
        f"{row['began']}  lease {row['lease']}  job {row['job'] or 'none'}  "
        f"scheduler {describe_peer(row['scheduler'], row['name'])}  "
        f"{row['seconds']:.1f} s at {row['price']:g} an hour = {row['tokens']:.4f} tokens  {row['outcome']}"
    )
