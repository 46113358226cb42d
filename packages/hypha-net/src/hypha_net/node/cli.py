"""Command line shared by all daemons: ``run``, ``init``, ``probe``, ``config show`` and ``schema``.

A program builds its command line from its model and its coroutine: ``main = Program("hypha-data", load_model, serve,
role="data").cli()``, and may add commands to it. What is slow to import is imported in the command that needs it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import KW_ONLY, asdict, dataclass, field
from importlib.metadata import version as package_version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

import click
from click.core import ParameterSource

from hypha_net.node.accounts import parse_since
from hypha_net.node.exit_codes import BAD_USAGE, DONE, FAILED, INTERRUPTED, UNREACHABLE
from hypha_net.node.logging_setup import LEVELS, configure_logs

if TYPE_CHECKING:
    from hypha_net.node.checks import Check
    from hypha_net.node.config.loader import Loaded
    from hypha_net.node.config.models import NodeConfig
    from hypha_net.node.lifecycle import Serve

_log = logging.getLogger(__name__)

C = TypeVar("C", bound="NodeConfig")
Values = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


Examine = Callable[[], tuple[Sequence[str], Any]]
"""Examines the machine; returns lines for people, and the same as JSON."""
RunChecks: TypeAlias = "Callable[[C, bool], Iterable[Check]]"
"""Yields a program's own checks; with True (``probe``) also those that start processes."""


@dataclass(frozen=True, slots=True)
class InitFile:
    """File that ``init`` writes instead of the configuration, if it is given a flag."""

    flag: str
    """Name of the flag, and of the file without its ``.toml``."""
    help: str
    render: Callable[[], str]
    """Returns the file's text."""


_FILE = click.Path(dir_okay=False, path_type=Path)

config_option = click.option("--config", "-c", "file", type=_FILE, default=None, help="TOML file.")
set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key, such as limits.max_connections=64."
)
format_option = click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", help="How to print the result."
)


def _parse_since(_context: click.Context, _option: click.Parameter, text: str | None) -> float:
    try:
        return 0.0 if text is None else parse_since(text, time.time())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from None


since_option = click.option(
    "--since",
    callback=_parse_since,
    default=None,
    metavar="D",
    help="Only leases held since then: 12h, 7d or 4w ago, or a date: 2026-12-31.",
)
table_format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "csv"]),
    default="text",
    show_default=True,
    help="How to print the result.",
)


class ConfigurationError(click.ClickException):
    """Invalid configuration: exit code 2."""

    exit_code = BAD_USAGE


class UnreachableNetworkError(click.ClickException):
    """Nothing can be reached at the address: exit code 3."""

    exit_code = UNREACHABLE


def _disable_color(ctx: click.Context, _option: click.Parameter, chosen: bool) -> None:
    if chosen:
        ctx.color = False


def _no_color() -> click.Option:
    return click.Option(
        ["--no-color"], is_flag=True, expose_value=False, callback=_disable_color, help="Print without colours, ever."
    )


def _hidden(option: click.Parameter) -> click.Parameter:
    """Return a hidden copy of an option of ``run``, for the older command line without a command."""
    duplicate = copy(option)
    if isinstance(duplicate, click.Option):
        duplicate.hidden = True
    return duplicate


