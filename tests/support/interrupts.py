"""Ctrl-C for programs that tests start."""

from __future__ import annotations

import signal


def accept_interrupts() -> None:
    """Let Ctrl-C end a program, also if these tests run in the background of a shell, which ignores it for them.

    For the argument `preexec_fn` of `subprocess.Popen`.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
