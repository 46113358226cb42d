"""Exit codes of a process that a worker starts, and the one line that it logs as its reason.

0 when the work is done, 1 after a failure, 2 when the job is invalid or not supported, or ends with an error that
nothing foresees and that is not one of the device. Of sysexits.h: 65 (``EX_DATAERR``) when the model that was trained
does not load with the trained weights; 74 (``EX_IOERR``) when this machine's disk is full or fails: the worker then
gives its work back, and others can continue; 75 (``EX_TEMPFAIL``) when memory is exhausted: the scheduler may start the
executor again with smaller micro-batches.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from hypha.accelerate_executor.errors import DeliveryError, ExecutorError, JobError, is_out_of_memory, reason_of
from hypha_proto.errors import ProtoError
from hypha_proto.texts import one_line

logger = logging.getLogger(__name__)

OUT_OF_MEMORY: Final = os.EX_TEMPFAIL
"""Exit code of a process whose memory is exhausted, on the device or in main memory."""
_LONGEST: Final = 1000
"""Characters of the line."""
_DISK_FAULTS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})

_OF_MACHINE: Final = re.compile(r"CUDA|CUDNN|CUBLAS|HIP|NCCL|NVIDIA|XPU|gloo|[Ss]ocket|Connection")
"""In errors of torch about a device, its driver or another process: on other workers the job may go on."""


def exit_code_of(work: Callable[[], None], work_dir: Path) -> int:
    """Do the work; log the reason of a failure in one line and return the exit code.

    Args:
        work: what the process does.
        work_dir: named for errors of the file system that name no file.
    """
    try:
        work()
    except JobError as error:
        logger.error("%s", one_line(error, _LONGEST))
        return 2
    except OSError as error:
        if is_out_of_memory(error):
            return _out_of_memory(error)
        logger.error("%s: %s", error.filename or work_dir, error.strerror or error)
        return os.EX_IOERR if error.errno in _DISK_FAULTS else 1
    except (ExecutorError, ProtoError) as error:
        if error.__cause__ is not None and is_out_of_memory(error.__cause__):
            return _out_of_memory(error)
        logger.error("%s", one_line(error, _LONGEST))
        return os.EX_DATAERR if isinstance(error, DeliveryError) else 1
    except Exception as error:  # noqa: BLE001 – whatever libraries raise ends with one line, too
        if is_out_of_memory(error):
            return _out_of_memory(error)
        code = end_unforeseen(error)
        return 1 if isinstance(error, RuntimeError) and _OF_MACHINE.search(str(error)) else code
    return 0


def end_unforeseen(error: Exception) -> int:
    """Log an error that nothing foresees in one line, after its traceback; return the exit code."""
    traceback.print_exception(error)
    logger.error("%s", describe(error))
    return 2


def describe(error: Exception) -> str:
    """Return an error that nothing foresees in one line: type, message and place."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return one_line(f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})", _LONGEST)


def _out_of_memory(error: Exception) -> int:
    logger.error("%s", one_line(f"out of memory: {reason_of(error)}", _LONGEST))
    return OUT_OF_MEMORY


def log_to_stderr(level: int) -> None:
    """Log to standard error, which the worker records."""
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s")


def run_as_process(main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit with its code, without unloading torch and transformers, which takes a second of CPU time."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # exit at once and without a traceback
    code = main()
    logging.shutdown()
    os._exit(code)
