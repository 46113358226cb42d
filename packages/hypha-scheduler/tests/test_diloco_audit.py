"""The audit of DiLoCo jobs: what it proves of jobs with late, refused and lost workers, and what it finds wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.diloco_simulation import PEERS, START, FakeDataset, Job, digest_of, job_table

from hypha_net.testing import simulate
from hypha_proto.file_digests import digest_directory, digest_file
from hypha_proto.safetensors_io import TensorFileWriter, TensorInfo
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_proto.weights_digest import digest_weights
from hypha_scheduler.audit import audit
from hypha_scheduler.audit import weights as audit_weights
from hypha_scheduler.audit.diloco import DilocoFindings
from hypha_scheduler.audit.weights import compute_weights
from hypha_scheduler.cli import main
from hypha_scheduler.strategies.diloco.restore import restore

A, B, C = PEERS[:3]
SIZES = [size for size in FakeDataset().samples if size is not None]
Records = list[dict[str, Any]]
Weights = dict[str, np.ndarray[Any, Any]]
N = TensorInfo("I64", ())


def played() -> Records:
    """Return the journal of a job of three rounds, with an update refused in the second and a worker lost in the third.

    Then the scheduler is killed and takes the job up, before it ends.
    """
    job = Job(table=job_table())

    async def case() -> None:
        job.open()
        job.lease((A, B, C))
        job.hand_in(A, B, C, batches=3)
        await job.finish_round(A, B, C)
        job.hand_in(A, B, C, batches=3)
        job.refuse(C)
        await job.finish_round(A, B, C)
        job.train_round(A, 2)
        job.open()
        job.adopt()
        job.lose(B)
        job.hand_in(A, C, batches=3)
        await job.finish_round(A, C)

    simulate(case)
    assert len(job.rounds) == 3
    return [{"record": "accepted", "format": 2, "job_id": "j", "job": {"type": "diloco"}}, *job.journal]


def write_job(directory: Path, records: Records) -> Path:
    """Write the files of a job with this journal, which keeps its outer updates."""
    slices = [{"file": f"{number}.safetensors", "samples": size} for number, size in enumerate(SIZES)]
    manifest = directory / "manifest.json"
    manifest.write_text(json.dumps({"slices": slices}))
    records[0]["job"]["rounds"] = {"keep_updates": True}
    weights = write_start_model(directory / "start-model")
    for record in records:
        if record["record"] == "began":
            record |= {"manifest": digest_file(manifest), "model": digest_directory(directory / "start-model")}
    write_rounds(directory, records, weights)
    save(directory, records)
    return directory


def write_start_model(folder: Path) -> Weights:
    """Write a model in bfloat16 with a count; return its weights, as they are exchanged."""
    folder.mkdir()
    weights: Weights = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, dtype=np.int64)}
    with TensorFileWriter(folder / "model.safetensors", {"w": TensorInfo("BF16", (2, 3)), "n": N}) as writer:
        writer.write("w", weights["w"])
        writer.write_stored("n", weights["n"])
    return weights


def write_rounds(directory: Path, records: Records, weights: Weights) -> None:
    """Write the outer update of each round and the weights after the last, and put their digests into the records."""
    digests: dict[str, str] = {}
    (directory / "updates").mkdir()
    for record in rounds_of(records):
        path = directory / "updates" / f"round-{record['round']}.safetensors"
        added = {"w": np.full((2, 3), 0.1, np.float32), "n": np.array(record["round"], np.float32)}
        about = UpdateMetadata(round=record["round"], statistics=frozenset({"n"}))
        write_update(path, {"w": (2, 3), "n": ()}, added.items(), about)
        digests[record["update"]] = digest_file(path)
        digests.setdefault(record["weights_before"], digest_weights(weights.items()))
        weights = {"w": weights["w"] + added["w"], "n": weights["n"] + record["round"]}
        digests[record["weights"]] = digest_weights(weights.items())
        folder = directory / "outer-state" / f"round-{record['round']}"
        folder.mkdir(parents=True)
        with TensorFileWriter(folder / "weights.safetensors", {"w": TensorInfo("F32", (2, 3)), "n": N}) as writer:
            for name, values in weights.items():
                writer.write_stored(name, values)
    text = json.dumps(records)
    for old, new in digests.items():
        text = text.replace(old, new)
    records[:] = json.loads(text)


def save(directory: Path, records: Records) -> None:
    lines = [json.dumps(record) for record in records]
    (directory / "journal.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def records() -> Records:
    return json.loads(json.dumps(played()))


def test_a_job_with_refused_and_lost_workers_is_proven(tmp_path: Path, records: Records) -> None:
    found = audit(write_job(tmp_path, records))
    assert found.faults == []
    assert (found.rounds, found.terms, found.contributions, found.unstated) == (3, 1, 7, 0)
    used = sum(member["samples"] for record in records if record["record"] == "round" for member in record["members"])
    assert found.samples == used
    assert found.open == found.epochs * sum(SIZES) - used
    assert found.unused >= 1


def test_the_command_says_what_is_proven(tmp_path: Path, records: Records) -> None:
    found = audit(write_job(tmp_path, [*records, {"record": "finished"}]))
    done = CliRunner().invoke(main, ["audit", str(tmp_path)])
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "3 rounds in 1 term; finished",
        f"{found.samples} samples of {found.epochs} epochs in exactly one contribution, "
        f"{found.open} are open (in none)",
        "unstated: 0 of 7 contributions",
        f"{found.unused} update{'s' if found.unused > 1 else ''} did not count",
        f"weights after round 3: {found.weights}",
        "weights of 3 rounds computed again from the start model, equal to the bit",
    ]


def test_unstated_contributions_are_said_to_be_so(tmp_path: Path, records: Records) -> None:
    for record in records:
        if record["record"] == "contributed" and record["worker"] == str(A):
            record.update(contribution=None, update=None)
        for member in record.get("members", []) if record["record"] == "round" else []:
            if member["peer"] == str(A):
                member.update(contribution=None, update=None)
    found = audit(write_job(tmp_path, records))
    assert found.faults == []
    assert "unstated: 3 of 7 contributions (ranges follow from what was handed out and reported)" in str(found)


def test_other_weights_than_the_start_model_are_no_statement(tmp_path: Path, records: Records) -> None:
    """The scheduler cannot refuse them: it does not know the digest of the exchanged weights before round 1 ends."""
    write_job(tmp_path, records)
    for number, unstated, faults in ((0, 1, 0), (1, 1, 1)):
        rounds_of(records)[number]["members"][0]["contribution"]["weights"] = digest_of("others")
        save(tmp_path, records)
        found = audit(tmp_path)
        assert (found.unstated, len(found.faults)) == (unstated, faults)


def test_a_job_that_has_not_committed_a_round_is_open(tmp_path: Path, records: Records) -> None:
    first = next(number for number, record in enumerate(records) if record["record"] == "round")
    found = audit(write_job(tmp_path, records[:first]))
    assert (found.faults, str(found)) == ([], "no round was committed; not finished")


def test_a_journal_cut_within_or_after_any_record_is_proven(tmp_path: Path, records: Records) -> None:
    """But for the weights, which are those after the last round of the whole journal."""
    write_job(tmp_path, records)
    whole = (tmp_path / "journal.jsonl").read_bytes()
    ends = [end for end in range(1, len(whole) + 1) if whole[end - 1 : end] == b"\n"]
    for end in ends[2:]:
        for size in {end - 1, end, min(end + 1, len(whole))}:
            (tmp_path / "journal.jsonl").write_bytes(whole[:size])
            found = audit(tmp_path)
            assert found.rounds == whole[:size].rpartition(b"\n")[0].count(b'"record": "round"')
            assert found.faults == [] or re.fullmatch(r".*the weights after round [12] are missing", *found.faults)


def rounds_of(records: Records) -> Records:
    return [record for record in records if record["record"] == "round"]


def use_again(records: Records) -> None:
    """Let the first member of round 3 have samples of round 1, as the whole journal says consistently."""
    first, third = rounds_of(records)[0]["members"][0], rounds_of(records)[2]["members"][0]
    epoch, index, begin, end = first["ranges"][0]
    third["ranges"].append([epoch, index, begin, end])
    third["samples"] += end - begin
    third["contribution"]["ranges"].append({"epoch": epoch, "slice": index, "first": begin, "end": end})
    [told] = [r for r in records if r["record"] == "contributed" and (r["round"], r["worker"]) == (3, third["peer"])]
    told.update({name: third[name] for name in ("ranges", "samples", "contribution")})


def change_member(**values: Any) -> Callable[[Records], None]:
    return lambda records: rounds_of(records)[1]["members"][0].update(values)


def drop(kind: str) -> Callable[[Records], None]:
    def spoil(records: Records) -> None:
        records[:] = [r for r in records if r["record"] != kind or r.get("round") != 2]

    return spoil


FAULTS: dict[str, tuple[Callable[[Records], object], str]] = {
    "twice": (use_again, r"to \d+ of slice \d in epoch 0 were used twice: by \w+ in round 1 and by \w+ in round 3"),
    "another slice": (change_member(ranges=[[0, 9, 0, 3]]), "positions 0 to 3 of slice 9 in epoch 0 are not in the"),
    "beyond its end": (change_member(ranges=[[0, 1, 0, 13]]), r"which has 12 samples in it"),
    "empty": (change_member(ranges=[[0, 1, 3, 3]]), "are no samples"),
    "weight": (change_member(samples=5), "states samples 12, and its round has 5"),
    "update": (change_member(update=START), "states update .*, and its round has blake3:0"),
    "ranges": (change_member(ranges=[[0, 0, 0, 1]]), "states other samples than its round has"),
    "stranger": (drop("contributed"), "is a member of round 2, to which it has contributed nothing"),
    "unannounced": (drop("announced"), "and was not announced to its parameter server"),
    "chain": (lambda r: rounds_of(r)[0].update(weights=START), "round 2 begins with weights .*, and round 1 ended"),
    "missing round": (drop("round"), "round 3 follows round 1"),
    "term": (lambda r: rounds_of(r)[1].update(term=7), "round 2 is of term 7, in term 1"),
    "two of one": (
        lambda r: rounds_of(r)[1]["members"].append(rounds_of(r)[1]["members"][0]),
        "round 2 has two contributions of",
    ),
    "malformed": (lambda r: rounds_of(r)[1].pop("members"), r"line \d+: the record 'round' is malformed: KeyError"),
    "not begun": (lambda r: r.pop(1), "it does not say what the job works with"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_the_audit_names_what_is_wrong_in_the_journal(tmp_path: Path, records: Records, case: str) -> None:
    spoil, why = FAULTS[case]
    write_job(tmp_path, records)
    spoil(records)
    save(tmp_path, records)
    assert re.search(why, "\n".join(audit(tmp_path).faults))
    done = CliRunner().invoke(main, ["audit", str(tmp_path)])
    assert done.exit_code == 1
    assert "not proven:" in done.output


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest": (lambda d: (d / "manifest.json").write_text("{}"), "manifest.json: the digest is"),
    "no weights": (
        lambda d: (d / "outer-state" / "round-3" / "weights.safetensors").unlink(),
        "the weights after round 3 are missing",
    ),
    "no safetensors": (
        lambda d: (d / "outer-state" / "round-3" / "weights.safetensors").write_bytes(b"x"),
        "weights.safetensors: it is malformed",
    ),
    "other weights": (
        lambda d: flip(d / "outer-state" / "round-3" / "weights.safetensors"),
        "the digest of the weights is",
    ),
    "another update": (lambda d: flip(d / "updates" / "round-2.safetensors"), "round-2.safetensors: the digest is"),
    "no update": (
        lambda d: (d / "updates" / "round-2.safetensors").unlink(),
        "round-2.safetensors: the outer update of round 2 is missing, and the job keeps them",
    ),
    "another start model": (
        lambda d: flip(d / "start-model" / "model.safetensors"),
        "start-model: the digest of the start model is",
    ),
    "no start model": (lambda d: shutil.rmtree(d / "start-model"), "start-model: the start model is missing"),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("case", FILES)
def test_the_audit_names_what_is_wrong_in_the_files(tmp_path: Path, records: Records, case: str) -> None:
    spoil, why = FILES[case]
    spoil(write_job(tmp_path, records))
    assert why in "\n".join(audit(tmp_path).faults)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_without_all_outer_updates_the_first_rounds_are_computed_again(
    tmp_path: Path, records: Records, kept: int
) -> None:
    write_job(tmp_path, records)
    records[0]["job"]["rounds"]["keep_updates"] = False
    save(tmp_path, records)
    for number in range(kept + 1, 3):
        (tmp_path / "updates" / f"round-{number}.safetensors").unlink()
    found = audit(tmp_path)
    assert (found.faults, found.recomputed) == ([], 3 if kept == 2 else kept)
    assert kept or str(found).endswith("without rounds.keep_updates the job keeps no outer updates")


def test_a_scheduler_that_has_recorded_a_round_and_not_renamed_its_update_is_proven(
    tmp_path: Path, records: Records
) -> None:
    kept = write_job(tmp_path, records) / "updates" / "round-3.safetensors"
    (kept.parent / "round-3-0a.safetensors").write_bytes(b"one that came twice")
    kept.rename(kept.parent / "round-3-1b.safetensors")
    found = audit(tmp_path)
    assert (found.faults, found.recomputed) == ([], 3)


def test_nothing_is_said_of_a_job_that_keeps_updates_where_none_can_be_added(tmp_path: Path, records: Records) -> None:
    (write_job(tmp_path, records) / "updates" / "round-1.safetensors").unlink()
    found = audit(tmp_path)
    assert len(found.faults) == 1
    assert "computed again" not in str(found)


def change_update(directory: Path, records: Records, number: int, added: float) -> None:
    """Replace an outer update by another one, which the journal names."""
    path = directory / "updates" / f"round-{number}.safetensors"
    values = {"w": np.full((2, 3), added, np.float32), "n": np.array(number, np.float32)}
    about = UpdateMetadata(round=number, statistics=frozenset({"n"}))
    write_update(path, {"w": (2, 3), "n": ()}, values.items(), about)
    rounds_of(records)[number - 1]["update"] = digest_file(path)
    save(directory, records)


def test_the_first_round_whose_weights_do_not_follow_is_named(tmp_path: Path, records: Records) -> None:
    write_job(tmp_path, records)
    change_update(tmp_path, records, 2, float(np.nextafter(np.float32(0.1), np.float32(1.0))))
    change_update(tmp_path, records, 3, 7.0)
    found = audit(tmp_path)
    [fault] = found.faults
    assert re.fullmatch(
        rf"{tmp_path}: round 2 does not fit: its weights, computed again, have the digest blake3:\w+, and the journal "
        rf"has {rounds_of(records)[1]['weights']}",
        fault,
    )
    assert found.recomputed == 1


def test_an_update_of_another_model_is_named(tmp_path: Path, records: Records) -> None:
    write_job(tmp_path, records)
    path = tmp_path / "updates" / "round-3.safetensors"
    write_update(path, {"w": (2, 3)}, [("w", np.ones((2, 3), np.float32))], UpdateMetadata(round=3))
    rounds_of(records)[2]["update"] = digest_file(path)
    save(tmp_path, records)
    [fault] = audit(tmp_path).faults
    assert "the weights cannot be computed again: round-3.safetensors: it does not hold the tensors of round-1" in fault


def test_weights_are_computed_over_many_updates_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_weights, "_GROUP", 3)
    monkeypatch.setattr(audit_weights, "_BLOCK", 4)
    weights, paths = write_start_model(tmp_path / "start-model"), []
    chance, expected = np.random.default_rng(0), [digest_weights(weights.items())]
    for number in range(1, 9):
        added = {"w": chance.normal(size=(2, 3)).astype(np.float32), "n": np.array(0.6, np.float32)}
        paths.append(tmp_path / f"{number}.safetensors")
        write_update(paths[-1], {"w": (2, 3), "n": ()}, added.items(), UpdateMetadata(round=number))
        weights = {"w": weights["w"] + added["w"], "n": weights["n"] + 1}
        expected.append(digest_weights(weights.items()))
    assert list(compute_weights(tmp_path / "start-model", paths)) == expected


def test_restoring_and_auditing_agree(tmp_path: Path, records: Records) -> None:
    write_job(tmp_path, records)
    restored, found = restore(records), audit(tmp_path)
    assert isinstance(found, DilocoFindings)
    assert (restored.closed, restored.weights) == (found.rounds, found.weights)
    assert sum(restored.samples.values()) == found.samples


def test_slices_of_unknown_size_have_no_number_of_samples(tmp_path: Path, records: Records) -> None:
    write_job(tmp_path, records)
    for record in records:
        if record["record"] == "began":
            record["manifest"] = None
    save(tmp_path, records)
    found = audit(tmp_path)
    assert (found.faults, found.open) == ([], None)
