"""A process that swaps files and folders while a test opens them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SWAP = """
import itertools, os, sys
os.chdir(sys.argv[1])
os.write(1, b"x")
gaps = itertools.count()
while os.getppid() == int(sys.argv[2]):
    for name in sys.argv[3:]:
        try:
            os.rename(name, name + ".mine")
            os.rename(name + ".other", name)
            os.rename(name, name + ".other")
            os.rename(name + ".mine", name)
        except OSError:
            while os.path.lexists(name + ".mine"):  # the worker has made a folder in a gap
                try:
                    os.rename(name, f"{name}.{next(gaps)}")
                    os.rename(name + ".mine", name)
                except OSError:
                    pass
"""
"""Puts NAME.other in the place of NAME and back, again and again."""


@contextmanager
def swapping(folder: Path, *names: str) -> Iterator[None]:
    """Run a process that swaps entries of a folder until the end of the context."""
    arguments = [str(folder), str(os.getpid()), *names]
    command = [sys.executable, "-I", "-S", "-c", SWAP, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"x"
            yield
            assert process.poll() is None
        finally:
            process.kill()