class DaemonGroup(click.Group):
    """Commands of a daemon, each with ``--no-color``; an interrupt exits with code 130."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """See `click.Group.add_command`."""
        for each in (cmd, *cmd.commands.values()) if isinstance(cmd, click.Group) else (cmd,):
            each.params.append(_no_color())
        super().add_command(cmd, name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


def load_configuration(model: type[C], file: Path | None, settings: tuple[str, ...], name: str) -> C:
    """Load the configuration of a command that a program adds, or exit with code 2 and all problems."""
    loaded = _load(model, file, settings, name)
    for warning in loaded.warnings:
        _log.warning("%s", warning)
    return loaded.config


def _load(model: type[C], file: Path | None, settings: tuple[str, ...], name: str) -> Loaded[C]:
    from hypha_net.node.config.errors import ConfigError
    from hypha_net.node.config.loader import load_config

    try:
        return load_config(model, file, os.environ, _flags(settings))
    except ConfigError as error:
        hint = "" if file else f"\nno --config was given; {name} init writes a file to start from"
        raise ConfigurationError(f"the configuration cannot be used\n{error}{hint}") from None


@dataclass(frozen=True, slots=True)
class Program(Generic[C]):
    """A daemon, and its command line."""

    name: str
    """Name of the program and of its distribution, such as ``hypha-data``."""
    load_model: Callable[[], type[C]]
    """Imports the model of its configuration."""
    serve: Serve[C]
    """Coroutine of the program."""
    _: KW_ONLY
    role: str
    """Role in its health answer; ``gateway`` also makes its endpoint a gateway's."""
    example: Values = field(default_factory=dict)
    """Values that ``init`` fills in, nested as in the TOML, or a function that detects them."""
    expected: tuple[type[Exception], ...] = ()
    """Errors of the program that are logged in one line, without traceback."""
    examine: Examine | None = None
    """What ``probe`` does without an address and a configuration."""
    checks: RunChecks[C] | None = None
    """What ``run --check`` and ``probe`` check beside what all daemons have."""
    init_file: InitFile | None = None
    """Another file that ``init`` can write."""

    def cli(self) -> DaemonGroup:
        """Build the command line."""
        name = self.name

        @click.group(
            name,
            cls=DaemonGroup,
            invoke_without_command=True,
            no_args_is_help=True,
            context_settings={"help_option_names": ["-h", "--help"]},
            help=f"Run and configure {name}. Without a command, --config FILE runs it.",
        )
        @config_option
        @click.version_option(package_version(name), prog_name=name)
        @click.pass_context
        def group(ctx: click.Context, /, file: Path | None, **options: Any) -> None:
            if ctx.invoked_subcommand is None:
                self.run(file, **options)
            elif file is not None:
                raise click.UsageError(
                    f"write --config after the command: {name} {ctx.invoked_subcommand} --config {file}"
                )
            elif any(ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE for option in options):
                raise click.UsageError(f"write the options of {ctx.invoked_subcommand} after it")

        run = _run(self)
        group.params.extend(_hidden(option) for option in run.params if option.name != "file")
        group.params.append(_no_color())
        for command in (run, _init(self), _probe(self), _config(self), _schema(self)):
            group.add_command(command)
        return group

    def load(self, file: Path | None, settings: tuple[str, ...]) -> Loaded[Any]:
        """Load the configuration, or exit with code 2 and all problems."""
        return _load(self.load_model(), file, settings, self.name)

    def run(
        self, file: Path | None, *, settings: tuple[str, ...], check: bool, log_format: str, log_level: str
    ) -> None:
        """Run the daemon and exit with its code, or only check the configuration."""
        from hypha_net.node.lifecycle import early_signals, run_daemon

        configure_logs("json" if log_format == "json" else "text", log_level)
        with early_signals():
            loaded = self.load(file, settings)
            if check:
                self._check(loaded, file)
                return
            for warning in loaded.warnings:
                _log.warning("%s", warning)
            version = package_version(self.name)
            code = run_daemon(loaded.config, self.serve, role=self.role, version=version, expected=self.expected)
        click.get_current_context().exit(code)

    def offline_checks(self, loaded: Loaded[Any], *, live: bool) -> Iterable[Check]:
        """Yield the checks that need no network, and the configuration's warnings that none of them reports."""
        from hypha_net.node.checks import check_node

        told = set()
        for found in check_node(loaded.config, self.role, live=live):
            yield found
        for found in self.checks(loaded.config, live) if self.checks is not None else ():
            told.add(found.text)
            yield found
        yield from (Check("warning", text) for text in loaded.warnings if text not in told)

    def _check(self, loaded: Loaded[Any], file: Path | None) -> None:
        """Log warnings and failures, and exit with 1 if ``run`` would fail or the node could not work."""
        count = 0
        for found in self.offline_checks(loaded, live=False):
            if found.state == "FAILED":
                count += 1
                _log.error("%s", found.text)
            elif found.state == "warning":
                _log.warning("%s", found.text)
        if count:
            raise click.ClickException(f"{file or 'environment'}: {count} of the checks failed")
        click.echo(f"{file or 'environment'}: ok")


