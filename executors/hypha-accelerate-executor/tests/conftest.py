"""Fixtures of the executor's tests: a fake worker, which is an HTTP server on a Unix socket that acts as bridge,
scheduler and parameter server; and fake auto classes of transformers."""

from __future__ import annotations

import json
import queue
import shutil
import socketserver
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from hypha.accelerate_executor.environment import TIMEOUT_VARIABLE
from hypha_proto.update_file import UpdateMetadata, open_update, write_update

HANG_UP = 0
"""Status that closes the connection without an answer."""
PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"


class Outer:
    """Outer step: Nesterov momentum on parameters, averages of statistics."""

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum
        self.velocity: dict[str, Any] = {}

    def step(self, update: Path, out: Path) -> None:
        file, metadata = open_update(update)
        with file:
            tensors = {name: self._one(name, file.tensor(name), name in metadata.statistics) for name in file.tensors}
        shapes = {name: value.shape for name, value in tensors.items()}
        write_update(out, shapes, tensors.items(), UpdateMetadata(metadata.round, statistics=metadata.statistics))

    def _one(self, name: str, delta: Any, statistic: bool) -> Any:
        if statistic:
            return delta
        velocity = self.momentum * self.velocity.get(name, np.zeros_like(delta)) + delta
        self.velocity[name] = velocity
        return np.float32(self.learning_rate) * (delta + np.float32(self.momentum) * velocity)


