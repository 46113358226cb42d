"""The system calls that are refused to a confined process, as a seccomp program; see seccomp(2)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

_AUDIT_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS: Final[Mapping[str, Mapping[str, int]]] = {
    "x86_64": {
        "clone": 56,
        "unshare": 272,
        "setns": 308,
        "clone3": 435,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "prlimit64": 302,
    },
    "aarch64": {
        "clone": 220,
        "unshare": 97,
        "setns": 268,
        "clone3": 435,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "prlimit64": 261,
    },
}
_CLONE_NEWUSER: Final = 0x10000000
_X32_BIT: Final = 0x40000000
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16


def seccomp_filter(machine: str, *, sees_others: bool = False) -> bytes:
    """Return a program that refuses user namespaces, entering others, keyrings, and foreign system calls.

    A process inherits the session keyring of the worker through all namespaces. `clone3` hides its flags from filters:
    it fails as on a kernel without it, so that libraries use `clone`.

    Args:
        machine: as ``uname -m`` has it; of one that is not known, everything is allowed.
        sees_others: whether the process knows the ids of others, whose limits (prlimit) it then may not change.
    """
    if machine not in _AUDIT_ARCHITECTURES:
        return _instruction(_RETURN, _ALLOW)
    numbers = _NUMBERS[machine]
    return b"".join(
        (
            _instruction(_LOAD, _ARCHITECTURE_OFFSET),
            _instruction(_JUMP_EQUAL, _AUDIT_ARCHITECTURES[machine], 1, 0),
            _instruction(_RETURN, _ENOSYS),
            _instruction(_LOAD, _NUMBER_OFFSET),
            _instruction(_JUMP_SET, _X32_BIT, 0, 1),
            _instruction(_RETURN, _ENOSYS),
            _refuse(numbers["clone3"], _ENOSYS),
            *(_refuse(numbers[name], _EPERM) for name in ("setns", "add_key", "request_key", "keyctl")),
            _refuse_other_processes(numbers["prlimit64"]) if sees_others else b"",
            _instruction(_JUMP_EQUAL, numbers["unshare"], 1, 0),
            _instruction(_JUMP_EQUAL, numbers["clone"], 0, 3),  # else to ALLOW
            _instruction(_LOAD, _FIRST_ARGUMENT_OFFSET),
            _instruction(_JUMP_SET, _CLONE_NEWUSER, 0, 1),
            _instruction(_RETURN, _EPERM),
            _instruction(_RETURN, _ALLOW),
        )
    )


def _refuse(number: int, answer: int) -> bytes:
    return _instruction(_JUMP_EQUAL, number, 0, 1) + _instruction(_RETURN, answer)


def _refuse_other_processes(number: int) -> bytes:
    """Refuse a system call whose first argument, a process id, is not 0, the caller."""
    return b"".join(
        (
            _instruction(_JUMP_EQUAL, number, 0, 4),
            _instruction(_LOAD, _FIRST_ARGUMENT_OFFSET),
            _instruction(_JUMP_EQUAL, 0, 1, 0),
            _instruction(_RETURN, _EPERM),
            _instruction(_RETURN, _ALLOW),
        )
    )


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