def _flags(settings: tuple[str, ...]) -> dict[str, object]:
    flags: dict[str, object] = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or not key:
            raise click.UsageError(f"--set {setting}: write KEY=VALUE")
        flags[key.strip()] = value
    return flags


def _run(program: Program[Any]) -> click.Command:
    @click.command("run")
    @config_option
    @set_option
    @click.option("--check", is_flag=True, help="Check configuration, certificates, ports and folders, and stop.")
    @click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
    @click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
    def run(file: Path | None, settings: tuple[str, ...], check: bool, log_format: str, log_level: str) -> None:
        """Run until SIGTERM or SIGINT."""
        program.run(file, settings=settings, check=check, log_format=log_format, log_level=log_level)

    return run


def _init(program: Program[Any]) -> click.Command:
    other = program.init_file
    defaults = f"{program.role}.toml" + (f"; with --{other.flag}: {other.flag}.toml" if other else "")

    @click.command("init")
    @click.option("--out", "-o", type=_FILE, help=f"File.  [default: {defaults}]")
    @click.option(
        "--name",
        default=program.role,
        show_default=True,
        help="Name of the node, as given to hypha-certutil: the files are NAME-cert.pem, NAME-key.pem, NAME-trust.pem.",
    )
    @click.option("--lan", is_flag=True, help="For a local network: private addresses are dialled too.")
    @click.option("--force", is_flag=True, help="Replace the file if it exists.")
    def init(out: Path | None, name: str, lan: bool, force: bool, other_file: bool = False) -> None:
        """Write a commented configuration to start from."""
        if other is not None and other_file:
            _refuse_given(f"--{other.flag}", ("name", "lan"))
            _write(out or Path(f"{other.flag}.toml"), other.render(), force=force)
            return
        from hypha_net.node.config.toml_output import render_config

        text = render_config(program.load_model(), _example(program, name, lan=lan), program.name)
        _write(out or Path(f"{program.role}.toml"), text, force=force)

    if other is not None:
        init.params.insert(0, click.Option([f"--{other.flag}", "other_file"], is_flag=True, help=other.help))
    return init


def _refuse_given(flag: str, names: Sequence[str]) -> None:
    """Refuse options that have no effect with `flag`."""
    ctx = click.get_current_context()
    for name in names:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} has no effect with {flag}; leave it out")


def _write(out: Path, text: str, *, force: bool) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise click.ClickException(f"{out}: exists already; name another file with --out, or use --force") from None
    except OSError as error:
        raise click.ClickException(f"{out}: cannot be written: {error.strerror or error}") from error
    click.echo(f"wrote {out}")


def _example(program: Program[Any], name: str, *, lan: bool) -> dict[str, Any]:
    own = program.example() if callable(program.example) else program.example
    values: dict[str, Any] = {f"{kind}_pem": f"{name}-{kind}.pem" for kind in ("cert", "key", "trust")}
    if program.load_model().needs_gateway:
        values["gateway_addresses"] = ["/ip4/203.0.113.50/tcp/4001"]
    if lan:
        values["exclude_cidr"] = []
    return {**values, **own}


def _probe(program: Program[Any]) -> click.Command:
    more = _EXAMINE_HELP if program.examine is not None else ""

    @click.command("probe", short_help=_PROBE_SHORT_HELP, help=_PROBE_HELP + more)
    @click.argument("address", required=False)
    @config_option
    @set_option
    @click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True)
    @format_option
    def probe(address: str | None, file: Path | None, settings: tuple[str, ...], timeout: float, form: str) -> None:
        if address is None:
            if program.examine is not None and not file and not settings:
                lines, value = program.examine()
                click.echo(json.dumps(value) if form == "json" else "\n".join(lines))
            else:
                _check_all(program, file, settings, timeout, form)
            return
        answer = _ask(program, address, file, settings, timeout)
        if form == "json":
            click.echo(json.dumps(answer))
        else:
            for key, value in answer.items():
                if value is not None:
                    shown = ("yes" if value else "no") if isinstance(value, bool) else value
                    click.echo(f"{key.replace('_', ' '):<16} {shown}")
        click.get_current_context().exit(DONE if answer["healthy"] else FAILED)

    return probe


