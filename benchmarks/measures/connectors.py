"""Rate of each of a worker's connectors against the download of the library that it uses, and its memory.

By `dht` also from two holders with limited uplinks against one.
"""

from __future__ import annotations

import hashlib
import statistics
from contextlib import ExitStack
from pathlib import Path

from benchmarks.children import Child, start_child
from benchmarks.programs.sources import BUCKET
from benchmarks.run import MIB, BenchmarkRun
from benchmarks.tables import Row, paired

LIMITED = 64 * MIB
"""Bytes of the file that comes from holders with limited uplinks; content from 32 MiB on comes from several at once."""
UPLINK = 16 * MIB
"""Bytes a second of such a holder."""
LIBRARIES = {
    "uri": "httpx",
    "s3": "obstore",
    "hub": "huggingface_hub",
    "file": "shutil.copyfile",
    "file URL": "shutil.copyfile, hashlib.file_digest",
    "dht": "one transfer from a known peer",
}


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure in turns."""
    source, _ = run.file("source", run.size)
    sha256 = _sha256(source)
    folder = run.folder / "fetched"
    folder.mkdir()
    issue = run.organisation.node
    with ExitStack() as stack:
        services = stack.enter_context(start_child("sources", path=str(source)))
        _upload(services.about["s3"], source)
        gateway = stack.enter_context(start_child("node", files=issue("gateway", "gateway"), role="gateway"))
        address = gateway.about["address"]
        holder, one, other = (
            stack.enter_context(start_child("node", files=issue(name), gateway=address)) for name in "abc"
        )
        holder.ask("provide", path=str(source), sha256=sha256, size=run.size)
        taker = stack.enter_context(
            start_child(
                "connectors", files=issue("taker"), gateway=address, folder=str(folder), root=str(run.folder),
                web=services.about["web"], s3=services.about["s3"],
            )
        )  # fmt: skip
        places = {
            "uri": (f"{services.about['web']}/file", f"{services.about['web']}/file"),
            "s3": (f"s3://{BUCKET}/file", "file"),
            "hub": ("hub", "file"),
            "file": (str(source), str(source)),
            "file URL": (source.as_uri(), str(source)),
            "dht": (f"sha256:{sha256}", sha256),
        }
        rows = []
        for kind, (uri, place) in places.items():
            rows += _compare(run, taker, folder / "file", kind, uri, place, holder.about["peer"])
        rows.append(_from_two(run, taker, folder / "file", one, other))
    return rows


def _compare(run: BenchmarkRun, taker: Child, target: Path, kind: str, uri: str, place: str, peer: str) -> list[Row]:
    rates: dict[str, list[float]] = {"ours": [], "reference": []}
    memory = []
    for number in range(run.repeat + 1):
        run.settle()
        plain, _ = taker.ask("fetch_plainly", kind=kind, place=place, peer=peer)
        run.check_and_remove(target, run.size)
        run.settle()
        seconds, taken = taker.ask("fetch", uri=uri)
        run.check_and_remove(target, run.size)
        if number:  # the first ones import the libraries and open connections
            rates["reference"].append(run.size / MIB / plain)
            rates["ours"].append(run.size / MIB / seconds)
            memory.append(taken / MIB)
    return [
        paired(f"connector {kind}", rates["ours"], rates["reference"], LIBRARIES[kind], "0.7"),
        Row(f"connector {kind}: anonymous memory", "MiB", max(0.001, statistics.median(memory)), bound="≤ 64 MiB"),
    ]


def _from_two(run: BenchmarkRun, taker: Child, target: Path, one: Child, other: Child) -> Row:
    rates: dict[str, list[float]] = {"one": [], "two": []}
    for number in range(run.repeat):
        for kind, holders in (("one", (one,)), ("two", (one, other))):
            file, _ = run.file(f"{kind}-{number}", LIMITED)
            sha256 = _sha256(file)
            for holder in holders:
                holder.ask("provide", path=str(file), sha256=sha256, size=LIMITED, rate=UPLINK)
            seconds, _ = taker.ask("fetch", uri=f"sha256:{sha256}")
            rates[kind].append(LIMITED / MIB / seconds)
            run.check_and_remove(target, LIMITED)
            file.unlink()
    return paired("connector dht, two holders of limited uplinks", rates["two"], rates["one"], "one holder", "1.6")


def _upload(endpoint: str, source: Path) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="id", aws_secret_access_key="secret"
    )
    client.create_bucket(Bucket=BUCKET)
    with source.open("rb") as file:
        client.put_object(Bucket=BUCKET, Key="file", Body=file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
