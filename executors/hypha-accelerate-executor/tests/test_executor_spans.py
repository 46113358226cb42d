"""Spans that the executor reports, and workers that reject them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hypha.accelerate_executor import training
from hypha.accelerate_executor.bridge.spans import TRACE_VARIABLE, Spans
from hypha.accelerate_executor.errors import BridgeClosed
from hypha_proto.bridge_api import SpanReport, read_spans

SAMPLED = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
UNSAMPLED = SAMPLED[:-1] + "0"


class Recorder:
    """Records reports."""

    def __init__(self) -> None:
        self.reports: list[SpanReport] = []

    def __call__(self, report: SpanReport) -> None:
        self.reports.append(report)


class Clock:
    """A manual clock."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_are_reported_with_children_and_age() -> None:
    recorder, clock = Recorder(), Clock()
    spans = Spans(recorder, SAMPLED, clock=clock)
    with spans.span("outer", 2.0, round=3) as about:
        clock.now += 1
        with spans.span("inner"):
            clock.now += 4
        about["hypha.samples"] = 12
    clock.now += 10
    spans.flush()
    spans.flush()
    [report] = recorder.reports
    [outer] = report.spans
    assert (outer.name, outer.ago_ms, outer.duration_ms) == ("outer", 17_000, 7_000)
    assert outer.attributes == {"hypha.round": 3, "hypha.samples": 12}
    assert [(span.name, span.ago_ms, span.duration_ms) for span in outer.inside] == [("inner", 14_000, 4_000)]
    assert read_spans(msgspec.json.encode(report)) == report


def test_a_span_of_another_thread_is_beside_those_of_this_one_also_across_reports() -> None:
    recorder = Recorder()
    spans = Spans(recorder, SAMPLED)
    begun, reported = threading.Event(), threading.Event()

    def work() -> None:
        with spans.span("evaluate"):
            begun.set()
            assert reported.wait(60)

    thread = threading.Thread(target=work)
    with spans.span("round"):
        thread.start()
        assert begun.wait(60)
        with spans.span("train"):
            pass
    spans.flush()
    reported.set()
    thread.join(60)
    spans.flush()
    names = [[(span.name, [inner.name for inner in span.inside]) for span in each.spans] for each in recorder.reports]
    assert names == [[("round", ["train"])], [("evaluate", [])]]


def test_a_failed_span_has_the_redacted_reason() -> None:
    recorder = Recorder()
    spans = Spans(recorder, SAMPLED, lambda text: text.replace("hf_secret", "***"))
    with pytest.raises(ValueError, match="hf_secret"), spans.span("outer"), spans.span("inner"):
        raise ValueError("token hf_secret is not taken")
    spans.flush()
    [outer] = recorder.reports[0].spans
    assert outer.error == outer.inside[0].error == "ValueError: token *** is not taken"


@pytest.mark.parametrize("traceparent", [None, "", UNSAMPLED, "nonsense1"])
def test_an_untraced_job_reports_no_spans(traceparent: str | None) -> None:
    recorder = Recorder()
    spans = Spans(recorder, traceparent)
    with spans.span("work"):
        pass
    spans.flush()
    assert recorder.reports == []


def test_a_worker_that_rejects_spans_is_asked_once() -> None:
    asked = []

    def refuse(report: SpanReport) -> None:
        asked.append(report)
        raise BridgeClosed("gone")

    spans = Spans(refuse, SAMPLED)
    for _ in range(3):
        with spans.span("work"):
            pass
        spans.flush()
    assert len(asked) == 1


def test_a_job_reports_its_start_and_every_round(
    make_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder: list[Any] = []
    worker = make_worker(rounds=2, batches=4)
    worker.answers["/telemetry/spans"] = lambda body: (recorder.append(body), (200, {"recorded": 1}))[1]
    monkeypatch.setenv(TRACE_VARIABLE, SAMPLED)
    assert training.main(worker.arguments()) == 0
    spans = [span for body in recorder for span in body["spans"]]
    assert [span["name"] for span in spans] == ["start executor", "round", "round", "check delivered model"]
    assert {"import torch", "wait for model", "load model"} == {inner["name"] for inner in spans[0]["inside"]}
    for number, span in enumerate(spans[1:3], 1):
        assert span["attributes"]["hypha.round"] == number
        names = [inner["name"] for inner in span["inside"]]
        assert names == ["train", "write pseudo-gradient", "wait for outer update", "merge outer update"]
        train = span["inside"][0]
        assert (train["attributes"]["hypha.batches"], train["attributes"]["hypha.samples"]) == (4, 64)
        assert 0 < train["duration_ms"] <= span["duration_ms"] <= span["ago_ms"]


@pytest.mark.parametrize("answer", ["error", "silent"])
def test_a_job_completes_with_a_worker_that_takes_no_spans(
    answer: str, make_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    ended = threading.Event()
    if answer == "silent":
        monkeypatch.setattr("hypha.accelerate_executor.bridge.client._SPANS_SECONDS", 0.2)

    def refuse(body: Any) -> tuple[int, Any]:
        asked.append(body)
        assert answer != "silent" or ended.wait(60)
        return 400, {"error": "bad-request", "detail": "too many spans"}

    worker = make_worker(rounds=2, batches=4)
    worker.answers["/telemetry/spans"] = refuse
    monkeypatch.setenv(TRACE_VARIABLE, SAMPLED)
    assert training.main(worker.arguments()) == 0
    ended.set()
    assert len(asked) == 1
    assert len(worker.updates) == 2
