"""Runs first in an executor's process: limits the process, and then replaces itself by the executor's command.

Called in a process that `fork_server` has forked, and where there is none started by `process.spawn` as a script of its
own: no Python code runs between fork and exec in the worker. It imports little of the standard library, and the costly
`ctypes` only where a step needs it: a start without `fork_server` waits for it. The steps are a dictionary of plain
values; as an argument of the script, what `marshal` writes of it, in hexadecimal digits:

- ``cgroups``: paths of `cgroup.procs` files that the process joins.
- ``rlimits``: soft and hard limits by the name of the resource.
- ``landlock``: see `_restrict`.
- ``ignored_signals``: names of signals that have no effect on the command.
- ``owners``: see `_map_owners`.
- ``supervisor``: file descriptor; see `_supervise`.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, NoReturn
else:
    import _signal as signal  # without the enumerations of `signal`

_UMASK = 0o077
_KILL_ROUNDS = 200
"""How often the supervisor looks for further descendants; one round takes at least 10 ms."""
_KILL_PAUSE = 0.01
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""Rights on files that Landlock handles, by the version of its interface that added them."""
_READ_RIGHTS = 0b1101  # execute, read a file, list a folder
_RIGHTS_OF_FILES = 0b111 | 1 << 14 | 1 << 15  # execute, write, read, truncate, ioctl; the others are of folders
_ABI_NETWORK, _TCP_RIGHTS = 4, 0b11  # bind, connect
_ABI_SCOPES, _SCOPES = 6, 0b11  # abstract sockets, signals
# the older system calls have other numbers on each architecture
_MOUNT, _UNSHARE, _SECCOMP = {"x86_64": (165, 272, 317)}.get(os.uname().machine, (40, 97, 277))
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_AT_FDCWD, _AT_EMPTY_PATH, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = -100, 0x1000, 1, 4
_MOUNT_ATTR_IDMAP = 0x100000
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_INSTRUCTION = 8
"""Bytes of one."""
_FAILED = 126
"""Exit code if a step fails or the command cannot be started."""


class _Suppressed:
    """`contextlib.suppress`, whose module takes longer to import than everything here."""

    def __init__(self, *errors: type[Exception]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self._errors)


def main(arguments: Sequence[str]) -> NoReturn:
    """Carry out the steps, the first argument, and run the command after ``--``."""
    carry_out(marshal.loads(bytes.fromhex(arguments[0])), list(arguments[2:]), os.environ)


