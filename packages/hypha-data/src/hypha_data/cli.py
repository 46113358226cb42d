"""Command line `hypha-data`: the commands of every daemon, ``prepare``, ``inspect``, ``list`` and ``provide``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hypha_data.config import DataConfig, ListConfig
from hypha_data.errors import DatasetError
from hypha_data.job_lines import describe_labels, job_lines
from hypha_data.sources.options import FORMATS
from hypha_net.node.checks import Check
from hypha_net.node.cli import Program, config_option, format_option, load_configuration, network_errors, set_option
from hypha_net.node.logging_setup import configure_logs
from hypha_proto.datasets import SAFETENSORS, Manifest


async def _serve(config: DataConfig, node: Any) -> None:
    from hypha_data.service import serve  # slow to import and not needed by `--help` and `init`

    await serve(config, node)


def _checks(config: DataConfig, _live: bool) -> Iterator[Check]:
    from hypha_data.inspection import check_datasets  # imports what only this command needs

    return check_datasets(config)


main = Program(
    "hypha-data",
    lambda: DataConfig,
    _serve,
    role="data",
    example={"dataset_path": "dataset"},
    expected=(DatasetError,),
    checks=_checks,
).cli()


def _add_verify_option(run: click.Command) -> None:
    callback = run.callback
    assert callback is not None

    def with_verify(*, verify: bool, settings: tuple[str, ...], **options: Any) -> None:
        callback(settings=(*settings, "verify=true") if verify else settings, **options)

    run.callback = with_verify
    run.params.append(click.Option(["--verify"], is_flag=True, help="Check the digests of all slices, changed or not."))


def _provide_command(run: click.Command) -> click.Command:
    """Return a command like ``run`` that also announces the files that it names."""
    callback = run.callback
    assert callback is not None

    def provide(*, files: tuple[Path, ...], settings: tuple[str, ...], **options: Any) -> None:
        """Announce FILES by their SHA-256 and serve them until SIGTERM or SIGINT.

        Prints the digest of each, by which jobs name it: dht = "<digest>". What the configuration serves is served too.
        A node that runs already with this configuration provides what its key `provide` lists.
        """
        from hypha_data.provided_files import read_file

        try:
            for path in files:
                click.echo(f"{read_file(path, lambda _count: None).sha256}  {path}")
        except DatasetError as error:
            raise click.ClickException(str(error)) from None
        paths = json.dumps([str(path.absolute()) for path in files])
        callback(settings=(*settings, f"provide={paths}"), **options)

    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    argument = click.Argument(["files"], type=path, nargs=-1, required=True)
    options = [option for option in run.params if option.name != "no_color"]
    return click.Command("provide", callback=provide, params=[argument, *options], help=provide.__doc__)


main.add_command(_provide_command(main.commands["run"]))
_add_verify_option(main.commands["run"])


def _parse_size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    height, _, width = value.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise click.BadParameter(f"{value!r}: expected height and width, such as 32x48")
    return int(height), int(width)


class _ProgressLines:
    """Prints progress to standard error, on a terminal in one line, otherwise a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._pause = 0.2 if self._is_terminal else 10.0
        self._printed = time.monotonic()
        self._is_open = False

    def __call__(self, what: str, count: int) -> None:
        if time.monotonic() - self._printed < self._pause:
            return
        self._printed = time.monotonic()
        self._is_open = self._is_terminal
        click.echo(
            f"\r{count} {what}\033[K" if self._is_terminal else f"{count} {what}", nl=not self._is_terminal, err=True
        )

    def close(self) -> None:
        """End the line."""
        if self._is_open:
            click.echo("\r\033[K", nl=False, err=True)
            self._is_open = False


def _describe(manifest: Manifest) -> Iterator[str]:
    """Yield the columns and labels of a dataset, one line each."""
    for name, kind in (manifest.columns or {}).items():
        yield f"  column {name}: {kind}"
    if manifest.labels:
        yield f"  labels: {describe_labels(manifest.labels)}"


def _print_prepared(out: Path, manifest: Manifest) -> None:
    samples = sum(entry.samples for entry in manifest.slices)
    size = sum(entry.size for entry in manifest.slices)
    click.echo(f"{out}: dataset {manifest.dataset}, {samples} samples in {len(manifest.slices)} slices, {size} bytes")


def _as_json(manifest: Manifest) -> dict[str, object]:
    return {
        "dataset": manifest.dataset,
        "slices": len(manifest.slices),
        "samples": sum(entry.samples for entry in manifest.slices),
        "bytes": sum(entry.size for entry in manifest.slices),
        "format": manifest.format or SAFETENSORS,
        "columns": manifest.columns,
        "labels": manifest.labels,
    }


