"""Parts of inference: templates, batches that fail, sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypha.accelerate_executor.data.row_errors import RowError
from hypha.accelerate_executor.data.template import Template
from hypha.accelerate_executor.predict.batching import BatchComputer, DeviceFailed
from hypha.accelerate_executor.predict.sampling import GumbelSampler, row_stream

# ----------------------------------------------------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{a}", "one"),
        ("{a}-{b}{a}", "one-2one"),
        ("{{{a}}} {{}}", "{one} {}"),
        ("no column", "no column"),
        ("{c} {d}", "true 0.5"),
        ("{a.b} {x!r:>10}", "dot odd"),
    ],
)
def test_a_template_inserts_values_by_name_alone(template: str, text: str) -> None:
    row = {"a": "one", "b": 2, "c": True, "d": 0.5, "a.b": "dot", "x!r:>10": "odd"}
    assert Template.parse(template).render(row.__getitem__) == text


def test_inserted_text_is_not_a_template() -> None:
    assert Template.parse("{a}").render(lambda _: "{a} {{") == "{a} {{"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{", "single '{' at character 0; write {{ for a brace"),
        ("a }", "single '}' at character 2; write }} for a brace"),
        ("{}", "no column is named at character 0"),
        ("{a{b}}", "single '{' at character 0"),
    ],
)
def test_a_template_with_a_fault_is_refused(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match="character") as caught:
        Template.parse(template)
    assert reason in str(caught.value)


@pytest.mark.parametrize("value", [None, ["a"], {"a": 1}])
def test_a_value_that_is_no_text_is_an_error_of_the_row(value: Any) -> None:
    with pytest.raises(RowError, match="wrong-type: column 'a' is"):
        Template.parse("{a}").render(lambda _: value)


@given(st.text(), st.text())
def test_any_template_is_parsed_or_refused(template: str, value: str) -> None:
    try:
        parsed = Template.parse(template)
    except ValueError:
        assert "{" in template or "}" in template
        return
    rendered = parsed.render(lambda _: value)
    assert len(rendered) == sum(map(len, parsed.texts)) + len(value) * len(parsed.columns)


# ------------------------------------------------------------------------------------------------------ failed batches


def _computer(fails: Callable[[Sequence[int]], Exception | None], size: int) -> tuple[Any, list[list[int]]]:
    calls: list[list[int]] = []

    def compute(rows: Sequence[int]) -> list[int]:
        calls.append(list(rows))
        if (error := fails(rows)) is not None:
            raise error
        return [row * 10 for row in rows]

    return BatchComputer[int, int](compute, size), calls


def _outcomes(computer: Any, rows: int) -> list[Any]:
    return [pair for batch in computer(range(rows)) for pair in batch]


@given(st.integers(0, 40), st.integers(1, 16), st.sets(st.integers(0, 39)))
def test_every_row_has_one_outcome_whatever_rows_fail(rows: int, size: int, bad: set[int]) -> None:
    computer, calls = _computer(lambda batch: ValueError("bad") if bad.intersection(batch) else None, size)
    found = _outcomes(computer, rows)
    assert [row for row, _ in found] == list(range(rows))
    for row, outcome in found:
        if row in bad:
            assert isinstance(outcome, RowError)
            assert (outcome.kind, outcome.detail) == ("failed", "ValueError: bad")
        else:
            assert outcome == row * 10
    assert all(len(call) <= size for call in calls)


def test_a_bad_row_is_found_by_halving() -> None:
    computer, calls = _computer(lambda batch: ValueError("bad") if 37 in batch else None, 64)
    _outcomes(computer, 64)
    assert len(calls) == 13, "the batch, then two halves of each of six sizes"
    assert computer.size == 64


def test_batches_are_smaller_for_good_when_memory_is_exhausted() -> None:
    computer, calls = _computer(
        lambda batch: torch.OutOfMemoryError("CUDA out of memory") if len(batch) > 5 else None, 16
    )
    found = _outcomes(computer, 32)
    assert [outcome for _, outcome in found] == [row * 10 for row in range(32)]
    assert computer.size == 4
    assert [len(call) for call in calls] == [16, 8, *[4] * 8]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")]
)
def test_a_row_that_exhausts_memory_alone_is_recorded(error: Exception) -> None:
    computer, _ = _computer(lambda batch: error if 2 in batch else None, 4)
    kinds = [outcome.kind if isinstance(outcome, RowError) else None for _, outcome in _outcomes(computer, 4)]
    assert kinds == [None, None, "out-of-memory", None]


def test_a_device_that_fails_is_blamed_on_no_row() -> None:
    computer, calls = _computer(lambda _: RuntimeError("CUDA error: device-side assert triggered"), 4)
    with pytest.raises(DeviceFailed, match="the device failed: RuntimeError: CUDA error"):
        _outcomes(computer, 4)
    assert len(calls) == 1


# ------------------------------------------------------------------------------------------------------------ sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def _sampled(rows: int, temperature: float, top_p: float) -> torch.Tensor:
    sampler = GumbelSampler([row_stream(1, 0, row) for row in range(rows)], temperature, top_p)
    scores = sampler(torch.zeros((rows, 1), dtype=torch.long), LOGITS.expand(rows, -1))  # type: ignore[arg-type]
    counts: torch.Tensor = torch.bincount(scores.argmax(-1), minlength=len(LOGITS)) / rows
    return counts


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_have_the_model_s_distribution(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    torch.testing.assert_close(_sampled(20_000, temperature, 1.0), expected, atol=0.012, rtol=0)


def test_top_p_leaves_the_most_probable_tokens() -> None:
    expected = torch.softmax(torch.tensor([2.0, 1.0, 0.5, -torch.inf, -torch.inf]), -1)  # 0.56, 0.21 and 0.13 of all
    torch.testing.assert_close(_sampled(20_000, 1.0, 0.85), expected, atol=0.012, rtol=0)


def test_the_stream_of_a_row_is_its_own() -> None:
    def first(*key: int) -> Any:
        return row_stream(*key).random(4)

    assert np.array_equal(first(1, 2, 3), first(1, 2, 3))
    others = [first(0, 2, 3), first(1, 0, 3), first(1, 2, 0), first(1, 3, 2), first(2**64 - 1, 2, 3)]
    assert not any(np.array_equal(first(1, 2, 3), other) for other in others)
