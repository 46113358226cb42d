"""Lifecycle of a daemon: opens the endpoint, serves health, runs the program and ends within a bounded time.

Runs the program's ``serve(config, node)``. SIGTERM and SIGINT cancel the program and everything it started. In a
program that drains, the first SIGTERM sets an event instead, and the program returns when its work is done. Tasks that
have not ended after `GRACE` seconds are named in the log, and the process exits with code 1. SIGHUP makes the endpoint
reload its certificates.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar, runtime_checkable

import anyio
from anyio.abc import TaskGroup

from hypha_net import instrumentation
from hypha_net.errors import NetError, leaf_errors
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.config.otlp import targets
from hypha_net.node.descriptors import raise_descriptor_limit
from hypha_net.node.exit_codes import DONE, FAILED, INTERRUPTED
from hypha_net.node.health import Readiness, call_gateways, gateway_outage, serve_health, watch_gateways
from hypha_proto.errors import ProtoError

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint
    from hypha_net.node.telemetry import Export

_log = logging.getLogger(__name__)

C = TypeVar("C", bound=NodeConfig)

GRACE: Final = 5.0
"""Seconds that a daemon may take to end after a signal, or after its drain."""


_PEERS: Final = instrumentation.Level("hypha.peers.connected", "{peer}", "Peers that a node is connected to.")
_PEERS_EVERY: Final = 5.0


def _never(_timeout: float) -> anyio.Event:
    """Return an event that is never set, for use outside of a daemon."""
    return anyio.Event()


@dataclass(frozen=True, slots=True)
class Node:
    """Services that a running program receives."""

    endpoint: Endpoint
    """Network endpoint of this node; health is served already."""
    tasks: TaskGroup
    """Task group of the program; its tasks are cancelled when `serve` returns, fails or is cancelled."""
    readiness: Readiness = field(default_factory=Readiness)
    drain_on_sigterm: Callable[[float], anyio.Event] = _never
    """Let the first SIGTERM set the event that this returns, instead of cancelling the program.

    The program then has the given number of seconds to finish its work and return. A second SIGTERM, and SIGINT at any
    time, cancel it at once.
    """


@runtime_checkable
class ReloadsCertificates(Protocol):
    """Endpoint whose identity is read from files, unlike the in-memory one."""

    async def reload_certificates(self) -> bool:
        """Reload the certificates; return False if the old ones stay in use, which is logged."""
        ...


Serve = Callable[[C, Node], Awaitable[None]]
"""Coroutine of a program: runs until cancelled; when it returns, the daemon exits with code 0."""


Connect = Callable[[NodeConfig, str], AbstractAsyncContextManager["Endpoint"]]
"""Opens a node's endpoint for its configuration and role; called before the event loop starts, entered inside it."""


def run_daemon(
    config: C,
    serve: Serve[C],
    *,
    role: str,
    version: str,
    expected: tuple[type[Exception], ...] = (),
    grace: float = GRACE,
    connect: Connect | None = None,
) -> int:
    """Run a daemon until its program ends or a signal arrives.

    Args:
        expected: errors of the program that a person can act on, logged in one line; all others, except those of the
            network and the operating system, are logged with their traceback.
        grace: seconds between a signal and the forced end.
        connect: opens the endpoint; by default the libp2p one, over mutual TLS, with the configured identity.

    Returns:
        The exit code: 0 after SIGTERM or when the program has ended, 130 after SIGINT, 1 after a failure.
    """
    run = _Run(config, serve, role, version, grace, connect or open_configured)
    without_traceback: tuple[type[Exception], ...] = (NetError, ProtoError, OSError, *expected)
    raise_descriptor_limit()
    try:
        run.start()
    except Exception as error:  # noqa: BLE001 - outermost handler: every failure is logged and becomes the exit code
        for cause in leaf_errors(error):
            known = isinstance(cause, without_traceback)
            _log.error("%s", str(cause) or type(cause).__name__, exc_info=None if known else cause)
        return FAILED
    finally:
        run.mark_ended()
    return run.exit_code


@contextmanager
def early_signals() -> Iterator[None]:
    """Exit at once on a signal, quietly and with the usual exit codes, until `run_daemon` takes over."""

    def end(number: int, _frame: object) -> None:
        _exit_now(_exit_code(number))

    def ignore(_number: int, _frame: object) -> None:
        """Do nothing: the certificates that SIGHUP would reload have not been read yet."""

    with _signal_handlers(end, ignore):
        yield