@main.command()
@click.argument("sources", metavar="SOURCE...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the dataset.")
@click.option("--slices", type=click.IntRange(min=1), help="How many to cut.  [default: 16, or more of 64 MiB]")
@click.option("--name", default=None, help="Name in the manifest.  [default: the folder's name]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the shuffle.")
@click.option(
    "--format",
    "--source-format",
    "source_format",
    type=click.Choice(["auto", *FORMATS]),
    default="auto",
    show_default=True,
    help="Format of SOURCE; auto goes by the suffix of its name, or by what the folder holds.",
)
@click.option("--text", metavar="COLUMN", help="Tables: column of the text.")
@click.option("--label", metavar="COLUMN", help="Tables: column of the label, a number from 0 or a name.")
@click.option("--columns", metavar="A,B", help="Tables: further columns to keep.  [default: all, or those named]")
@click.option("--tokenizer", metavar="DIR|REPO", help="Tokenizer of the text: a folder with tokenizer.json.")
@click.option("--length", type=int, help="Tokens of a row with --tokenizer, else bytes.")
@click.option("--lines", is_flag=True, help="Text: each line is a sample.")
@click.option("--size", metavar="HxW", callback=_parse_size, help="Images: height and width.")
@click.option("--raw-pixels", is_flag=True, help="Images: keep bytes, for the image preprocessor of a job.")
@click.option("--encoding", default="utf-8", show_default=True, help="Encoding of csv and text.")
@click.option("--delimiter", help="Character between the cells of a csv file.  [default: as in its first line]")
@click.option("--split", default="train", show_default=True, help="hf: which part of the dataset.")
@click.option(
    "--test",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Part of the samples for NAME-test, such as 0.1.",
)
@click.option(
    "--force", is_flag=True, help="Replace slices that are there: all *.safetensors and *.jsonl of the folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def prepare(
    sources: tuple[Path, ...],
    out: Path,
    slices: int | None,
    name: str | None,
    seed: int,
    source_format: str,
    columns: str | None,
    test: float,
    force: bool,
    as_json: bool,
    **reading: Any,
) -> None:
    """Shuffle the samples of SOURCE and cut them into slices.

    SOURCE is a safetensors file whose tensors share their first dimension, the samples; a table as csv, JSON lines or
    Parquet; a folder of images with one folder a class; text; or a Hugging Face dataset, by its folder or
    name. Several files of one format and patterns such as 'part-*.csv' are one dataset. Csv, JSON lines and text may be
    compressed: .gz, .zst.

    If it is interrupted, the same command continues.
    """
    from hypha_data.catalog import open_dataset
    from hypha_data.prepare import prepare_dataset, test_folder
    from hypha_data.sources.options import ReadOptions

    name, progress = name or out.resolve().name, _ProgressLines()
    kept = tuple(column for column in (columns or "").split(",") if column)
    try:
        manifest = prepare_dataset(
            sources,
            out,
            name=name,
            slices=slices,
            seed=seed,
            force=force,
            source_format=None if source_format == "auto" else source_format,
            options=ReadOptions(columns=kept, **reading),
            test=test,
            on_notice=lambda line: click.echo(f"note: {line}", err=True),
            on_progress=progress,
        )
        tested = open_dataset(f"{name}-test", test_folder(out)).manifest if test else None
    except (DatasetError, OSError) as error:
        progress.close()
        raise click.ClickException(str(error)) from None
    progress.close()
    if as_json:
        click.echo(json.dumps(_as_json(manifest) | ({"test": _as_json(tested)} if tested else {})))
        return
    _print_prepared(out, manifest)
    if tested is not None:
        _print_prepared(test_folder(out), tested)
    for line in _describe(manifest):
        click.echo(line)
    click.echo("\nA job that fits has:\n")
    for line in job_lines(manifest, None if tested is None else tested.dataset):
        click.echo(line)


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--verify", is_flag=True, help="Read all slices and compare their digests.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="How to print the result.")
def inspect(folder: Path, verify: bool, form: str) -> None:
    """Print what the dataset in FOLDER holds; exit with 1 if a slice is not as its manifest describes it."""
    from hypha_data.inspection import inspect_folder

    try:
        found = inspect_folder(folder, verify=verify)
    except (DatasetError, OSError) as error:
        raise click.ClickException(str(error)) from None
    manifest, counts = found.dataset.manifest, found.class_counts
    if form == "json":
        click.echo(
            json.dumps(
                _as_json(manifest) | {"class_counts": counts, "faults": found.faults, "first_rows": found.first_rows}
            )
        )
    else:
        _print_prepared(folder, manifest)
        for line in _describe(manifest):
            click.echo(line)
        if counts is not None:
            samples = sum(counts.values())
            shown = ", ".join(f"{number}: {n} ({n / samples:.1%})" for number, n in [*counts.items()][:20])
            click.echo(f"  samples by label: {shown}{', …' if len(counts) > 20 else ''}")
        for number, row in enumerate(found.first_rows, 1):
            click.echo(f"  row {number}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
        for fault in found.faults:
            click.echo(f"  {fault}")
    if found.faults:
        raise SystemExit(1)


@main.command("list")
@config_option
@set_option
@click.option("--gateway", metavar="ADDRESS", help="Multiaddr of a gateway to ask.  [default: gateway_addresses]")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True)
@format_option
def list_command(file: Path | None, settings: tuple[str, ...], gateway: str | None, timeout: float, form: str) -> None:
    """Print the datasets that are announced to a gateway, with the certificate of a data node or a scheduler.

    The gateways of the configuration are asked one after the other until one answers. Exit code 1: it cannot
    list datasets; 3: none can be reached.
    """
    configure_logs(level="critical")  # a failure is reported once, as the error
    own = settings if gateway is None else (*settings, f"gateway_addresses={gateway}")
    config = load_configuration(ListConfig, file, own, "hypha-data")
    from anyio import run as run_async

    from hypha_data.listing import as_table, ask_gateways

    with network_errors(", ".join(config.gateway_addresses), "--gateway"):
        address, datasets = run_async(ask_gateways, config, timeout, backend="trio")
    if form == "json":
        plain = [{name: getattr(each, name) for name in each.__struct_fields__} for each in datasets]
        click.echo(json.dumps({"gateway": address, "datasets": plain}))
    elif datasets:
        click.echo("\n".join(as_table(datasets)))
    else:
        click.echo(f"no dataset is announced to gateway {address}")
