"""The command `hypha-aim-driver`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from fastapi import FastAPI

_GOODBYE: Final = 30.0
"""Seconds at the end for writing what waits."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=61000, show_default=True, help="Port to listen on.")
@click.option(
    "--repo",
    metavar="DIR|aim://HOST:PORT",
    help="Write into this AIM repository: a folder, or an `aim server`.  [default: write to the log]",
)
@click.version_option(package_name="hypha-aim-driver", prog_name="hypha-aim-driver")
@click.option("--no-color", is_flag=True, expose_value=False, help="Print without colours, ever.")
def main(host: str, port: int, repo: str | None) -> None:
    """Take the metrics that a scheduler posts to its status_bridge, and write them into AIM: one run a job.

    Point the scheduler at it with status_bridge = "HOST:PORT". Without --repo, metrics are only logged. With it, the
    extra `aim` must be installed: hypha-aim-driver[aim], on Python 3.11 or 3.12. Look at the runs with `aim up`.
    """
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if repo is None:
        _serve_log(host, port)
    else:
        _serve_aim(host, port, _checked(repo))


def _checked(repo: str) -> str:
    from hypha_aim_driver.repository import REMOTE, aim_is_installed

    if "://" in repo and not repo.startswith(REMOTE):
        raise click.BadParameter(f"{repo!r} is neither a folder nor {REMOTE}HOST:PORT", param_hint="--repo")
    if not aim_is_installed():
        raise click.UsageError(
            "--repo needs the package aim, which is not installed: pip install 'hypha-aim-driver[aim]' on Python 3.11"
            " or 3.12 (aim has no wheels for later ones). Without --repo metrics are logged."
        )
    return repo


def _serve_log(host: str, port: int) -> None:
    from hypha_aim_driver.app import LogSink, create_app

    _serve(create_app(LogSink()), host, port)


def _serve_aim(host: str, port: int, repo: str) -> None:
    import logging
    import os

    from hypha_aim_driver.app import create_app
    from hypha_aim_driver.repository import AimRepository
    from hypha_aim_driver.retry_queue import Delivery
    from hypha_aim_driver.runs import JobRuns

    log = logging.getLogger(__name__)
    delivery = Delivery(JobRuns(AimRepository(repo)))
    log.info("metrics go to the AIM repository %s", repo)
    try:
        _serve(create_app(delivery), host, port)
    finally:
        lost = delivery.close(_GOODBYE)
        if lost:
            log.error("%d metrics were not written: AIM did not take them", lost)
        if delivery.hangs:  # AIM's own hooks at the end of the interpreter wait for its server for ever
            log.error("AIM did not let go of its runs within %g s; they look unfinished there", _GOODBYE)
            logging.shutdown()
            os._exit(1)
    if lost:
        raise SystemExit(1)


def _serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until a signal says to end; uvicorn raises the signal once more when it has closed its sockets."""
    import signal

    import uvicorn

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    uvicorn.run(app, host=host, port=port, log_config=None, access_log=False)
