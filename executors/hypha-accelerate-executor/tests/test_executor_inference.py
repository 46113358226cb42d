"""Inference tasks against a fake worker, compared with plain transformers; templates, failing batches, sampling."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypha.accelerate_executor import inference
from hypha.accelerate_executor.data.preprocess import fill_template
from hypha.accelerate_executor.errors import RowError
from hypha.accelerate_executor.predict import loop
from hypha.accelerate_executor.predict.batching import BatchComputer, DeviceFailed
from hypha.accelerate_executor.predict.generator import GumbelSampler, row_stream
from hypha.accelerate_executor.predict.parts import Part
from hypha_proto.prompt_template import columns_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]

CLASSIFY = {"task": "classify", "type": "image-classification", "inference": {"batch_size": 32}}


@pytest.fixture
def make_classifier(
    make_task_worker: Callable[..., Any], digit_model: Path, digit_slices: list[Path]
) -> Callable[..., Any]:
    """Return a function that starts a worker with the first slices of the digits."""

    def make(slices: int = 0, settings: dict[str, Any] = CLASSIFY, **more: Any) -> Any:
        return make_task_worker(digit_model, digit_slices[:slices], settings, **more)

    return make


@pytest.fixture
def json_slice(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a slice of JSON lines; a row that is text is a line as it is."""

    def write(rows: Sequence[Any], name: str = "slice-0") -> Path:
        path = tmp_path / f"{name}.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())
        return path

    return write


# ------------------------------------------------------------------------------------------------------ classification


def _plain_probabilities(model_dir: Path, slices: Sequence[Path], dtype: Any = None) -> Any:
    """Classify with transformers alone, 50 images at a time."""
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(model_dir).eval()
    images = np.concatenate([safetensors.numpy.load_file(path)["pixel_values"] for path in slices])
    found = []
    with torch.no_grad():
        for begin in range(0, len(images), 50):
            batch = torch.from_numpy(images[begin : begin + 50]).to(dtype or torch.float32)
            found.append(torch.softmax(model(pixel_values=batch).logits.float(), -1))
    return torch.cat(found).numpy()


def test_predictions_equal_those_of_a_plain_script(
    make_task_worker: Callable[..., Any], digit_model: Path, digit_slices: list[Path]
) -> None:
    slices = digit_slices[-3:]
    worker = make_task_worker(digit_model, slices, CLASSIFY | {"columns": ["scores", "labels"]})
    rows = worker.run()

    expected = _plain_probabilities(digit_model, slices)
    counts = [len(safetensors.numpy.load_file(path)["labels"]) for path in slices]
    labels = np.concatenate([safetensors.numpy.load_file(path)["labels"] for path in slices])
    places = [(index, row) for index, count in enumerate(counts) for row in range(count)]
    assert [(row["slice"], row["row"]) for row in rows] == places
    assert [list(row)[:2] for row in rows] == [["slice", "row"]] * sum(counts)
    np.testing.assert_allclose([row["scores"] for row in rows], expected, atol=1e-5)
    assert [row["label"] for row in rows] == expected.argmax(1).tolist()
    np.testing.assert_allclose([row["score"] for row in rows], expected.max(1), atol=1e-5)
    assert [row["labels"] for row in rows] == labels.tolist()
    assert [(body["path"], body["round"], body["samples"]) for body in worker.sent] == [
        (f"part-{index}.jsonl", index, count) for index, count in enumerate(counts)
    ]
    assert worker.reports[-1]["metrics"]["rows"] == sum(counts)
    assert not any(path.suffix in (".jsonl", ".safetensors") for path in worker.work_dir.glob("*"))


