"""Errors inside exception groups and chains of causes."""

from hypha_net.errors import describe_root_cause, first_leaf_error, leaf_errors


def _chained(cause: BaseException) -> RuntimeError:
    error = RuntimeError("outer")
    error.__cause__ = cause
    return error


def test_leaf_errors_of_nested_groups() -> None:
    first, second = ValueError("first"), KeyError("second")
    group = BaseExceptionGroup("outer", [ExceptionGroup("inner", [first]), second])
    assert list(leaf_errors(group)) == [first, second]
    assert list(leaf_errors(first)) == [first]


def test_first_leaf_error_of_nested_groups() -> None:
    first = ValueError("first")
    assert first_leaf_error(ExceptionGroup("outer", [ExceptionGroup("inner", [first]), KeyError()])) is first
    assert first_leaf_error(first) is first


def test_root_cause_is_described_by_the_innermost_error() -> None:
    assert describe_root_cause(_chained(ExceptionGroup("group", [_chained(OSError(111, "Connection refused"))]))) == (
        "Connection refused"
    )
    assert describe_root_cause(_chained(ValueError("no such name"))) == "no such name"


def test_root_cause_without_a_message_is_named_by_its_type() -> None:
    assert describe_root_cause(_chained(TimeoutError())) == "TimeoutError"