@dataclass
class FakeWorker:
    """Configuration and recorded requests of the server."""

    work_dir: Path
    socket: Path
    model_dir: Path
    slices: list[Path]
    rounds: int = 3
    batches: int = 20
    """Batches per round."""
    epochs: int = 1000
    outer: Outer = field(default_factory=lambda: Outer(1.0, 0.0))
    reports: list[Any] = field(default_factory=list)
    """Reports in their order; each batch as a report of its own."""
    updates: list[Path] = field(default_factory=list)
    """Copies of the received update files."""
    outers: list[Path] = field(default_factory=list)
    """Copies of the outer updates sent in return."""
    sent: list[Any] = field(default_factory=list)
    answers: dict[str, Callable[[Any], tuple[int, Any]]] = field(default_factory=dict)
    """Route -> replacement for the default answer."""
    silent: bool = False
    """Whether outer updates are withheld."""
    late_batches: int = 0
    """Batches of a round that are allocated in the answer to the report of the last of the others."""
    counted: list[int] = field(default_factory=list)
    """Batches of each round that were reported several at once."""

    def __post_init__(self) -> None:
        self.handed_out = 0
        self.done_rounds = 0
        self.events: queue.Queue[Any] = queue.Queue()

    def fetch(self, body: Any) -> tuple[int, Any]:
        out = self.work_dir / body.get("out_dir", "")
        out.mkdir(parents=True, exist_ok=True)
        if body["type"] != "scheduler":
            return 200, [self._place(path, out / path.name, {}) for path in sorted(self.model_dir.iterdir())]
        epoch, index = divmod(self.handed_out, len(self.slices))
        if epoch >= self.epochs:
            return 410, {"error": "no-more-data", "detail": "every slice was used"}
        self.handed_out += 1
        metadata = {"slice": str(index), "epoch": str(epoch), "dataset": body["dataset"]}
        target = out / f"{self.handed_out}-{self.slices[index].name}"  # one that is assigned again may be in use
        return 200, [self._place(self.slices[index], target, metadata)]

    def _place(self, path: Path, target: Path, metadata: dict[str, str]) -> Any:
        shutil.copy(path, target)
        name = target.relative_to(self.work_dir).as_posix()
        return {"path": name, "size": path.stat().st_size, "checksum": "blake3:" + "0" * 64, "metadata": metadata}

    def send(self, body: Any) -> tuple[int, Any]:
        self.sent.append(body)
        number = body["round"]
        kept = self.work_dir.parent / f"kept-{number}.safetensors"
        shutil.copy(self.work_dir / body["path"], kept)
        self.updates.append(kept)
        answer = self.work_dir.parent / f"outer-{number}.safetensors"
        self.outer.step(kept, answer)
        self.outers.append(answer)
        (self.work_dir / "incoming").mkdir(exist_ok=True)
        shutil.copy(answer, self.work_dir / "incoming" / answer.name)
        if not self.silent:
            self.events.put({"path": f"incoming/{answer.name}", "size": 1, "from_peer": PEER, "round": number})
        return 200, {}

    def status(self, body: Any) -> tuple[int, Any]:
        self.reports.append(body)
        if body != "update-received":
            return 200, {"type": "Ok"}
        self.done_rounds += 1
        return 200, {"type": "Done" if self.done_rounds == self.rounds else "Continue"}

    def trained(self, body: Any) -> tuple[int, Any]:
        self.reports += [{"status": batch} for batch in body["batches"]]
        self.counted += [0] * (body["round"] - len(self.counted))
        counted = body["first"] + len(body["batches"])
        self.counted[body["round"] - 1] = counted
        first_end = self.batches - self.late_batches
        last = first_end if counted < first_end else self.batches
        return 200, {"counted": counted, "last": last, "reason": ""}

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        usual = {
            "/resources/fetch": self.fetch, "/resources/send": self.send, "/status/send": self.status,
            "/status/batches": self.trained,
        }  # fmt: skip
        return (self.answers.get(route) or usual[route])(body)

    @property
    def kinds(self) -> list[str]:
        """Kinds of the reports in their order."""
        return [report if isinstance(report, str) else next(iter(report)) for report in self.reports]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Reported metrics in their order."""
        told = [report for report in self.reports if isinstance(report, dict)]
        return [report["metrics"]["metrics"] for report in told if "metrics" in report]

    def update(self, number: int) -> tuple[dict[str, Any], UpdateMetadata]:
        """Return the tensors of a received update, and what it states."""
        file, metadata = open_update(self.updates[number])
        with file:
            return {name: np.array(file.tensor(name)) for name in file.tensors}, metadata

    def job(self, task: str = "image-classification", inputs: Sequence[str] = (), **config: Any) -> str:
        """Return the task as the executor receives it; `config` replaces some of its settings."""
        reference = {"type": "peers", "peers": [PEER], "strategy": {"type": "One"}, "resource": None}
        settings = {
            "model": {
                "task": task,
                "artifact": {"type": "uri", "value": "file:///model"},
                "input-names": list(inputs),
            },
            "data": {"type": "scheduler", "peer": PEER, "dataset": "digits"},
            "updates": reference,
            "results": reference,
            "optimizer": {"learning-rate": 2e-3, "betas": None, "epsilon": None},
            "batch_size": 16,
            "seed": 3,
        }
        definition = {
            "job_id": "01234567-89ab-cdef-0000-000000000007", "task": "train-0", "attempt": 0,
            "executor": "train/diloco", "scheduler": PEER, "index": None, "count": None, "settings": settings | config,
            "resources": {}, "outputs": {}, "timeout_ms": None,
        }  # fmt: skip
        return json.dumps(definition)

    def arguments(self, **config: Any) -> list[str]:
        """Return the command line of `training`."""
        return ["--socket", str(self.socket), "--work-dir", str(self.work_dir), "--job", self.job(**config)]


@dataclass
class FakeTaskWorker:
    """A worker and scheduler of an inference task: hands out slices in order and keeps the parts."""

    work_dir: Path
    socket: Path
    slices: list[Path]
    settings: dict[str, Any]
    steps: list[str] = field(default_factory=list)
    """Slices handed out and parts received, in order."""
    parts: dict[int, list[Any]] = field(default_factory=dict)
    """Slice -> parsed lines of its part."""
    sent: list[Any] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    answers: dict[str, Callable[[Any], tuple[int, Any]]] = field(default_factory=dict)
    """Route -> replacement for the default answer."""
    drains_after: int = 1000
    """Number of reports after which the task drains."""

    def __post_init__(self) -> None:
        self.handed_out = 0
        self.events: queue.Queue[Any] = queue.Queue()

    def fetch(self, body: Any) -> tuple[int, Any]:
        assert body["type"] == "resource"
        assert body["name"] == "slices"
        if self.handed_out == len(self.slices):
            return 410, {"error": "no-more-data", "detail": "every slice is computed"}
        index, out = self.handed_out, self.work_dir / body["out_dir"]
        self.handed_out += 1
        self.steps.append(f"fetch {index}")
        out.mkdir(parents=True, exist_ok=True)
        path = Path(shutil.copy(self.slices[index], out / f"{index}-{self.slices[index].name}"))
        metadata = {"slice": str(index), "epoch": "0", "dataset": "rows"}
        name = path.relative_to(self.work_dir).as_posix()
        return 200, [{"path": name, "size": 1, "checksum": "blake3:" + "0" * 64, "metadata": metadata}]

    def send(self, body: Any) -> tuple[int, Any]:
        self.sent.append(body)
        with (self.work_dir / body["path"]).open("rb") as lines:
            self.parts[body["round"]] = [json.loads(line) for line in lines]
        self.steps.append(f"send {body['round']}")
        return 200, {"sent": [PEER]}

    def trace(self, body: Any) -> tuple[int, Any]:
        self.spans += body["spans"]
        return 200, {"recorded": len(body["spans"])}

    def update(self, body: Any) -> tuple[int, Any]:
        self.reports.append(body)
        return 200, {"draining": len(self.reports) >= self.drains_after}

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        usual = {
            "/resources/fetch": self.fetch, "/resources/send": self.send, "/task/update": self.update,
            "/telemetry/spans": self.trace,
        }  # fmt: skip
        return (self.answers.get(route) or usual[route])(body)

    def run(self, *more: str) -> list[Any]:
        """Run the executor; return the rows of all parts in order."""
        from hypha.accelerate_executor import inference

        assert inference.main(self.arguments(*more)) == 0
        return [row for index in sorted(self.parts) for row in self.parts[index]]

    def arguments(self, *more: str) -> list[str]:
        """Return the command line of `inference`."""
        job = {"job_id": "x", "task": "infer", "attempt": 1, "scheduler": PEER, "settings": self.settings}
        return ["--socket", str(self.socket), "--work-dir", str(self.work_dir), "--job", json.dumps(job), *more]


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    worker: FakeWorker | FakeTaskWorker
    closing = False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def address_string(self) -> str:
        return "unix"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/resources/receive" and self.path not in self.server.worker.answers:
            self._stream()
            return
        status, answer = self.server.worker.answer(self.path, body)
        if status == HANG_UP:
            self.close_connection = True
            return
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        self.wfile.flush()
        while (event := self.server.worker.events.get()) is not None:
            self.wfile.write(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")
            self.wfile.flush()
        self.close_connection = True


@pytest.fixture
def serve() -> Iterator[Callable[[Any], Any]]:
    """Start fake workers on their sockets; stopped at the end of the test."""
    servers: list[_Server] = []

    def start(worker: FakeWorker | FakeTaskWorker) -> FakeWorker | FakeTaskWorker:
        server = _Server(str(worker.socket), _Handler)
        server.worker = worker
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return worker

    yield start
    for server in servers:
        server.worker.events.put(None)
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def digits() -> dict[str, Any]:
    """Load handwritten digits: `train` and `test`, each pixel_values (N, 1, 8, 8) float32 and labels (N,) int64."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("f4").reshape(-1, 1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    return {
        "train": {"pixel_values": train_x, "labels": train_y.astype("i8")},
        "test": {"pixel_values": test_x, "labels": test_y.astype("i8")},
    }


