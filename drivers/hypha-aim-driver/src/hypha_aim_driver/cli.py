"""The command `hypha-aim-driver`."""

from __future__ import annotations

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=61000, show_default=True, help="Port to listen on.")
@click.version_option(package_name="hypha-aim-driver", prog_name="hypha-aim-driver")
def main(host: str, port: int) -> None:
    """Take the metrics that a scheduler posts to its status_bridge, and log them.

    Point the scheduler at it with status_bridge = "HOST:PORT". Writing into an AIM repository comes in a later version.
    """
    import logging

    import uvicorn

    from hypha_aim_driver.app import LogSink, create_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    uvicorn.run(create_app(LogSink()), host=host, port=port, log_config=None)