def carry_out(steps: dict[str, Any], command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Carry out the steps and become the command, or end with a line on standard error."""
    try:
        os.umask(_UMASK)
        if (owners := steps.pop("owners", None)) is not None:
            _map_owners(int(owners["uid"]), owners["paths"], owners["readable"])
        _join_cgroups(steps.pop("cgroups", ()))
        _set_rlimits(steps.pop("rlimits", {}))
        if (descriptor := steps.pop("supervisor", None)) is not None:
            _supervise(descriptor)
        _set_signals(steps.pop("ignored_signals", ()))
        if (rules := steps.pop("landlock", None)) is not None:
            _restrict(rules)
        if steps:
            raise ValueError(f"unknown steps {', '.join(steps)}")
        os.execve(command[0], command, env)
    except (OSError, ValueError) as error:
        give_up(error)


def give_up(error: Exception) -> NoReturn:
    """End the process because it cannot become the command."""
    print(f"the executor cannot be started: {error}", file=sys.stderr, flush=True)
    os._exit(_FAILED)


def end_with_parent(parent: int) -> None:
    """Let this process be killed when the thread that has started it ends, or end now if its process has ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(_FAILED)


def launcher_command(steps: Mapping[str, Any]) -> list[str]:
    """Return the program and arguments that carry out `steps`; the command to run is to follow."""
    return [sys.executable, "-I", "-S", __file__, marshal.dumps(dict(steps)).hex(), "--"]


def _join_cgroups(paths: Iterable[str]) -> None:
    for path in paths:
        with open(path, "w") as file:
            file.write("0")


def _set_rlimits(limits: Mapping[str, Sequence[int]]) -> None:
    for name, (soft, hard) in limits.items():
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def _set_signals(ignored: Iterable[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python
        signal.signal(number, signal.SIG_DFL)
    for name in ignored:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def _restrict(rules: Mapping[str, Any]) -> None:
    """Take all capabilities from the command and what it starts, and apply Landlock's `rules`.

    Args:
        rules: ``abi`` of the kernel; ``readable`` and ``writable``, lists of paths; ``network``, a bool; ``seccomp``,
            a program in hexadecimal digits.
    """
    _drop_bounding_set()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    abi = int(rules["abi"])
    handled = sum(bits for version, bits in _FILE_RIGHTS.items() if version <= abi)
    network = 0 if rules["network"] or abi < _ABI_NETWORK else _TCP_RIGHTS
    scopes = _SCOPES if abi >= _ABI_SCOPES else 0
    attributes = struct.pack("=QQQ", handled, network, scopes)
    # older kernels know fewer fields
    size = 24 if abi >= _ABI_SCOPES else 16 if abi >= _ABI_NETWORK else 8
    ruleset = _syscall(_LANDLOCK_CREATE_RULESET, attributes, size, 0)
    for path in rules["readable"]:
        _allow(ruleset, path, handled & _READ_RIGHTS)
    for path in rules["writable"]:
        _allow(ruleset, path, handled)
    _syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    _filter_system_calls(bytes.fromhex(rules["seccomp"]))


def _filter_system_calls(program: bytes) -> None:
    import ctypes

    instructions = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("=H6xQ", len(program) // _SECCOMP_INSTRUCTION, ctypes.addressof(instructions))
    _syscall(_SECCOMP, _SECCOMP_SET_MODE_FILTER, 0, described)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Add a rule for what is beneath `path`, if it exists."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _RIGHTS_OF_FILES
    _syscall(_LANDLOCK_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    os.close(descriptor)


def _map_owners(uid: int, paths: Iterable[str], readable: Iterable[str]) -> None:
    """Let what an owner has appear as owned by `uid`: by idmapped mounts, in a new mount namespace. Needs root.

    What a process of `uid` creates there belongs to the owner of the path outside.

    Args:
        uid: the user.
        paths: must be on file systems that have idmapped mounts.
        readable: the same, but where that does not work the modes of the files decide.
    """
    _unshare(_CLONE_NEWNS)
    _syscall(_MOUNT, b"none", b"/", 0, _MS_REC | _MS_PRIVATE, 0)
    namespaces: dict[tuple[int, int], int] = {}
    for path in paths:
        _map_owner(uid, path, namespaces)
    for path in readable:
        with _Suppressed(OSError):  # its file system has no idmapped mounts: its modes decide
            _map_owner(uid, path, namespaces)
    for namespace in namespaces.values():
        os.close(namespace)


def _map_owner(uid: int, path: str, namespaces: dict[tuple[int, int], int]) -> None:
    place = os.fsencode(os.path.realpath(path))
    status = os.stat(place)
    owner = (status.st_uid, status.st_gid)
    if owner not in namespaces:
        namespaces[owner] = _open_user_namespace(f"{owner[0]} {uid} 1", f"{owner[1]} {uid} 1")
    mount = _syscall(_OPEN_TREE, _AT_FDCWD, place, _OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        attributes = struct.pack("=QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, namespaces[owner])
        _syscall(_MOUNT_SETATTR, mount, b"", _AT_EMPTY_PATH, attributes, len(attributes))
        _syscall(_MOVE_MOUNT, mount, b"", _AT_FDCWD, place, _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(mount)


def _open_user_namespace(uid_map: str, gid_map: str) -> int:
    """Return a descriptor of a new user namespace; no process stays in it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _unshare(_CLONE_NEWUSER)
        os.write(writer, b"1")
        signal.pause()
    try:
        os.close(writer)
        if not os.read(reader, 1):
            raise OSError("a user namespace cannot be made")
        for name, text in (("uid_map", uid_map), ("gid_map", gid_map)):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(text)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _unshare(flags: int) -> None:
    _syscall(_UNSHARE, flags)


def _syscall(number: int, *arguments: int | bytes) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_char_p(each) if isinstance(each, bytes) else ctypes.c_long(each) for each in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *values)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number}: {os.strerror(error)}")
    return result


def _drop_bounding_set() -> None:
    """Empty the capability bounding set, so that the next exec leaves root without capabilities."""
    if os.geteuid() != 0:
        return
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # the first number that is no capability of this kernel
            return


def _prctl(option: int, value: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _supervise(descriptor: int) -> None:
    """Return in a child process, which runs the command; in this process, end all of its descendants at the end.

    Orphaned descendants become children of this process, also those in sessions of their own. They are killed when the
    command has ended after SIGTERM or by itself, and when the worker has ended, which closes the other end of the pipe
    `descriptor`. This process then ends as the command has.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    own = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        os.close(descriptor)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != own:
            os._exit(_FAILED)
        return
    status = _wait_for(child, descriptor)
    _kill_descendants()
    _end_like(status)


def _wait_for(child: int, descriptor: int) -> int | None:
    """Reap children until `child` has ended, and return its status; None if the worker has ended before."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the command's own signal goes to its process group
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    while True:
        with _Suppressed(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == child:
                    return ended[1]
        readable, _, _ = select.select([descriptor, reader], [], [])
        if descriptor in readable:
            return None
        os.read(reader, 4096)


def _kill_descendants() -> None:
    """Kill all descendants; those whose parent has ended become children of this process."""
    for _ in range(_KILL_ROUNDS):
        for pid in _descendants(os.getpid()):
            with _Suppressed(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(_KILL_PAUSE)


def _descendants(ancestor: int) -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        with _Suppressed(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found = [ancestor]
    for pid in found:  # which grows
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _end_like(status: int | None) -> NoReturn:
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with _Suppressed(OSError, ValueError):  # SIGKILL has no handler to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