def test_the_model_computes_in_the_dtype_of_its_files(
    make_task_worker: Callable[..., Any], digit_model: Path, digit_slices: list[Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForImageClassification

    half = tmp_path / "half"
    AutoModelForImageClassification.from_pretrained(digit_model).to(torch.bfloat16).save_pretrained(half)
    settings = CLASSIFY | {"columns": ["scores"], "inference": {"batch_size": 50}}
    rows = make_task_worker(half, digit_slices[:1], settings).run()
    expected = _plain_probabilities(half, digit_slices[:1], torch.bfloat16)
    np.testing.assert_allclose([row["scores"] for row in rows], expected, atol=1e-6)
    whole = _plain_probabilities(digit_model, digit_slices[:1])
    assert np.abs(expected - whole).max() > 1e-4, "the comparison would not notice float32"


def test_a_bad_row_costs_no_other_row_its_result(
    make_task_worker: Callable[..., Any], digit_model: Path, digit_slices: list[Path], json_slice: Callable[..., Path]
) -> None:
    image = safetensors.numpy.load_file(digit_slices[0])["pixel_values"][0].tolist()
    wide = [[[0.0] * 8] * 8] * 3
    rows = [
        {"pixel_values": image, "id": 0},
        {"id": 1},
        {"pixel_values": "text", "id": 2},
        {"pixel_values": wide, "id": 3},
        "no json",
        "[1]",
        {"pixel_values": image, "id": 6},
        {"pixel_values": [[1.0], [1.0, 2.0]], "id": 7},
        {"pixel_values": [[[1e39] * 8] * 8], "id": 8},
        {"pixel_values": image, "id": 9},
        {"pixel_values": image, "id": "x" * (4 << 20)},
        f'{{"pixel_values": {json.dumps(image)}, "id": 1e999}}',
    ]
    settings = CLASSIFY | {"columns": ["id", "note"]}
    worker = make_task_worker(digit_model, [json_slice(rows)], settings)
    found = worker.run()
    assert [row["row"] for row in found] == list(range(12))
    assert [row.get("error", {}).get("kind") for row in found] == [
        None, "missing-column", "wrong-type", "failed", "not-json", "not-json", None, "wrong-type", "not-finite", None,
        "too-long", "wrong-value",
    ]  # fmt: skip
    assert found[1]["error"]["detail"] == "there is no column 'pixel_values', only id"
    assert found[1]["id"] == 1
    expected = _plain_probabilities(digit_model, digit_slices[:1])[0].argmax()
    assert found[0]["label"] == found[6]["label"] == found[9]["label"] == expected
    assert (found[9]["id"], found[9]["note"]) == (9, None)
    assert worker.reports[-1]["metrics"]["errors"] == 9


def test_rows_are_split_at_line_feeds_alone(
    make_task_worker: Callable[..., Any], digit_model: Path, digit_slices: list[Path], json_slice: Callable[..., Path]
) -> None:
    image = safetensors.numpy.load_file(digit_slices[0])["pixel_values"][0].tolist()
    names = ["a\u2028b", "\u2029", "c\u0085", "\x0b\x0c", "\x1c\x1d\x1e", "a\rb", "a\r\nb"]
    rows = [json.dumps({"pixel_values": image, "name": name}, ensure_ascii=False) for name in names]
    rows[0] = rows[0].replace(", ", ",\r")  # white space of JSON
    found = make_task_worker(digit_model, [json_slice(rows)], CLASSIFY | {"columns": ["name"]}).run()
    assert [row["name"] for row in found] == names
    assert not any("error" in row for row in found)


def test_the_first_bad_row_ends_a_job_that_asks_for_it(
    make_task_worker: Callable[..., Any],
    digit_model: Path,
    json_slice: Callable[..., Path],
    fails: Callable[..., str],
) -> None:
    settings = CLASSIFY | {"inference": {"on_error": "fail"}}
    worker = make_task_worker(digit_model, [json_slice([{"id": 1}])], settings)
    message = fails(inference.main, worker.arguments(), 1)
    assert message == "dataset 'rows', slice 0, row 0: missing-column: there is no column 'pixel_values', only id"
    assert worker.sent == []


# ---------------------------------------------------------------------------------------------------------- generation

TOPICS = ["cats", "a", "the 7 seas", "x y z, and more", "why?", "0", "rain, rain", "old maps"]


def _generate(columns: Sequence[str] = (), **inference_settings: Any) -> dict[str, Any]:
    usual = {"prompt": "about {topic}:", "max_new_tokens": 12, "batch_size": 3}
    return {"task": "generate", "type": "causal-lm", "columns": columns, "inference": usual | inference_settings}


@pytest.fixture
def make_writer(
    make_task_worker: Callable[..., Any], writer: Path, json_slice: Callable[..., Path]
) -> Callable[..., Any]:
    """Return a function that starts a worker which writes texts about topics."""

    def make(topics: Sequence[Any] = TOPICS, slices: int = 1, model: Path = writer, **settings: Any) -> Any:
        rows = [{"topic": topic} for topic in topics]
        paths = [json_slice(rows, f"slice-{number}") for number in range(slices)]
        return make_task_worker(model, paths, _generate(**settings))

    return make


def _plain_texts(model_dir: Path, prompts: Sequence[str]) -> list[tuple[str, int]]:
    """Generate with transformers alone, one prompt at a time; return text and number of new tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    found = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        found.append((tokenizer.decode(made, skip_special_tokens=True), len(made)))
    return found


@pytest.mark.parametrize("engine", ["padded", "continuous"])
def test_the_most_probable_tokens_equal_those_of_a_plain_script(
    make_writer: Callable[..., Any], writer: Path, engine: str
) -> None:
    worker = make_writer(columns=["topic"])
    found = worker.run("--generation", engine)
    expected = _plain_texts(writer, [f"about {topic}:" for topic in TOPICS])
    assert [(row["text"], row["tokens"]) for row in found] == expected
    assert [row["prompt"] for row in found] == [f"about {topic}:" for topic in TOPICS]
    assert [row["topic"] for row in found] == TOPICS
    assert len({text for text, _ in expected}) > 4, "the texts should differ"
    ends = {row["finish"] for row in found}
    assert all((row["finish"] == "stop") == (row["tokens"] < 12) for row in found if row["tokens"] != 12)
    assert ends == {"stop", "length"}, "one row at least should end early"
    assert worker.reports[-1]["metrics"]["tokens"] == sum(count for _, count in expected)


def test_a_chat_template_is_applied_unless_switched_off(
    make_writer: Callable[..., Any], writer: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    chat = tmp_path / "chat"
    shutil.copytree(writer, chat)
    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = (
        "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<reply>{% endif %}"
    )
    tokenizer.save_pretrained(chat)
    wrapped = _plain_texts(writer, [f"<user>about {topic}:<reply>" for topic in TOPICS])
    bare = _plain_texts(writer, [f"about {topic}:" for topic in TOPICS])
    assert wrapped != bare
    found = make_writer(model=chat).run()
    assert [(row["text"], row["tokens"]) for row in found] == wrapped
    assert found[0]["prompt"] == "about cats:"
    found = make_writer(model=chat, chat_template=False).run()
    assert [(row["text"], row["tokens"]) for row in found] == bare


@pytest.mark.parametrize("top_p", [pytest.param(1.0, marks=pytest.mark.nightly), 0.8])
def test_a_sampled_text_depends_on_seed_slice_and_row_alone(make_writer: Callable[..., Any], top_p: float) -> None:
    def texts(topics: Sequence[Any], **settings: Any) -> list[str]:
        worker = make_writer(topics, **({"temperature": 1.0, "top_p": top_p, "seed": 4} | settings))
        return [row.get("text", "") for row in worker.run()]

    first = texts(TOPICS)
    assert texts(TOPICS, batch_size=1) == first
    assert texts(TOPICS, batch_size=8) == first
    with_bad_rows = texts([*TOPICS[:3], None, *TOPICS[4:]])
    assert with_bad_rows == [*first[:3], "", *first[4:]]
    assert texts(TOPICS, seed=5) != first
    same = [TOPICS[0]] * 8
    assert len(set(texts(same))) > 4, "rows with the same prompt have random numbers of their own"


def test_slices_have_random_numbers_of_their_own(make_writer: Callable[..., Any]) -> None:
    worker = make_writer(slices=2, temperature=1.0)
    worker.run()
    assert [row["text"] for row in worker.parts[0]] != [row["text"] for row in worker.parts[1]]


def test_a_text_ends_before_a_stop_string(make_writer: Callable[..., Any], writer: Path) -> None:
    whole = [text for text, _ in _plain_texts(writer, [f"about {topic}:" for topic in TOPICS])]
    stop = next(text for text in whole if len(text) > 6)[3:5]
    found = make_writer(stop=[stop, "never there"]).run()
    assert [row["text"] for row in found] == [text.partition(stop)[0] for text in whole]
    stopped = [row for row, text in zip(found, whole, strict=True) if stop in text]
    assert {row["finish"] for row in stopped} == {"stop"}
    assert all(row["tokens"] < 12 for row in stopped)


def test_rows_without_a_prompt_that_fits_are_errors(
    make_task_worker: Callable[..., Any], writer: Path, json_slice: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [{"topic": "cats"}, {"title": "cats"}, {"topic": ["cats"]}, {"topic": "x" * 60}, {"topic": "\ud800"}]
    found = make_task_worker(writer, [json_slice(rows)], _generate()).run()
    assert [row.get("error", {}).get("kind") for row in found] == [
        None, "missing-column", "wrong-type", "too-long", "wrong-value",
    ]  # fmt: skip
    assert "67 tokens of the prompt and max_new_tokens = 12 make 79; the model takes 64" in found[3]["error"]["detail"]

    path = tmp_path / "text.safetensors"
    texts = np.zeros((2, 6), np.uint8)
    texts[0, :4], texts[1] = list(b"cats"), list(b"horses")
    safetensors.numpy.save_file({"topic": texts}, path)
    found = make_task_worker(writer, [path], _generate()).run()
    assert [row["prompt"] for row in found] == ["about cats:", "about horses:"]


# ------------------------------------------------------------------------------------------------- slices in hand, end


def test_at_most_two_slices_are_in_hand(make_classifier: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_classifier(5)
    computed = threading.Event()
    handed_out: list[int] = []
    write = Part.write

    def noticed(part: Part, path: Path) -> int:
        rows = write(part, path)
        if path.name == "part-1.jsonl":
            computed.set()
        return rows

    def send(body: Any) -> tuple[int, Any]:
        if body["round"] == 0:  # has not been received before the next slice is computed
            assert computed.wait(30)
            handed_out.append(worker.handed_out)
        return worker.send(body)  # type: ignore[no-any-return]

    monkeypatch.setattr(Part, "write", noticed)
    worker.answers["/resources/send"] = send
    worker.run()
    assert handed_out == [2]
    in_hand = largest = 0
    for step in worker.steps:
        in_hand += 1 if step.startswith("fetch") else -1
        largest = max(largest, in_hand)
    assert largest == 2
    assert sorted(worker.parts) == [0, 1, 2, 3, 4]


def test_a_fetch_that_waits_keeps_no_part_from_being_sent(make_classifier: Callable[..., Any]) -> None:
    worker = make_classifier(2)
    both_sent = threading.Event()

    def fetch(body: Any) -> tuple[int, Any]:
        if worker.handed_out == 2:  # the scheduler waits for the last parts before it says that there are no more
            assert both_sent.wait(30)
        return worker.fetch(body)  # type: ignore[no-any-return]

    def send(body: Any) -> tuple[int, Any]:
        answer = worker.send(body)
        if len(worker.parts) == 2:
            both_sent.set()
        return answer  # type: ignore[no-any-return]

    worker.answers |= {"/resources/fetch": fetch, "/resources/send": send}
    worker.run()
    assert both_sent.is_set()


def test_a_fetch_is_repeated_while_others_compute_the_slices(
    make_classifier: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds

    # the waits take no time: together they are longer than the timeout of one request
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + slept, sleep=sleep)
    monkeypatch.setattr("hypha.accelerate_executor.bridge.client.time", clock)
    worker = make_classifier(1)
    asked = 0

    def fetch(body: Any) -> tuple[int, Any]:
        nonlocal asked
        asked += 1
        if 1 < asked < 30:
            return 503, {"error": "no-free-slice", "detail": "every slice is assigned to others"}
        return worker.fetch(body)  # type: ignore[no-any-return]

    worker.answers["/resources/fetch"] = fetch
    worker.run("--timeout", "10")
    assert asked == 30
    assert slept > 10


def test_a_drained_task_finishes_its_slice_and_ends(
    make_classifier: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_REPORT_SECONDS", 0.0)
    worker = make_classifier(5, drains_after=1)
    worker.run()
    assert sorted(worker.parts) == [0]


def test_a_report_that_is_refused_does_not_end_the_task(make_classifier: Callable[..., Any]) -> None:
    worker = make_classifier(2)
    worker.answers["/task/update"] = lambda _: (429, {"error": "too-many", "detail": "later"})
    worker.run()
    assert sorted(worker.parts) == [0, 1]


@pytest.mark.parametrize(
    ("route", "status", "answer", "words"),
    [
        ("/resources/fetch", 502, {"error": "scheduler", "detail": "it is gone"}, "502 scheduler: it is gone"),
        ("/resources/fetch", 200, [], "a slice is one file; the worker fetched 0"),
        ("/resources/fetch", 200, [{"path": "x", "metadata": {}}], "metadata slice is ''"),
        ("/resources/send", 500, {"error": "push-failed", "detail": "refused"}, "push-failed: refused"),
        ("/task/update", 0, None, "the worker closed the bridge"),
    ],
)
def test_a_worker_with_errors_ends_the_task(
    make_classifier: Callable[..., Any], fails: Callable[..., str], route: str, status: int, answer: Any, words: str
) -> None:
    worker = make_classifier(2)
    worker.answers[route] = lambda _: (status, answer)
    assert words in fails(inference.main, worker.arguments(), 1)


def test_a_full_disk_exits_with_a_code_of_its_own(
    make_classifier: Callable[..., Any], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_classifier(2)

    def full(_: Any, path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("hypha.accelerate_executor.predict.loop.Part.write", full)
    message = fails(inference.main, worker.arguments(), os.EX_IOERR)
    assert message == f"{worker.work_dir / 'part-0.jsonl'}: No space left on device"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"max_new_tokens": 0}, "Expected `int` >= 1 - at `$.settings.inference.max_new_tokens`"),
        ({"temperature": -1}, "`$.settings.inference.temperature`"),
        ({"top_p": 2}, "`$.settings.inference.top_p`"),
        ({"stop": [""]}, "`$.settings.inference.stop[0]`"),
        ({"batch_size": "x"}, "Expected `int`, got `str` - at `$.settings.inference.batch_size`"),
        ({"seed": -1}, "`$.settings.inference.seed`"),
        ({"on_error": "skip"}, "Invalid enum value 'skip' - at `$.settings.inference.on_error`"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_setting_that_is_out_of_range_is_named(
    make_classifier: Callable[..., Any], fails: Callable[..., str], changed: dict[str, Any], told: str
) -> None:
    assert told in fails(inference.main, make_classifier(0, _generate(**changed)).arguments(), 2)


def test_everything_that_a_task_asks_for_and_is_not_supported_is_named(
    make_classifier: Callable[..., Any], fails: Callable[..., str]
) -> None:
    settings = _generate(prompt="{a} {") | {"type": "image-classification", "columns": ["text", "row"]}
    message = fails(inference.main, make_classifier(0, settings).arguments(), 2)
    for part in (
        "settings.model.type: 'image-classification': task generate takes models of type causal-lm",
        "settings.inference.prompt: '{a} {': the '{' at character 5 has no counterpart; write it twice",
        "settings.columns: 'row': is a key of the results; rename the column in the dataset",
        "settings.columns: 'text'",
    ):
        assert part in message, message


def test_start_and_slices_are_spans_of_a_traced_job(
    make_classifier: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{1:032x}-{1:016x}-01")
    worker = make_classifier(2)
    worker.run()
    assert [span["name"] for span in worker.spans] == ["start executor", "compute slice", "compute slice"]
    assert [span["attributes"].get("hypha.slice") for span in worker.spans] == [None, 0, 1]


def test_several_processes_are_refused(
    make_classifier: Callable[..., Any], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = fails(inference.main, make_classifier().arguments(), 2)
    assert message == 'inference runs in one process; start it with cmd = "python", not with accelerate launch'


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
        ("{inserted}", "{a} {{"),
    ],
)
def test_a_template_inserts_values_by_name_alone(template: str, text: str) -> None:
    row = {"a": "one", "b": 2, "c": True, "d": 0.5, "a.b": "dot", "x!r:>10": "odd", "inserted": "{a} {{"}
    assert fill_template(template, row.__getitem__) == text


@pytest.mark.parametrize("value", [None, ["a"], {"a": 1}])
def test_a_value_that_is_no_text_is_an_error_of_the_row(value: Any) -> None:
    with pytest.raises(RowError, match="wrong-type: column 'a' is"):
        fill_template("{a}", lambda _: value)


@given(st.text(), st.text())
def test_any_template_is_parsed_or_refused(template: str, value: str) -> None:
    try:
        columns_of(template)
    except ValueError:
        assert "{" in template or "}" in template
        return
    literal, rendered = fill_template(template, lambda _: ""), fill_template(template, lambda _: value)
    filled = fill_template(template, lambda _: "x")
    assert len(rendered) == len(literal) + len(value) * (len(filled) - len(literal))


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


LARGEST = torch.tensor([2.0, 1.0, 0.5, -torch.inf, -torch.inf])
"""The most probable tokens: 0.56, 0.21 and 0.13 of all."""


@pytest.mark.parametrize(
    ("temperature", "top_p", "logits"),
    [(0.5, 1.0, LOGITS * 2), (1.0, 1.0, LOGITS), (2.0, 1.0, LOGITS / 2), (1.0, 0.85, LARGEST)],
    ids=["0.5", "1", "2", "top_p"],
)
def test_samples_have_the_model_s_distribution(temperature: float, top_p: float, logits: torch.Tensor) -> None:
    found = _sampled(20_000, temperature, top_p)
    torch.testing.assert_close(found, torch.softmax(logits, -1), atol=0.012, rtol=0)


def test_the_stream_of_a_row_is_its_own() -> None:
    def first(*key: int) -> Any:
        return row_stream(*key).random(4)

    assert np.array_equal(first(1, 2, 3), first(1, 2, 3))
    others = [first(0, 2, 3), first(1, 0, 3), first(1, 2, 0), first(1, 3, 2), first(2**64 - 1, 2, 3)]
    assert not any(np.array_equal(first(1, 2, 3), other) for other in others)