@pytest.fixture(scope="session")
def digit_slices(tmp_path_factory: pytest.TempPathFactory, digits: dict[str, Any]) -> list[Path]:
    """Write the training images in slices of 90, the last one shorter."""
    folder = tmp_path_factory.mktemp("slices")
    train = digits["train"]
    paths = []
    for index, begin in enumerate(range(0, len(train["labels"]), 90)):
        paths.append(folder / f"slice-{index}.safetensors")
        rows = {name: np.ascontiguousarray(value[begin : begin + 90]) for name, value in train.items()}
        safetensors.numpy.save_file(rows, paths[-1])
    return paths


@pytest.fixture(scope="session")
def digit_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the start model of the demo."""
    from hypha.accelerate_executor.modeling.create import ARCHITECTURES, create_model

    path = tmp_path_factory.mktemp("models") / "digits"
    create_model("image-classification", ARCHITECTURES["resnet-digits"], 0, path)
    return path


@pytest.fixture(scope="session")
def llama_config() -> dict[str, Any]:
    """Return the configuration of a small language model with tied embeddings."""
    return {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, llama_config: dict[str, Any]) -> Path:
    """Create that language model; tests must not modify it."""
    from hypha.accelerate_executor.modeling.create import create_model

    path = tmp_path_factory.mktemp("llama") / "model"
    create_model("causal-lm", llama_config, 1, path)
    return path


@pytest.fixture(scope="session")
def text_slices(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write a slice of rows of tokens, padded to very different lengths."""
    chance = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "slice.safetensors"
    tokens = chance.integers(0, 64, (90, 12)).astype("i4")
    mask = (np.arange(12) < chance.integers(2, 13, (90, 1))).astype("u1")
    safetensors.numpy.save_file({"input_ids": tokens, "attention_mask": mask}, path)
    return [path]


