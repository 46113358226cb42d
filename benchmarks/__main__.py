"""``python -m benchmarks [NAME …]``: measure, print a table and, with ``--json FILE``, write the rows as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import ssl
import sys
from pathlib import Path

from benchmarks.measures import MEASURES
from benchmarks.run import MIB, open_run
from benchmarks.tables import as_json, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURES)}; all by default")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="size of the file that moves (1024)")
    parser.add_argument("--repeat", type=int, default=5, help="how often a transfer is measured (5)")
    parser.add_argument("--count", type=int, default=500, help="requests, a fifth as many connections (500)")
    parser.add_argument("--leaves", type=int, default=60, help="nodes behind the gateway for gossip (60)")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of each run with and without faults (10)")
    parser.add_argument("--workers", type=int, default=200, help="workers of the largest simulated network (200)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another version, for the demo")
    parser.add_argument("--folder", type=Path, help="where files are written (the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    given = parser.parse_args()
    for name in given.names:
        if name not in MEASURES:
            parser.error(f"no benchmark {name!r}; there are: {', '.join(MEASURES)}")
    if given.folder is not None and not given.folder.is_dir():
        parser.error(f"--folder: {given.folder} is no folder; create it first")
    rows = []
    for name in given.names or MEASURES:
        with open_run(
            given.folder,
            size=given.size * MIB,
            repeat=given.repeat,
            count=given.count,
            leaves=given.leaves,
            minutes=given.minutes,
            workers=given.workers,
            before=given.before,
        ) as run:
            found = MEASURES[name](run)
        print(f"\n{name}\n\n{table(found)}", flush=True)
        rows += found
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    print(f"\n{machine}, {ssl.OPENSSL_VERSION}", file=sys.stderr)
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine, "rows": as_json(rows)}, indent=1) + "\n")


main()
