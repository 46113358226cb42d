"""Checks of a node's certificates, ports and folders, for ``run --check`` and ``probe``.

Each program adds checks of its own. A failed check is a value, not an exception, so that one command reports all of
them.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from hypha_net.node.config.models import NodeConfig
from hypha_net.node.descriptors import FEW, descriptor_limit

EXPIRES_SOON: Final = 14 * 86400.0
"""Remaining seconds of a certificate or revocation list below which a check warns."""
DISK_FULL: Final = 100 * 10**6
"""Free bytes below which a folder's disk fails its check."""
DISK_NEARLY_FULL: Final = 10**9
"""Free bytes below which a folder's disk is a warning."""
MAX_CLOCK_OFFSET: Final = 60.0
"""Difference of two clocks in seconds above which a check warns: a certificate may be valid for only one of them."""
_MAX_FLIGHTS: Final = 10

State = Literal["ok", "warning", "FAILED"]


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    state: State
    text: str
    """What was found, with the key and its value; where it is not ok also the remedy."""

    def __str__(self) -> str:
        return f"{self.state:<8} {self.text}"


def ok(text: str) -> Check:
    """Return a check that has passed."""
    return Check("ok", text)


def warning(text: str) -> Check:
    """Return a check that found a fault with which the node runs, but only for now or less well."""
    return Check("warning", text)


def failed(text: str) -> Check:
    """Return a check that found a fault with which the node would not run or not do its work."""
    return Check("FAILED", text)


def check_node(config: NodeConfig, role: str, *, live: bool) -> Iterator[Check]:
    """Check what all daemons have, without the network: certificates and listen addresses.

    With `live` the node may run meanwhile, and use its ports.
    """
    yield from check_identity(config, role)
    for number, address in enumerate(config.listen_addresses):
        yield check_listen(f"listen_addresses[{number}]", address, live=live)
    yield check_descriptors()


def check_identity(config: NodeConfig, role: str) -> Iterator[Check]:
    """Check certificate, key, trust bundle and revocation lists, as peers with the same files will."""
    from hypha_net.certificate_validation import CertificateVerifier  # imports cryptography, which is slow
    from hypha_net.errors import IdentityError
    from hypha_net.identity import load_identity

    try:
        identity = load_identity(config.cert_pem, config.key_pem, config.trust_pem, config.crls_pem)
        contexts = identity.server_context(), identity.client_context()
        expiries = list(CertificateVerifier(identity).expiries())
    except (IdentityError, ValueError) as error:
        yield failed(" ".join(str(error).split()))
        return
    now = time.time()
    for what, end, consequence in expiries:
        yield _check_expiry(what, end, end.timestamp() - now, consequence)
    yield ok(f"key_pem {config.key_pem}: belongs to the certificate; this node is {identity.peer_id}")
    yield _check_trust(config, contexts)
    named = identity.certificate.role
    if named is not None and named != role:
        yield warning(
            f"cert_pem {config.cert_pem}: names the role {named}, and this program is a {role}: peers refuse what only "
            f"a {role} may send; make a certificate with hypha-certutil node NAME --role {role}"
        )


def _check_expiry(what: str, end: datetime, left: float, consequence: str) -> Check:
    when = f"{end.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    if left <= 0:
        return failed(f"{what} expired on {when}: {consequence.removeprefix('then ')}")
    if left <= EXPIRES_SOON:
        return warning(f"{what} expires on {when}, in {left / 86400:.1f} days: {consequence}")
    return ok(f"{what} is valid until {when}")


def _check_trust(config: NodeConfig, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Check:
    """Let the node's certificate be verified by a handshake with itself, in memory."""
    files = f"trust_pem {config.trust_pem}" + (f", crls_pem {config.crls_pem}" if config.crls_pem else "")
    try:
        _shake_hands(*contexts)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        return failed(
            f"{files}: cert_pem {config.cert_pem} does not verify against it ({reason}), and peers refuse it: "
            "configure the files that were written with this certificate, and lists of all its CAs"
        )
    return ok(f"{files}: the certificate verifies against it")


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Connect two contexts in memory. Raises `ssl.SSLError` when one side refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_MAX_FLIGHTS):
        sides = [side for side in sides if not _handshake_ended(side)]
        if not sides:
            return
    raise ssl.SSLError("the handshake does not end")


