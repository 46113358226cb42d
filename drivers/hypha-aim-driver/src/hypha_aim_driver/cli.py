"""Command line `hypha-aim-driver`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from fastapi import FastAPI

_DRAIN_TIMEOUT: Final = 30.0
"""Seconds to write the queued metrics on exit."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=61000, show_default=True, help="Port to listen on.")
@click.option(
    "--repo",
    metavar="DIR|aim://HOST:PORT",
    help="AIM repository to write to: a directory, or an `aim server`.  [default: write to the log]",
)
@click.version_option(package_name="hypha-aim-driver", prog_name="hypha-aim-driver")
@click.option("--no-color", is_flag=True, expose_value=False, help="Never print in color.")
def main(host: str, port: int, repo: str | None) -> None:
    """Accept the metrics that a scheduler posts to its status_bridge, and write them to AIM, one run per job.

    Set status_bridge = "HOST:PORT" in the scheduler's configuration. Without --repo, metrics are only logged. --repo
    needs the extra `aim`: hypha-aim-driver[aim], on Python 3.11 or 3.12. View the runs with `aim up`.
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
        raise click.BadParameter(f"{repo!r} is neither a directory nor {REMOTE}HOST:PORT", param_hint="--repo")
    if not aim_is_installed():
        raise click.UsageError(
            "--repo needs the package aim, which is not installed: install the extra hypha-aim-driver[aim] on Python"
            " 3.11 or 3.12 (aim has no wheels for later versions). Without --repo, metrics are logged."
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
    from hypha_aim_driver.retry_queue import RetryQueue
    from hypha_aim_driver.runs import JobRuns

    log = logging.getLogger(__name__)
    queue = RetryQueue(JobRuns(AimRepository(repo)))
    log.info("writing metrics to the AIM repository %s", repo)
    try:
        _serve(create_app(queue), host, port)
    finally:
        lost = queue.close(_DRAIN_TIMEOUT)
        if lost:
            log.error("%d metrics were lost: AIM did not accept them", lost)
        if queue.is_running:  # AIM's exit hooks would wait for its server forever
            log.error("AIM did not close its runs within %g s; AIM shows them as unfinished", _DRAIN_TIMEOUT)
            logging.shutdown()
            os._exit(1)
    if lost:
        raise SystemExit(1)


def _serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; uvicorn raises the signal again after closing its sockets."""
    import signal

    import uvicorn

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    uvicorn.run(app, host=host, port=port, log_config=None, access_log=False)
