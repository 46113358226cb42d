"""Training executor for tests on real processes: softmax regression in numpy, which starts in a third of a second.

A process executor like `hypha.accelerate_executor.training`: the same arguments, batches, contributions, weights and
exit codes, without torch. Deterministic: the update follows from the global weights and the samples. It can be told to
send wrong updates (`FAULTS`), and to die, fail or stop at chosen places (`Failure`).
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from hypha_proto import bridge_api as routes
from hypha_proto.codec import from_json, from_plain, parse_json, to_json, to_plain
from hypha_proto.contributions import OPTIMIZER_RESET, Contribution, SampleRange
from hypha_proto.file_archive import is_archive, unpack_archive
from hypha_proto.job_spec import Reference, TrainConfig
from hypha_proto.progress import (
    BatchDone,
    Done,
    Progress,
    ProgressError,
    ProgressResponse,
    ProgressValue,
    RoundMetrics,
    ScheduleUpdate,
    SendingUpdate,
    UpdateMerged,
)
from hypha_proto.update_file import TensorFile, TensorFileWriter, TensorInfo, UpdateMetadata, open_update, write_update
from hypha_proto.weights_digest import digest_weights

CLASSES = 10
DELAY = "HYPHA_NUMPY_DELAY"
"""Environment variable with the seconds that each batch takes longer."""
FAULTS = "HYPHA_NUMPY_FAULTS"
"""Environment variable with the rounds in which updates are wrong, and what is wrong with each: a JSON object."""
NAN = "nan"
"""One number of the update is NaN."""
EXIT = "exit"
"""One number of the update is NaN, and the executor exits with an error when that is refused."""
SHAPE = "shape"
"""A tensor of the update has one row less."""
SCALE = "scale"
"""The update is a million times too large."""
FALSE_UPDATE = "update digest"
"""The contribution states another digest of the update, and the right one when that is refused."""
FALSE_WEIGHTS = "weights digest"
"""The contribution states other weights at the begin of the round."""
REPLAY = "replay"
"""The update is the file of the round before, which the contribution names correctly."""
RANGES = "ranges"
"""The contribution states samples that the worker was not given."""
FAILURES = "HYPHA_NUMPY_FAILURES"
"""Environment variable with the places where the executor fails: a JSON array of objects like `Failure`."""
COUNTS = "HYPHA_NUMPY_COUNTS"
"""Environment variable with the path of the file that counts failures over restarts: one position a line."""
KILL = "kill"
"""The executor ends itself with SIGKILL."""
STOP = "stop"
"""The executor stops itself with SIGSTOP, and goes on when it gets SIGCONT."""
MEMORY = "memory"
"""MemoryError is raised: the executor exits with `OUT_OF_MEMORY`."""
LEAVE = "leave"
"""The executor exits with a code after a message."""
OUT_OF_MEMORY = 75
"""Exit code of an executor that memory has ended; `hypha.accelerate_executor.exit_codes` says why."""
_JOB_LIMIT = 1 << 20
_TIMEOUT = 600.0
_FETCHES = 40
"""Attempts to fetch weights that a scheduler which has just begun may not serve yet."""
Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Failure:
    """A place where the executor dies, fails or stops."""

    round: int
    """Round in which; 0 before it joins the job, with the model loaded."""
    how: str
    """`KILL`, `STOP`, `MEMORY` or `LEAVE`."""
    batch: int | None = None
    """Batch of the round, from 1, that is computed and not reported; None means before the update is sent."""
    times: int = 1
    """Number of times at most, over all restarts that share the file of counts."""
    code: int = 1
    """Exit code of `LEAVE`."""
    message: str = "it failed as told"
    """Last line of `LEAVE`, on standard error."""
    above: int = 0
    """It happens only while more samples than this are computed at once: the micro-batch, or else the batch."""


def write_model(folder: Path, features: int, seed: int = 0, unused: int = 0) -> int:
    """Write a start model; return its number of parameters.

    Args:
        folder: where; created.
        features: numbers in a sample.
        seed: seed of the weights.
        unused: number of further parameters, which training does not change.
    """
    folder.mkdir(parents=True)
    drawn = np.random.default_rng(seed).normal(scale=0.01, size=(CLASSES, features)).astype(np.float32)
    tensors = {"bias": np.zeros(CLASSES, np.float32), "weight": drawn}
    if unused:
        tensors["unused"] = np.ones(unused, np.float32)
    infos = {name: TensorInfo("F32", values.shape) for name, values in tensors.items()}
    with TensorFileWriter(folder / "model.safetensors", infos, {}) as writer:
        for name, values in tensors.items():
            writer.write(name, values)
    (folder / "config.json").write_text("{}\n")
    return sum(values.size for values in tensors.values())


def executor_toml(
    name: str,
    delay: float = 0.0,
    faults: Mapping[int, str] | None = None,
    failures: Sequence[Failure] = (),
    counts: Path | None = None,
) -> str:
    """Return TOML of a worker's ``[[executors]]`` that runs this module.

    Args:
        name: name of the executor.
        delay: seconds that each batch takes longer.
        faults: what is wrong with its updates, by round.
        failures: where it dies, fails or stops.
        counts: file that counts these over restarts; its folder must exist and becomes writable for the executor.
            Executors that share it share the counts. Without it an executor that is started again fails again.
    """
    env = {DELAY: str(delay), FAULTS: json.dumps(faults or {})}
    if failures:
        env[FAILURES] = json.dumps([asdict(failure) for failure in failures])
    if counts is not None:
        env[COUNTS] = str(counts.resolve())
    writable = "" if counts is None else f"writable = [{json.dumps(str(counts.resolve().parent))}]\n"
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in env.items())
    args = [
        str(Path(__file__).resolve()),
        "--socket",
        "{SOCKET_PATH}",
        "--work-dir",
        "{WORK_DIR}",
        "--job",
        "{JOB_JSON}",
    ]
    return (
        f'\n[[executors]]\nclass = "train"\nname = "{name}"\nruntime = "process"\ncmd = {json.dumps(sys.executable)}\n'
        f"args = {json.dumps(args)}\nenv = {{ {pairs} }}\n{writable}"
    )


class EndedError(Exception):
    """The worker has no more work: the job is over, or no slice is left."""


class RoundClosedError(Exception):
    """The round goes on without the update."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float | None = _TIMEOUT) -> None:
        super().__init__("worker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Bridge:
    """Connection to the worker."""

    def __init__(self, socket_path: Path, work_dir: Path) -> None:
        self._socket = socket_path
        self.work_dir = work_dir

    def post(self, route: str, body: bytes, timeout: float | None = _TIMEOUT) -> tuple[int, bytes]:
        """Post; return status and body. A busy worker is asked again."""
        while True:
            connection = UnixConnection(self._socket, timeout)
            connection.request("POST", route, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
            connection.close()
            if status != 503:
                return status, content
            time.sleep(0.1)

    def report(self, progress: Progress) -> ProgressResponse:
        """Report progress; return the scheduler's answer."""
        status, content = self.post(routes.STATUS, to_json(ProgressValue, progress))
        if status != 200:
            sys.exit(f"report {progress!r}: {status} {content[:400]!r}")
        answer: ProgressResponse = from_json(ProgressResponse, content)
        if isinstance(answer, ProgressError):
            sys.exit(f"the scheduler refused {progress!r}: {answer.reason}")
        return answer

    def fetch(self, reference: Reference, folder: str) -> list[tuple[Path, Mapping[str, str]]]:
        """Fetch files; return paths and metadata.

        Raises:
            EndedError: there is no further slice.
        """
        status, content = self.post(
            routes.FETCH, json.dumps(to_plain(Reference, reference) | {"out_dir": folder}).encode()
        )
        if status == 410:
            raise EndedError
        if status != 200:
            sys.exit(f"fetch: {status} {content[:400]!r}")
        return [(self.work_dir / entry["path"], entry["metadata"]) for entry in json.loads(content)]

    def join(self) -> routes.RoundJoined:
        """Ask with which round to begin, as long as the scheduler decides.

        Raises:
            EndedError: the scheduler says that this executor will never take part.
        """
        status, content = self.post(routes.JOIN, b"{}", None)  # the worker ends the executor when the job is over
        if status == 410:
            print(f"join: {content[:400]!r}", flush=True)
            raise EndedError
        if status != 200:
            sys.exit(f"join: {status} {content[:400]!r}")
        joined: routes.RoundJoined = from_json(routes.RoundJoined, content)
        return joined

    def send(self, body: Mapping[str, Any], may_be_refused: bool = False) -> str | None:
        """Send an update; return why its contribution was refused, or the update if it may be; None if neither was.

        Raises:
            RoundClosedError: the round goes on without it.
        """
        status, content = self.post(routes.SEND, json.dumps(body).encode())
        if status == 200:
            return None
        if status == 409 and json.loads(content).get("error") == routes.ROUND_CLOSED:
            raise RoundClosedError(json.loads(content).get("detail"))
        if status != 409 and not may_be_refused:
            sys.exit(f"send: {status} {content[:400]!r}")
        return f"{status} {content.decode()[:400]}"

    def outer_updates(self, reference: Reference) -> Iterator[Mapping[str, Any]]:
        """Open the stream of outer updates and yield them as they come."""
        connection = UnixConnection(self._socket)
        body = json.dumps({"resource": to_plain(Reference, reference), "path": "incoming"})
        connection.request("POST", routes.RECEIVE, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"receive: {answer.status} {answer.read()[:400]!r}")
        while line := answer.readline():
            if line.startswith(b"data:"):
                yield json.loads(line.removeprefix(b"data:"))


class Samples:
    """The assigned samples, one slice after the other, each in its order."""

    def __init__(self, bridge: Bridge, config: TrainConfig) -> None:
        self._bridge = bridge
        self._config = config
        self._fetched = 0
        self._left: list[tuple[int, int, int]] = []
        """(epoch, slice, position) of the samples that are left of the current slice."""
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)
        self._images: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._labels: NDArray[np.int64] = np.zeros(0, np.int64)

    def take(self, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64], list[tuple[int, int, int]]]:
        """Return images, labels and places of the next samples; fewer only if no slice is left.

        Raises:
            EndedError: none is left.
        """
        images, labels, places = [], [], list[tuple[int, int, int]]()
        while len(places) < count:
            if not self._left:
                try:
                    self._open_next()
                except EndedError:
                    if not places:
                        raise
                    break
            some, self._left = self._left[: count - len(places)], self._left[count - len(places) :]
            rows = self._order[[position for _, _, position in some]]
            images.append(self._images[rows])
            labels.append(self._labels[rows])
            places += some
        return np.concatenate(images), np.concatenate(labels), places

    def drop(self) -> None:
        """Forget what is left of the current slice: whoever joins gets slices anew."""
        self._left = []

    def _open_next(self) -> None:
        [(path, about)] = self._bridge.fetch(self._config.data, f"slices/{self._fetched}")
        self._fetched += 1
        with TensorFile(path) as file:
            self._labels = file.stored("labels").astype(np.int64)
            self._images = np.array(file.tensor("pixel_values")).reshape(len(self._labels), -1)
        path.unlink()
        epoch, index = int(about["epoch"]), int(about["slice"])
        first, end = int(about.get("first", 0)), int(about.get("end", len(self._labels)))
        self._order = np.random.default_rng([self._config.seed or 0, epoch, index]).permutation(len(self._labels))
        self._left = [(epoch, index, position) for position in range(first, end)]