@pytest.fixture
def follow_commands(make_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs a follower of a process group, which is sent some commands, for a job."""
    from hypha.accelerate_executor.diloco import loop
    from hypha.accelerate_executor.distributed.process_group import Shutdown
    from hypha.accelerate_executor.options import OwnerOptions
    from hypha.accelerate_executor.training import read_settings

    def follow(*commands: Any, **config: Any) -> None:
        left = iter((*commands, Shutdown()))
        group = SimpleNamespace(size=2, leads=False, receive_command=lambda: next(left))
        monkeypatch.setattr(loop, "join_process_group", lambda _timeout: group)
        loop.follow(read_settings(make_worker().job(**config)), OwnerOptions(), loop.LoopTiming(1.0))

    return follow


@pytest.fixture(autouse=True)
def _bounded_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound what a request waits for where a test names no timeout: threads in a request delay the end of the tests."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "60")


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Run torch with one thread, so that sums are bit-identical."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_worker(
    tmp_path: Path, digit_model: Path, digit_slices: list[Path], serve: Callable[[Any], Any]
) -> Iterator[Callable[..., FakeWorker]]:
    """Return a function that starts a fake worker, by default with the digits."""
    number = 0
    with tempfile.TemporaryDirectory(prefix="hx") as sockets:  # the path of a socket is limited to 107 bytes

        def make(**settings: Any) -> FakeWorker:
            nonlocal number
            number += 1
            work_dir = tmp_path / f"job-{number}" / "work"
            work_dir.mkdir(parents=True)
            usual: dict[str, Any] = {"model_dir": digit_model, "slices": digit_slices}
            worker: FakeWorker = serve(FakeWorker(work_dir, Path(sockets) / f"{number}.sock", **(usual | settings)))
            return worker

        yield make


@pytest.fixture
def make_task_worker(tmp_path: Path, serve: Callable[[Any], Any]) -> Iterator[Callable[..., FakeTaskWorker]]:
    """Return a function that starts a fake worker for an inference task with a copy of a model."""
    number = 0
    with tempfile.TemporaryDirectory(prefix="hx") as sockets:

        def make(
            model: Path, slices: list[Path], chosen: dict[str, Any], link: Any = shutil.copy2, **more: Any
        ) -> FakeTaskWorker:
            nonlocal number
            number += 1
            settings = dict(chosen)
            work_dir = tmp_path / f"task-{number}" / "work"
            shutil.copytree(model, work_dir / "resources" / "model", copy_function=link)
            source = {"input_names": settings.pop("inputs", []), "path": "resources/model"}
            usual = {"model": source | {"type": settings.pop("type")}, "preprocessor": None, "columns": []}
            if (kind := settings.pop("preprocessor", None)) is not None:
                usual["preprocessor"] = source | {"type": kind, "input_names": []}
            socket = Path(sockets) / f"{number}.sock"
            worker: FakeTaskWorker = serve(FakeTaskWorker(work_dir, socket, slices, usual | settings, **more))
            return worker

        yield make


@pytest.fixture
def fails(caplog: pytest.LogCaptureFixture) -> Callable[[Callable[[list[str]], int], list[str], int], str]:
    """Return a function that runs a program, which ends with an exit code and one line; it returns the line."""

    def run(main: Callable[[list[str]], int], arguments: list[str], code: int) -> str:
        caplog.clear()
        assert main(arguments) == code
        [error] = [record for record in caplog.records if record.levelname == "ERROR"]
        assert error.exc_info is None
        line = error.getMessage()
        assert len(line) <= 1000
        assert "\n" not in line
        return line

    return run


@pytest.fixture(scope="session")
def words() -> Any:
    """Create a tokenizer whose tokens are small letters, digits, punctuation and five special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,:!?", "\u0120", "<pad>", "<end>", "<unk>", "<user>", "<reply>"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", model_max_length=1 << 30
    )


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory, words: Any, llama_config: dict[str, Any]) -> Path:
    """Create a language model with that tokenizer, whose weights are large enough for texts that vary."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("writer") / "model"
    torch.manual_seed(5)
    settings = dict(llama_config) | {"eos_token_id": words.eos_token_id, "bos_token_id": None, "initializer_range": 0.6}
    settings |= {"max_position_embeddings": 64, "vocab_size": len(words)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path


@pytest.fixture
def fake_auto_class(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Return a function that makes an auto class of transformers load what `from_pretrained` returns."""

    def fake(name: str, from_pretrained: Callable[..., Any]) -> None:
        import transformers

        hasattr(transformers, name)  # the first class that is loaded makes transformers replace its own module
        monkeypatch.setattr(sys.modules["transformers"], name, SimpleNamespace(from_pretrained=from_pretrained))

    return fake
