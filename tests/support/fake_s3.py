"""An S3 service on the loopback interface: moto's server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

SECRET = "s3cr3t-0f-th3-0wn3r"


def s3_client(url: str) -> Any:
    """Return a client with the keys ``id`` and `SECRET`."""
    keys = {"aws_access_key_id": "id", "aws_secret_access_key": SECRET}
    return boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)


@contextmanager
def s3_server(bucket: str, objects: dict[str, bytes]) -> Iterator[str]:
    """Serve a bucket; yields the URL of the service."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = s3_client(f"http://{host}:{port}")
    client.create_bucket(Bucket=bucket)
    for key, body in objects.items():
        client.put_object(Bucket=bucket, Key=key, Body=body)
    yield f"http://{host}:{port}"
    server.stop()