class Trainer:
    """The rounds of one job."""

    def __init__(self, bridge: Bridge, config: TrainConfig) -> None:
        self.bridge = bridge
        self.config = config
        self.round = config.first_round or 1
        self.samples = Samples(bridge, config)
        files = [path for path, _ in bridge.fetch(config.model.artifact, "model")]
        if len(files) == 1 and is_archive(files[0]):
            folder = files[0].parent
            files = [folder / name for name in unpack_archive(files[0], folder)]
        self.model = next(path for path in files if path.name == "model.safetensors")
        self.weights = read_weights(self.model)
        self.outer_updates = bridge.outer_updates(config.results)
        self.delay = float(os.environ.get(DELAY, "0"))
        self.faults: dict[str, str] = json.loads(os.environ.get(FAULTS, "{}"))
        self.kept: Path | None = None
        """Update of the round before a replay."""
        self.failures = Failures(config.micro_batch or config.batch_size)
        if config.micro_batch is not None:
            print(f"micro-batches of {config.micro_batch} samples", flush=True)
        self.failures.check(0)
        if config.join:
            self.enter(bridge.join())
        elif self.round > 1 and config.weights is not None:
            self.fetch_weights(self.round - 1)

    @property
    def fault(self) -> str | None:
        """Return what is to be wrong with the update of this round."""
        return self.faults.get(str(self.round))

    def run(self) -> None:
        """Train until the job is over."""
        while True:
            update, contribution, loss = self.train()
            if isinstance(self.bridge.report(SendingUpdate()), Done):
                return
            self.failures.check(self.round)
            body = {
                "resource": to_plain(Reference, self.config.updates),
                "path": update.name,
                "round": self.round,
                "samples": self.trained,
            }
            if contribution is not None:
                body["contribution"] = to_plain(Contribution, contribution)
            try:
                self.send(body)
            except RoundClosedError as closed:
                print(f"round {self.round}: closed: {closed}", flush=True)
                update.unlink()
                self.enter(self.bridge.join())
                continue
            if isinstance(self.bridge.report(self.metrics(loss)), Done):
                return
            self.merge()
            if self.faults.get(str(self.round + 1)) == REPLAY:
                self.kept = update
            else:
                update.unlink(missing_ok=True)
            print(f"round {self.round}: {self.trained} samples, loss {loss:.4f}", flush=True)
            if isinstance(self.bridge.report(UpdateMerged()), Done):
                return
            self.round += 1

    def enter(self, joined: routes.RoundJoined) -> None:
        """Begin with a round: without samples that were assigned before, from the weights after the round before."""
        for _ in range(_FETCHES):
            self.samples.drop()
            self.round = joined.round
            print(f"joined at round {joined.round}", flush=True)
            if joined.weights is None:
                self.weights = read_weights(self.model)
                return
            if digest_weights(self.weights.items()) == joined.weights or self.fetch_weights(joined.round - 1, True):
                found = digest_weights(self.weights.items())
                if found != joined.weights:
                    sys.exit(f"the weights before round {self.round} are {found}, expected {joined.weights}")
                return
            joined = self.bridge.join()  # the scheduler has gone on meanwhile
        sys.exit(f"the job was ahead of the weights {_FETCHES} times")

    def metrics(self, loss: float) -> RoundMetrics:
        """Return the metrics of the round."""
        found = {"loss": loss, "samples": float(self.trained)}
        if self.config.micro_batch is not None:
            found["micro_batch"] = float(self.config.micro_batch)
        return RoundMetrics(round=self.round, metrics=found)

    def send(self, body: dict[str, Any]) -> None:
        """Send the update; if it is refused, go on with the round."""
        refusal = self.bridge.send(body, self.fault not in (None, EXIT))
        if refusal is not None and self.fault == EXIT:
            sys.exit(f"send: {refusal}")
        if refusal is not None:
            print(f"round {self.round}: refused: {refusal}", flush=True)
            if self.fault == FALSE_UPDATE:
                body["contribution"]["update"] = _other_digest(body["contribution"]["update"])
                assert self.bridge.send(body) is None

    def train(self) -> tuple[Path, Contribution | None, float]:
        """Train one round; return the update, what it was computed from, and the mean loss."""
        local = {name: values.copy() for name, values in self.weights.items()}
        self.trained, batches, losses, left = 0, 0, 0.0, None
        places: list[tuple[int, int, int]] = []
        while left is None or left > 0:
            began = time.perf_counter()
            images, labels, taken = self.samples.take(self.config.batch_size)
            losses += step(local, images, labels, self.config.optimizer.learning_rate) * len(labels)
            time.sleep(self.delay)
            places += taken
            self.trained, batches = self.trained + len(labels), batches + 1
            self.failures.check(self.round, batches)
            slices: dict[str, int] = {}
            for _, index, _ in taken:
                slices[str(index)] = slices.get(str(index), 0) + 1
            seconds = time.perf_counter() - began
            answer = self.bridge.report(BatchDone(batch_size=len(labels), slices=slices, batch_ms=1000 * seconds))
            if isinstance(answer, Done):
                raise EndedError
            if isinstance(answer, ScheduleUpdate):
                left = answer.counter
            elif left is not None:
                left -= 1
        path = self.write(local)
        return path, self.contribution(path, places, batches), losses / self.trained

    def write(self, local: Weights) -> Path:
        """Write the update."""
        path = self.bridge.work_dir / f"update-{self.round}.safetensors"
        if self.fault == REPLAY and self.kept is not None:
            return self.kept.rename(path)
        differences = {name: values - self.weights[name] for name, values in local.items()}
        if self.fault in (NAN, EXIT):
            differences["bias"][3] = np.nan
        if self.fault == SCALE:
            differences = {name: values * np.float32(1e6) for name, values in differences.items()}
        if self.fault == SHAPE:
            differences["weight"] = differences["weight"][1:]
        shapes = {name: values.shape for name, values in differences.items()}
        write_update(path, shapes, differences.items(), UpdateMetadata(round=self.round, samples=self.trained))
        return path

    def contribution(self, update: Path, places: list[tuple[int, int, int]], batches: int) -> Contribution | None:
        """Return what the update was computed from."""
        if self.config.term is None:
            return None
        member = "" if self.config.member is None else self.config.member
        seed = hashlib.sha256(f"{self.config.seed or 0}/{member}/{self.round}".encode()).digest()
        digest = f"blake3:{blake3(update.read_bytes()).hexdigest()}"
        weights = digest_weights(self.weights.items())
        if self.fault == RANGES:  # one epoch too far
            places = [(epoch + 1, index, position) for epoch, index, position in places]
        return Contribution(
            round=self.round,
            weights=_other_digest(weights) if self.fault == FALSE_WEIGHTS else weights,
            ranges=tuple(joined(places)),
            batches=batches,
            batch_size=self.config.batch_size,
            seed=int.from_bytes(seed[:8], "big") >> 1,
            optimizer=OPTIMIZER_RESET,
            update=_other_digest(digest) if self.fault == FALSE_UPDATE else digest,
        )

    def merge(self) -> None:
        """Wait for the outer update of the round and add it."""
        for event in self.outer_updates:
            path = self.bridge.work_dir / event["path"]
            if event.get("round", self.round) == self.round:
                break
            path.unlink()
        else:
            raise EndedError
        file, _ = open_update(path)
        with file:
            for name, values in self.weights.items():
                values += file.tensor(name)
        path.unlink()
        expected = event.get("weights")
        if expected is not None and digest_weights(self.weights.items()) != expected:
            print(f"round {self.round}: the weights differ", flush=True)
            self.fetch_weights(self.round)

    def fetch_weights(self, number: int, may_be_over: bool = False) -> bool:
        """Replace the weights by the scheduler's after a round; return False if it is further and may be."""
        assert self.config.weights is not None
        for _ in range(_FETCHES):
            [(path, _)] = self.bridge.fetch(self.config.weights, "weights")
            with TensorFile(path) as file:
                found = int(file.metadata["round"])
            if found == number:
                self.weights = read_weights(path)
                return True
            if found > number and may_be_over:
                return False
            time.sleep(0.25)
        sys.exit(f"the weights of round {number} are not there, but those of round {found}")