def _exit_now(exit_code: int) -> NoReturn:
    """Exit the process while nothing is open that would have to be closed.

    No exception is used: if the signal arrived while a destructor or an import hook of a library runs, which is common
    during start-up, the interpreter or the library would swallow the exception, and the daemon would keep running.
    """
    os._exit(exit_code)


def _exit_code(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else DONE


@contextmanager
def _signal_handlers(end: Callable[[int, Any], None], reload: Callable[[int, Any], None]) -> Iterator[None]:
    handlers = {signal.SIGTERM: end, signal.SIGINT: end}
    if hasattr(signal, "SIGHUP"):  # not on Windows
        handlers[signal.SIGHUP] = reload
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@dataclass(slots=True)
class _Run:
    """One run of a daemon."""

    config: Any
    serve: Serve[Any]
    role: str
    version: str
    grace: float
    connect: Connect
    exit_code: int = DONE
    ended: threading.Event = field(default_factory=threading.Event)
    _end_requests: SimpleQueue[float] = field(default_factory=SimpleQueue)
    """Receives the seconds within which the daemon must end; its `put` may be called from a signal handler."""
    _loop: Any = None
    """Token of the event loop, once it runs; signal handlers pass their work to it."""
    _root: Any = None
    """Root task of the event loop."""
    _life: anyio.CancelScope | None = None
    """What a signal cancels: the program and its tasks, once the endpoint is open."""
    _reload: Callable[[], object] | None = None
    """Begins to reload the certificates, while the program runs."""
    _drain: tuple[float, anyio.Event] | None = None
    """What the first SIGTERM sets, if the program drains, and the seconds that it then has."""
    _export: Export | None = None

    def start(self) -> None:
        """Run the daemon to its end, in the main thread."""
        # in a thread, because what delays the end may block the event loop too
        threading.Thread(target=self._force_end, daemon=True, name="shutdown").start()
        # not the event loop's handlers: these start the countdown even when the loop is blocked
        with _signal_handlers(self._on_signal, self._on_hangup):
            if self._has_export:
                from hypha_net.node.telemetry import preload

                preload(self.config)
            try:
                anyio.run(self._main, self.connect(self.config, self.role), backend="trio")
            finally:
                if self._export is not None:
                    self.ended.set()  # the last export has its own time limit
                    self._export.close()

    @property
    def _has_export(self) -> bool:
        return bool(targets(self.config, os.environ))

    def _on_signal(self, number: int, _frame: object) -> None:
        self.exit_code = _exit_code(number)
        if self._loop is None:
            _exit_now(self.exit_code)
        drain, self._drain = self._drain, None
        if drain is not None and number == signal.SIGTERM:
            self._end_requests.put(drain[0] + self.grace)
            self._call_soon(self._begin_drain, *drain)
        else:
            self._end_requests.put(self.grace)
            self._call_soon(self._cancel, number)

    def _on_hangup(self, _number: int, _frame: object) -> None:
        if self._loop is not None:
            self._call_soon(self._begin_reload)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop, unless that has ended."""
        import trio

        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(function, *arguments)

    def _begin_drain(self, seconds: float, event: anyio.Event) -> None:
        _log.info("SIGTERM: draining, for at most %g s", seconds)
        event.set()

    def _begin_reload(self) -> None:
        if self._reload is not None:
            _log.info("SIGHUP: reading the certificates again")
            self._reload()

    def _cancel(self, number: int) -> None:
        if self._life is not None:
            _log.info("%s: ending", signal.Signals(number).name)
            self._life.cancel()

    async def _main(self, opening: AbstractAsyncContextManager[Endpoint]) -> None:
        import trio

        self._root = trio.lowlevel.current_root_task()
        with anyio.CancelScope() as self._life:
            self._loop = trio.lowlevel.current_trio_token()
            await self._run_with_endpoint(opening)
        _log.info("ended")

    async def _run_with_endpoint(self, opening: AbstractAsyncContextManager[Endpoint]) -> None:
        async with opening as endpoint:
            if self._has_export:
                from hypha_net.node.telemetry import open_export

                service, instance = f"hypha-{self.role}", str(endpoint.peer_id)
                self._export = open_export(self.config, service=service, version=self.version, instance=instance)
            readiness = Readiness(outage=None if self.role == "gateway" else gateway_outage(endpoint))
            serve_health(endpoint, readiness, role=self.role, version=self.version)
            _log.info("%s %s is %s, at %s", self.role, self.version, endpoint.peer_id, ", ".join(endpoint.addresses))
            async with anyio.create_task_group() as tasks:
                self._life = tasks.cancel_scope  # the clean-up of the program (ending a job) still needs the endpoint
                if isinstance(endpoint, ReloadsCertificates):
                    self._reload = partial(tasks.start_soon, endpoint.reload_certificates)
                if self._has_export:
                    tasks.start_soon(_measure_peers, endpoint)
                if self.role != "gateway":
                    tasks.start_soon(watch_gateways, endpoint, readiness)
                    tasks.start_soon(call_gateways, endpoint, readiness)
                try:
                    await self.serve(self.config, Node(endpoint, tasks, readiness, self._set_drain))
                finally:
                    self._reload = self._drain = None
                    self._end_requests.put(self.grace)
                tasks.cancel_scope.cancel()

    def _set_drain(self, timeout: float) -> anyio.Event:
        """See `Node.drain_on_sigterm`."""
        event = anyio.Event()
        self._drain = timeout, event
        return event

    def mark_ended(self) -> None:
        """Stop the countdown to the forced end."""
        self.ended.set()
        self._end_requests.put(0.0)

    def _force_end(self) -> None:
        seconds = self._count_down()
        if not self.ended.is_set():
            stuck = "; ".join([*_blocking_code(), *_waiting_tasks(self._root)]) or "no task: a thread holds the process"
            _log.error("still not ended %g s after being told to: %s", seconds, stuck)
            _kill_children()
            logging.shutdown()
            os._exit(FAILED)

    def _count_down(self) -> float:
        """Wait until the daemon must have ended; return the seconds that it had. A later request may shorten them."""
        seconds = self._end_requests.get()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                again = self._end_requests.get(timeout=left)
                if time.monotonic() + again < deadline:
                    seconds, deadline = again, time.monotonic() + again
        return seconds


async def _measure_peers(endpoint: Endpoint) -> None:
    while True:
        _PEERS.set(len(endpoint.connected_peers()))
        await anyio.sleep(_PEERS_EVERY)


def _kill_children() -> None:
    """Kill the processes that this one started: a forced end runs no clean-up."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            _log.error("killing process %d that was left", child.pid)
            child.kill()


def open_configured(config: NodeConfig, role: str) -> AbstractAsyncContextManager[Endpoint]:
    """Open the libp2p endpoint, over mutual TLS, with the configured identity."""
    import hypha_net._libp2p.endpoint  # noqa: F401 - takes seconds: import it before the event loop runs
    from hypha_net import open_endpoint
    from hypha_net.identity import load_identity

    identity = load_identity(config.cert_pem, config.key_pem, config.trust_pem, config.crls_pem)
    if identity.certificate.role not in (None, role):
        _log.warning(
            "cert_pem %s is a %s's and this is a %s: peers refuse what only a %s may send; give it one of its own",
            config.cert_pem,
            identity.certificate.role,
            role,
            role,
        )
    settings = endpoint_settings(config, role)
    return open_endpoint(identity, settings)


def endpoint_settings(config: NodeConfig, role: str) -> Any:
    """Return the endpoint's part of a configuration."""
    from hypha_net.bandwidth import BandwidthLimits
    from hypha_net.settings import EndpointSettings, RelayLimits

    limits = config.limits
    state: Path | None = getattr(config, "state_dir", None)
    relay = getattr(config, "relay", None)
    return EndpointSettings(
        listen_addresses=tuple(config.listen_addresses),
        external_addresses=tuple(config.external_addresses),
        gateway_addresses=tuple(config.gateway_addresses),
        exclude_cidr=tuple(config.exclude_cidr),
        relay_circuit=config.relay_circuit,
        role="gateway" if role == "gateway" else "node",
        max_connections=config.limits.max_connections,
        state_dir=state,
        relay=RelayLimits() if relay is None else RelayLimits(**relay.model_dump()),
        rates=BandwidthLimits(
            limits.upload_rate, limits.download_rate, limits.peer_upload_rate, limits.peer_download_rate
        ),
        require_roles=config.require_roles,
    )


def _blocking_code() -> Iterator[str]:
    """Yield the function that blocks the event loop, if the main thread is in a program's code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and "site-packages" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename != __file__:
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        yield f"the event loop is blocked by {frame.f_code.co_name} ({place})"


def _waiting_tasks(task: Any) -> Iterator[str]:
    """Yield where each innermost task of a tree waits, as ``name (file:line)``."""
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    for child in children:
        yield from _waiting_tasks(child)
    if not children and not task.name.startswith(("trio.", "<")):
        yield f"{task.name} ({_place(task.coro)})"


def _place(coroutine: Any) -> str:
    place = "?"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and "site-packages" not in frame.f_code.co_filename:
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return place
