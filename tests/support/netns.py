"""Two homes behind NAT and a public gateway between them, as network namespaces of this machine.

    home a - router a (nft masquerade) - wan, where the gateway is - router b (nft masquerade) - home b
    192.168.1.2       10.77.0.2          10.77.0.1                    10.77.0.3                192.168.2.2

Nobody outside can dial into a home. Needs root, iproute2 and nftables: `.ci/run` installs them. Where one is missing,
tests marked `needs_namespaces` are skipped with the reason; with ``CI=true`` they run, and fail with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pytest

WAN = "10.77.0.1"
HOMES = ("a", "b")


def missing() -> str:
    """Return what namespaces need and this machine lacks, with the remedy; empty if they can be made."""
    if tools := [tool for tool in ("ip", "nft") if shutil.which(tool) is None]:
        return f"{', '.join(tools)} not found: apt-get install iproute2 nftables (.ci/run does)"
    if os.geteuid() != 0:
        return "network namespaces are made by root: run this test as root, as .ci/run in CI does"
    return ""


needs_namespaces = pytest.mark.skipif(
    bool(missing()) and os.environ.get("CI") != "true", reason=missing() or "never skipped: namespaces can be made"
)
"""Skip a test where namespaces cannot be made; in CI it runs and fails instead."""


@dataclass(frozen=True)
class Namespaces:
    """The network; names are of this process, so that two runs do not meet."""

    prefix: str

    def words(self, place: str) -> tuple[str, ...]:
        """Words to run a command by in a place: ``wan``, ``a``, ``b``, ``router-a`` or ``router-b``."""
        return ("ip", "netns", "exec", f"{self.prefix}-{place}")

    def run(self, place: str, *command: str) -> str:
        """Run a command in a place to its end; gives what it printed."""
        return _passed(*self.words(place), *command)

    def cut(self, home: str) -> None:
        """Drop everything that goes into a home or out of it."""
        self.run(f"router-{home}", "nft", _CUT)

    def mend(self, home: str) -> None:
        """Undo `cut`."""
        self.run(f"router-{home}", "nft", "delete", "table", "inet", "cut")

    def carried(self) -> int:
        """Bytes that have come to the gateway's machine."""
        return int(self.run("wan", "cat", "/sys/class/net/br0/statistics/rx_bytes"))


@contextmanager
def two_homes(masquerade: str = "masquerade") -> Iterator[Namespaces]:
    """The network, which is gone at the end.

    Args:
        masquerade: how the routers translate; ``masquerade random`` gives every connection a port of its own, as NATs
            do that holes cannot be punched in.
    """
    assert not missing(), missing()
    made = Namespaces(f"hypha{os.getpid()}")
    places = ["wan", *HOMES, *(f"router-{home}" for home in HOMES)]
    try:
        for place in places:
            _passed("ip", "netns", "add", f"{made.prefix}-{place}")
            made.run(place, "ip", "link", "set", "lo", "up")
        made.run("wan", "ip", "link", "add", "br0", "type", "bridge")
        made.run("wan", "ip", "addr", "add", f"{WAN}/24", "dev", "br0")
        made.run("wan", "ip", "link", "set", "br0", "up")
        for number, home in enumerate(HOMES, 1):
            _connect(made, home, number, masquerade)
        yield made
    finally:
        for place in places:
            subprocess.run(["ip", "netns", "delete", f"{made.prefix}-{place}"], capture_output=True, check=False)


def _connect(made: Namespaces, home: str, number: int, masquerade: str) -> None:
    router, inside, outside = f"router-{home}", f"192.168.{number}", f"10.77.0.{number + 1}"
    _veth(made, router, "wan", f"to-{home}")
    made.run("wan", "ip", "link", "set", f"to-{home}", "master", "br0", "up")
    made.run(router, "ip", "addr", "add", f"{outside}/24", "dev", "wan")
    made.run(router, "ip", "link", "set", "wan", "up")
    _veth(made, router, home, "eth", other="home")
    made.run(router, "ip", "addr", "add", f"{inside}.1/24", "dev", "home")
    made.run(router, "ip", "link", "set", "home", "up")
    made.run(home, "ip", "addr", "add", f"{inside}.2/24", "dev", "eth")
    made.run(home, "ip", "link", "set", "eth", "up")
    made.run(home, "ip", "route", "add", "default", "via", f"{inside}.1")
    made.run(router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    made.run(router, "nft", _NAT.replace("masquerade;", f"{masquerade};"))


_CUT: Final = """table inet cut {
    chain forward { type filter hook forward priority -10; policy drop; }
}
"""
_NAT: Final = """table ip nat {
    chain post { type nat hook postrouting priority 100; oifname "wan" masquerade; }
}
table ip filter {
    chain forward {
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname "home" accept
    }
    chain input {
        type filter hook input priority 0; policy drop;
        ct state established,related accept
        iifname "home" accept
    }
}
"""


def _veth(made: Namespaces, one: str, two: str, name: str, other: str = "wan") -> None:
    """A cable from `one`, where its end is called `other`, to `two`, where it is called `name`."""
    ends = ("netns", f"{made.prefix}-{one}", "type", "veth", "peer", "name", name, "netns", f"{made.prefix}-{two}")
    _passed("ip", "link", "add", other, *ends)


def _passed(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