class Failures:
    """The places where this executor dies, fails or stops; see `Failure`."""

    def __init__(self, at_once: int) -> None:
        """Read them from the environment.

        Args:
            at_once: samples that are computed at once.
        """
        self._at_once = at_once
        self._wanted = [Failure(**each) for each in json.loads(os.environ.get(FAILURES, "[]"))]
        self._counts = Path(os.environ[COUNTS]) if COUNTS in os.environ else None
        self._here: list[int] = []
        """Positions of those that have happened in this process, where no file counts them."""

    def check(self, number: int, batch: int | None = None) -> None:
        """Fail if this is a place to do so.

        Raises:
            MemoryError: as told.
            SystemExit: as told.
        """
        for position, failure in enumerate(self._wanted):
            is_here = (failure.round, failure.batch) == (number, batch) and self._at_once > failure.above
            if is_here and self._claim(position, failure.times):
                _fail(failure)

    def _claim(self, position: int, times: int) -> bool:
        """Count a failure and return True, unless it has happened so often already."""
        if self._counts is None:
            self._here.append(position)
            return self._here.count(position) <= times
        with self._counts.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # executors of other workers may be at the same place at the same time
            file.seek(0)
            happened = file.read().split().count(str(position))
            if happened < times:
                file.write(f"{position}\n")
            return happened < times