def _handshake_ended(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def check_listen(key: str, address: str, *, live: bool = False) -> Check:
    """Check that a listen address can be bound, by binding it for a moment; with `live` the node itself may use it."""
    _, kind, host, _, port = address.split("/")[:5]
    what = f"{key} = {address!r}"
    family = socket.AF_INET if kind == "ip4" else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((host, int(port)))
            listener.listen(1)
    except OSError as error:
        if live and error.errno == errno.EADDRINUSE:
            return warning(f"{what}: in use: by this node if it runs, else by another program: end that one")
        return failed(f"{what}: cannot listen there: {error.strerror or error}; {_listen_remedy(error)}")
    return ok(f"{what}: {'any free port' if port == '0' else 'free'}")


def _listen_remedy(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program has this port, or this node runs already: end that one, or choose another port"
    if error.errno == errno.EACCES:
        return "choose a port from 1024 on, or permit this one to the node's user"
    if error.errno == errno.EADDRNOTAVAIL:
        return "name an address of this machine; 0.0.0.0 means every one"
    return "name another address"


def check_descriptors() -> Check:
    """Warn of a low hard limit of open files, to which a daemon raises its soft limit."""
    limit = descriptor_limit()
    if limit is None:
        return ok("ulimit -n: no limit of open files and connections")
    what = f"ulimit -n: at most {limit} open files and connections"
    if limit < FEW:
        return warning(
            f"{what}, or peers and tasks may have to wait: allow {FEW} (ulimit -n {FEW}, or LimitNOFILE={FEW} of a "
            "systemd service), and start the node again"
        )
    return ok(what)


def check_folder(key: str, folder: Path) -> Iterator[Check]:
    """Check that a folder can be written or, if it is missing, created, and has space; does not create it.

    Args:
        key: key of the configuration.
        folder: its value.
    """
    what = f"{key} {folder}"
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        if nearest == folder.absolute():
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(4096))
        elif not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{nearest} cannot be written by this user")
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        reason = error.strerror or error
        yield failed(f"{what}: cannot be written: {reason}; correct its owner or mode, or name another folder")
        return
    yield ok(f"{what}: can be {'written' if nearest == folder.absolute() else 'made'}")
    yield _check_disk(what, free)


def _check_disk(what: str, free: int) -> Check:
    shown = f"{what}: {free / 1e9:.1f} GB of its disk are free"
    if free < DISK_FULL:
        return failed(f"{shown}: remove files, or name a folder on another disk")
    return warning(f"{shown}: remove files soon") if free < DISK_NEARLY_FULL else ok(shown)


def check_gateways(config: NodeConfig, role: str, timeout: float) -> Sequence[Check]:
    """Connect to all gateways at once with this node's certificate, and ask for their health.

    They are skipped if the certificate fails its own check, because each would fail, too.

    Args:
        config: names the gateways and the certificate.
        role: of this program.
        timeout: seconds that each may take.
    """
    import anyio

    if config.gateway_addresses and any(check.state == "FAILED" for check in check_identity(config, role)):
        return [warning("gateway_addresses, and the rest of cert_pem, key_pem and trust_pem: not checked before that")]

    found: dict[int, Check] = {}

    async def check_all() -> None:
        async with anyio.create_task_group() as tasks:
            for number, address in enumerate(config.gateway_addresses):
                tasks.start_soon(check_one, number, address)

    async def check_one(number: int, address: str) -> None:
        found[number] = await _check_gateway(config, f"gateway_addresses[{number}] = {address!r}", address, timeout)

    if config.gateway_addresses:
        anyio.run(check_all, backend="trio")
    return [found[number] for number in sorted(found)]


async def _check_gateway(config: NodeConfig, what: str, address: str, timeout: float) -> Check:
    from hypha_net.errors import NetError, NotRunningError, leaf_errors
    from hypha_net.node.probe import probe

    try:
        answer = await probe(config, address, timeout)
    except (NetError, BaseExceptionGroup) as raised:
        error = next(leaf_errors(raised))
        if not isinstance(error, NetError):
            raise
        reason = " ".join(str(error).split()).removeprefix(f"{address}: ")
        if isinstance(error, NotRunningError):
            return failed(f"{what}: {reason}: nothing listens there; correct the port, or start the gateway")
        return failed(f"{what}: {reason}; compare address and port with the gateway's, and trust_pem of both")
    if answer.role not in (None, "gateway"):
        return warning(f"{what}: reached, but it is a {answer.role}: name the address of a gateway")
    if not answer.healthy:
        return warning(f"{what}: reached, but not healthy: {answer.reason}; ask its owner")
    offset = answer.clock_offset or 0.0
    if abs(offset) > MAX_CLOCK_OFFSET:
        direction = "ahead of" if offset > 0 else "behind"
        return warning(f"{what}: reached, but its clock is {abs(offset):.0f} s {direction} this one: set both by NTP")
    return ok(f"{what}: reached, peer {answer.peer_id}, version {answer.version}")
