"""Texts of errors: the innermost cause is named, and secret parts of URLs are hidden."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_net import instrumentation
from hypha_net.connectors.errors import source_failed
from hypha_net.errors import describe_root_cause, first_leaf_error, leaf_errors
from hypha_net.node.config.models import mask_secrets
from hypha_net.node.logging_setup import LogFormat, configure_logs
from hypha_net.redaction import has_url_secrets, redact_urls, without_url_secrets

PRESIGNED = "https://bucket.s3.example/model?X-Amz-Credential=AKIA&X-Amz-Signature=5ec2e7"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"GET {PRESIGNED} failed", "GET https://bucket.s3.example/model?*** failed"),
        ("https://user:5ec2e7@host:1/a/b", "https://***@host:1/a/b"),
        ("https://5ec2e7@host", "https://***@host"),
        ("https://a@5ec2e7@host/x", "https://***@host/x"),
        ("s3://key:5ec2e7@bucket?a#b", "s3://***@bucket?***"),
        ("https://host/x#5ec2e7", "https://host/x#***"),
        ("URL('https://u:5ec2e7@h/?q=5ec2e7'): no", "URL('https://***@h/?***'): no"),
        ('{"a":"http://h?5ec2e7","b":"http://u:5ec2e7@h"}', '{"a":"http://h?***","b":"http://***@h"}'),
        ("http://host/a@b.txt, mail@host", "http://host/a@b.txt, mail@host"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/12D3", "/ip4/127.0.0.1/tcp/4001/p2p/12D3"),
        ("(see https://h/x?5ec2e7): no", "(see https://h/x?***): no"),
        ("is it there? a://", "is it there? a://"),
    ],
)
def test_secret_parts_of_urls_are_hidden(text: str, shown: str) -> None:
    assert redact_urls(text) == shown
    assert redact_urls(shown) == shown


@given(st.text())
def test_any_text_is_taken(text: str) -> None:
    redact_urls(text)
    without_url_secrets(text, "m")
    assert "5ec2e7" not in redact_urls(f"https://5ec2e7@host/{text}".replace("\\", "/"))


def test_urls_without_secrets_can_be_told_apart() -> None:
    urls = [f"https://u:5ec2e7@host:8443/get?id={number}" for number in range(2)]
    hidden = [without_url_secrets(url, f"hidden={number}") for number, url in enumerate(urls)]
    assert hidden == ["https://host:8443/get?hidden=0", "https://host:8443/get?hidden=1"]
    assert has_url_secrets(PRESIGNED)
    assert not has_url_secrets("https://host/a")


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs_show_no_secret_parts(form: LogFormat) -> None:
    stream = io.StringIO()
    configure_logs(form, "debug", stream)
    try:
        raise OSError(f"cannot reach {PRESIGNED}")
    except OSError:
        logging.getLogger("test").exception("failed: %s", PRESIGNED)
    assert stream.getvalue().count("https://bucket.s3.example/model?***") >= 2
    assert "5ec2e7" not in stream.getvalue()


def test_errors_of_spans_show_no_secret_parts(recorded: Any) -> None:
    with pytest.raises(OSError, match="5ec2e7"), instrumentation.span("fetch"):
        raise OSError(f"{'x' * 200} {PRESIGNED}")
    parent = f"00-{'1' * 32}-{'2' * 16}-01"
    instrumentation.record("executor's", {}, parent=parent, ago=1.0, seconds=1.0, error=PRESIGNED)
    shown = "https://bucket.s3.example/model?***"
    assert [span.status.description for span in recorded.spans] == [f"{'x' * 200} {shown}", shown]


def test_configurations_are_shown_without_secret_parts() -> None:
    assert mask_secrets({"uri": [PRESIGNED], "endpoint": "http://u:p@h"}) == {
        "uri": ["https://bucket.s3.example/model?***"],
        "endpoint": "http://***@h",
    }


def _chained(cause: BaseException) -> RuntimeError:
    error = RuntimeError("outer")
    error.__cause__ = cause
    return error


def test_leaf_errors_of_nested_groups() -> None:
    first, second = ValueError("first"), KeyError("second")
    group = BaseExceptionGroup("outer", [ExceptionGroup("inner", [first]), second])
    assert list(leaf_errors(group)) == [first, second]
    assert list(leaf_errors(first)) == [first]
    assert first_leaf_error(group) is first_leaf_error(first) is first


def test_root_cause_is_described_by_the_innermost_error() -> None:
    assert describe_root_cause(_chained(ExceptionGroup("group", [_chained(OSError(111, "Connection refused"))]))) == (
        "Connection refused"
    )
    assert describe_root_cause(_chained(ValueError("no such name"))) == "no such name"
    assert describe_root_cause(_chained(TimeoutError())) == "TimeoutError"


def test_an_error_of_a_connector_is_shortened_after_secrets_are_hidden() -> None:
    for length in range(900, 1100):
        detail = source_failed(f"{'x' * length} {PRESIGNED} {'x' * 100_000}: check the endpoint").detail
        assert len(detail) == 1000
        assert "5ec2e7" not in detail
        assert detail.endswith("check the endpoint")