def _fail(failure: Failure) -> None:
    print(f"round {failure.round}: {failure.how}, as told", flush=True)
    match failure.how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "memory":
            raise MemoryError("as told")
        case "leave":
            print(failure.message, file=sys.stderr, flush=True)
            sys.exit(failure.code)
        case unknown:
            sys.exit(f"{FAILURES}: {unknown!r} is unknown; use {KILL}, {STOP}, {MEMORY} or {LEAVE}")


def read_weights(path: Path) -> Weights:
    """Read all tensors of a file."""
    with TensorFile(path) as file:
        return {name: np.array(file.tensor(name)) for name in sorted(file.tensors)}


def _other_digest(digest: str) -> str:
    """Return a digest of the same form with another value; applied twice, the same."""
    return f"{digest[:-1]}{int(digest[-1], 16) ^ 1:x}"


def joined(places: list[tuple[int, int, int]]) -> Iterator[SampleRange]:
    """Yield samples as ranges."""
    begin = 0
    for number in range(1, len(places) + 1):
        epoch, index, last = places[number - 1]
        if number == len(places) or places[number] != (epoch, index, last + 1):
            yield SampleRange(epoch=epoch, slice=index, first=places[begin][2], end=last + 1)
            begin = number


def step(weights: Weights, images: NDArray[np.float32], labels: NDArray[np.int64], rate: float) -> float:
    """Take a step of gradient descent; return the mean loss before it."""
    scores = images @ weights["weight"].T + weights["bias"]
    scores -= scores.max(axis=1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(np.maximum(shares[rows, labels], 1e-12)).mean())
    shares[rows, labels] -= 1
    shares /= len(labels)
    weights["weight"] -= np.float32(rate) * (shares.T @ images)
    weights["bias"] -= np.float32(rate) * shares.sum(axis=0)
    return loss


def main() -> None:
    """Run the executor."""
    parser = argparse.ArgumentParser()
    for name in ("--socket", "--work-dir"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--job", required=True)
    options = parser.parse_args()
    config: TrainConfig = from_plain(TrainConfig, parse_json(options.job, _JOB_LIMIT)["settings"])
    try:
        Trainer(Bridge(options.socket, options.work_dir.resolve()), config).run()
    except EndedError:
        print("no work is left", flush=True)
    except MemoryError as error:
        print(f"out of memory: {error}", file=sys.stderr, flush=True)
        sys.exit(OUT_OF_MEMORY)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = error.filename or options.work_dir
        print(f"ERROR numpy_executor: {where}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(os.EX_IOERR)


if __name__ == "__main__":
    main()
