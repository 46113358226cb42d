"""Find the error behind exception groups and chains of causes.

Task groups wrap what their tasks raise, and py-libp2p wraps what the system reports; logs and reports name the error
inside. Called by the libp2p endpoint and by the daemons; imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Iterator


def leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside nested exception groups; `error` itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaf_errors(inner)
    else:
        yield error


def first_leaf_error(error: Exception) -> Exception:
    """Return the first error inside nested exception groups; `error` itself if it is no group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_root_cause(error: BaseException) -> str:
    """Describe the innermost cause: the first error of each group and the `__cause__` of each error, to the end."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        elif isinstance(error, OSError) and error.strerror:
            return error.strerror
        else:
            return str(error) or type(error).__name__
