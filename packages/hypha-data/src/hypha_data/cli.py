"""Command line `hypha-data`: the commands of every daemon, and ``prepare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hypha_data.config import DataConfig
from hypha_data.errors import DatasetError
from hypha_net.node.cli import daemon_cli
from hypha_proto.datasets import SAFETENSORS, SLICE_SUFFIXES


async def _serve(config: DataConfig, node: Any) -> None:
    from hypha_data.service import serve  # slow to import and not needed by `--help` and `init`

    await serve(config, node)


main = daemon_cli(
    "hypha-data", DataConfig, _serve, role="data", example={"dataset_path": "dataset"}, expected=(DatasetError,)
)


def _add_verify_option(run: click.Command) -> None:
    callback = run.callback
    assert callback is not None

    def with_verify(*, verify: bool, settings: tuple[str, ...], **options: Any) -> None:
        callback(settings=(*settings, "verify=true") if verify else settings, **options)

    run.callback = with_verify
    run.params.append(click.Option(["--verify"], is_flag=True, help="Check the digests of all slices, changed or not."))


_add_verify_option(main.commands["run"])


@main.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the dataset.")
@click.option("--slices", type=click.IntRange(min=1), required=True, help="How many slices to cut.")
@click.option("--name", default=None, help="Name in the manifest.  [default: the folder's name]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the shuffle.")
@click.option(
    "--source-format",
    type=click.Choice(["auto", *SLICE_SUFFIXES]),
    default="auto",
    show_default=True,
    help="Format of SOURCE; auto goes by the suffix of its name.",
)
@click.option(
    "--force", is_flag=True, help="Replace slices that are there: all *.safetensors and *.jsonl of the folder."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="How to print the result.")
def prepare(
    source: Path,
    out: Path,
    slices: int,
    name: str | None,
    seed: int,
    source_format: str,
    force: bool,
    form: str,
) -> None:
    """Shuffle the samples of SOURCE and cut them into slices.

    SOURCE is a safetensors file whose tensors share their first dimension, the samples; or a file of JSON rows, one
    object a line, whose name ends in .jsonl or .ndjson.
    """
    from hypha_data.prepare import prepare_dataset

    try:
        manifest = prepare_dataset(
            source,
            out,
            name=name or out.resolve().name,
            slices=slices,
            seed=seed,
            force=force,
            source_format=None if source_format == "auto" else source_format,
            on_notice=lambda line: click.echo(f"note: {line}", err=True),
        )
    except (DatasetError, OSError) as error:
        raise click.ClickException(str(error)) from None
    samples = sum(entry.samples for entry in manifest.slices)
    size = sum(entry.size for entry in manifest.slices)
    if form == "json":
        result = {"dataset": manifest.dataset, "slices": slices, "samples": samples, "bytes": size}
        click.echo(json.dumps({**result, "format": manifest.format or SAFETENSORS, "columns": manifest.columns}))
    else:
        click.echo(f"{out}: dataset {manifest.dataset}, {samples} samples in {slices} slices, {size} bytes")