_PROBE_SHORT_HELP: Final = "Check this node and its gateways; with ADDRESS, ask that node for its health."
_PROBE_HELP: Final = """Check what the configuration needs of this machine and network: a line each, with the remedy.

Checks what `run --check` does, and reaches each gateway with this node's
certificate. Exit code 1: a check has failed.

With ADDRESS, a multiaddr, ask the node there for its health and identity. Exit
code 0: healthy; 1: not healthy; 3: not reachable."""
_EXAMINE_HELP: Final = """

Without ADDRESS and --config, tell how well this machine contains jobs."""


def _check_all(program: Program[Any], file: Path | None, settings: tuple[str, ...], timeout: float, form: str) -> None:
    """Print a line for each check, also those that need the network; exit with 1 if one fails."""
    from hypha_net.node.checks import check_gateways

    configure_logs(level="critical")  # a failure is reported once, as a line
    loaded, states = program.load(file, settings), Counter[str]()
    offline = program.offline_checks(loaded, live=True)
    for found in chain(offline, check_gateways(loaded.config, program.role, timeout)):
        states[found.state] += 1
        click.echo(json.dumps({"state": found.state, "text": found.text}) if form == "json" else str(found))
    if form == "text":
        click.echo(f"{states['FAILED']} of {states.total()} checks failed, {states['warning']} warned")
    click.get_current_context().exit(FAILED if states["FAILED"] else DONE)


def _ask(
    program: Program[Any], address: str, file: Path | None, settings: tuple[str, ...], timeout: float
) -> dict[str, Any]:
    configure_logs(level="critical")  # a failure is reported once, as the error
    config = program.load(file, settings).config
    from anyio import run as run_async

    from hypha_net.node.probe import probe as ask

    with network_errors(address, "ADDRESS"):
        return asdict(run_async(ask, config, address, timeout, backend="trio"))


@contextmanager
def network_errors(subject: str, address_hint: str) -> Iterator[None]:
    """Turn errors of the network into one line and the exit code of a command: 2 for bad input, 3 unreachable, else 1.

    Args:
        subject: what is asked; precedes the line where the error does not name it.
        address_hint: name of the argument that holds the address.
    """
    from hypha_net.errors import AddressError, IdentityError, NetError, UnreachableError, leaf_errors

    try:
        yield
    except (NetError, BaseExceptionGroup) as raised:
        error = next(leaf_errors(raised))
        if isinstance(error, AddressError):
            raise click.BadParameter(str(error), param_hint=address_hint) from None
        if isinstance(error, IdentityError):
            raise ConfigurationError(str(error)) from None
        if isinstance(error, UnreachableError):
            raise UnreachableNetworkError(str(error)) from None
        if isinstance(error, NetError):
            raise click.ClickException(f"{subject}: {error}" if subject not in str(error) else str(error)) from None
        raise


def _config(program: Program[Any]) -> click.Command:
    @click.group("config")
    def config() -> None:
        """Look at the configuration."""

    @config.command("show")
    @config_option
    @set_option
    @format_option
    def show(file: Path | None, settings: tuple[str, ...], form: str) -> None:
        """Print the merged configuration with the origin of each value; secrets are hidden."""
        from hypha_net.node.config.toml_output import rows

        loaded = program.load(file, settings)
        for warning in loaded.warnings:
            click.echo(f"warning: {warning}", err=True)
        found = rows(loaded)
        if form == "json":
            click.echo(json.dumps({row.key: {"value": row.value, "origin": row.origin} for row in found}))
        else:
            for row in found:
                click.echo(str(row))

    return config


def _schema(program: Program[Any]) -> click.Command:
    @click.command("schema")
    def schema() -> None:
        """Print the JSON Schema of the configuration."""
        click.echo(json.dumps({"title": program.name, **program.load_model().model_json_schema()}, indent=2))

    return schema
