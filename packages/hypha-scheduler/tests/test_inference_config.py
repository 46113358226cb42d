"""Job tables of inference: what is wrong is named with its place, its value and a remedy, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.inference_simulation import FakeDataset

from hypha_proto.prompt_template import columns_of
from hypha_scheduler.strategies.inference.config import InferenceJobConfig
from hypha_scheduler.strategies.inference.specs import result_columns
from hypha_scheduler.submission.validation import validate_job

GENERATE: dict[str, Any] = {
    "type": "inference",
    "dataset": "questions",
    "model": {"repository": "owner/name", "type": "causal-lm"},
    "inference": {"task": "generate", "prompt": "Q: {question}"},
}
CLASSIFY: dict[str, Any] = GENERATE | {
    "model": {"repository": "owner/name", "type": "vision-classification"},
    "inference": {"task": "classify"},
}


def refusal(job: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        validate_job(job)
    return str(caught.value)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "generate for a classifier": (
        GENERATE | {"model": CLASSIFY["model"]},
        'inference: task: "generate" cannot be done by a model of type "vision-classification"; it needs one of type '
        "causal-lm",
    ),
    "classify for a language model": (
        CLASSIFY | {"model": GENERATE["model"]},
        'inference: task: "classify" cannot be done by a model of type "causal-lm"; it needs one of type image-class',
    ),
    "no prompt": (GENERATE | {"inference": {"task": "generate"}}, 'prompt: task = "generate" needs one'),
    "a prompt without columns": (
        GENERATE | {"inference": {"task": "generate", "prompt": "hello"}},
        "inference.prompt = 'hello': it names no column, so every row would get the same answer; write one such as "
        "{question}",
    ),
    "an open brace": (
        GENERATE | {"inference": {"task": "generate", "prompt": "Q: {question"}},
        "inference.prompt = 'Q: {question': the '{' at character 4 has no counterpart; write it twice",
    ),
    "a negative length": (
        GENERATE | {"inference": {"task": "generate", "prompt": "{q}", "max_new_tokens": -1}},
        "inference.max_new_tokens = -1: input should be greater than or equal to 1",
    ),
    "a prompt for a classifier": (
        CLASSIFY | {"inference": {"task": "classify", "prompt": "{q}"}},
        'prompt: only for task = "generate"; leave them out',
    ),
    "a result as a column": (
        GENERATE | {"results": {"columns": ["id", "text"]}},
        "results: columns: text: every result has a key of this name; leave it out, or rename the dataset's column",
    ),
    "a column twice": (
        GENERATE | {"results": {"columns": ["id", "id"]}},
        "results.columns = ['id', 'id']: id: named twice; name each column once",
    ),
    "a column named as a resource": (GENERATE | {"results": {"columns": ["slices"]}}, "names of a task's resources"),
    "fewer than the least": (
        GENERATE | {"resources": {"min_workers": 3}},
        "resources: min_workers (3) is more than num_workers (1)",
    ),
    "fewer than wanted": (
        GENERATE | {"resources": {"num_workers": 3, "max_workers": 2}},
        "resources: max_workers (2) is less than num_workers (3)",
    ),
    "an evaluation": (
        GENERATE | {"dataset": {"dataset": "a", "evaluation": "b"}},
        "dataset: evaluation: an inference job computes one dataset; leave it out",
    ),
    "a key of training": (GENERATE | {"rounds": {}}, 'rounds: this key belongs to jobs of type = "diloco"'),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    job, why = WRONG[case]
    assert why in refusal(job)


def test_all_faults_of_a_job_are_named_at_once() -> None:
    job = GENERATE | {
        "model": {"type": "causal-lm"},
        "inference": {"task": "generate", "prompt": "{", "temperature": -1},
        "results": {"columns": ["", "a"]},
        "resources": {"num_workers": 0},
    }
    text = refusal(job)
    places = (
        "model: ",
        "inference.prompt = ",
        "inference.temperature = ",
        "results.columns",
        "resources.num_workers = ",
    )
    for place in places:
        assert place in text


def test_a_missing_model_directory_is_named_when_the_job_is_submitted(tmp_path: Path) -> None:
    model = {"path": str(tmp_path / "none"), "type": "causal-lm"}
    assert f"model.path: there is no directory {tmp_path / 'none'}" in refusal(GENERATE | {"model": model})


@pytest.mark.parametrize(
    ("template", "columns"),
    [("{a} {b} {a}", ("a", "b")), ("{{x}} {a b.c[0]!r:>5}", ("a b.c[0]!r:>5",)), ("{{{a}}}", ("a",)), ("none", ())],
)
def test_a_template_names_columns_as_they_are(template: str, columns: tuple[str, ...]) -> None:
    assert columns_of(template) == columns


@pytest.mark.parametrize("template", ["{", "}", "{a", "a}", "{}", "{a{b}", "{a}}"])
def test_a_malformed_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="at character"):
        columns_of(template)


def test_tensors_can_be_classified_and_their_columns_repeated() -> None:
    columns = {"pixel_values": "float32[8,8]", "labels": "int64[]", "weight": "float32"}
    dataset = FakeDataset((4,), columns=columns, format=None)
    job = InferenceJobConfig.model_validate(
        CLASSIFY | {"results": {"columns": ["labels", "weight", "pixel_values", "scores"]}}
    )
    assert job.dataset_faults(dataset) == []
    assert result_columns(job, dataset) == {
        "slice": "integer", "row": "integer", "error": "object", "label": "integer", "score": "number",
        "labels": "integer", "weight": "number", "pixel_values": "list", "scores": "list",
    }  # fmt: skip


def test_columns_of_a_dataset_that_states_none_are_not_checked() -> None:
    job = InferenceJobConfig.model_validate(GENERATE | {"results": {"columns": ["anything"]}})
    assert job.dataset_faults(FakeDataset((4,), columns=None)) == []


def test_requirements_and_executors_are_those_of_the_job() -> None:
    job = InferenceJobConfig.model_validate(GENERATE | {"resources": {"worker": {"cpu": 2, "kind": "inference/mine"}}})
    assert job.executor == "inference/mine"


def keys_of(model: type[BaseModel], place: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{place}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{place}{name}.")


def test_every_key_is_in_the_reference() -> None:
    page = (Path(__file__).parents[3] / "docs" / "inference.md").read_text()
    rest = ("dataset.", "model.", "preprocessor.", "resources.worker_price.")  # tables of other jobs, too
    keys = [key for key in keys_of(InferenceJobConfig) if not key.startswith(rest)]
    tables = ("inference", "results", "resources")
    missing = [key for key in keys if f"`{key}`" not in page and key not in tables]
    assert missing == []
    assert len(keys) > 20
