"""Secrets of jobs reach the servers that they are for, and are shown nowhere: executors, logs, spans, errors."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.fake_http_server import answers, served
from support.task_bridge_client import EXECUTOR
from support.task_settings import training

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    HuggingFaceReference,
    Model,
    Preprocessor,
    UriReference,
)
from hypha_proto.tasks import TaskResource, TaskSpec, UriSource
from hypha_worker.tasks.spec_references import with_secrets, without_secrets

USER, PASSWORD, SIGNATURE, REDIRECTED, TOKEN, BAD_TOKEN = (
    "u5er-1d",
    "pa55w0rd",
    "5igna7ure",
    "re-5igned",
    "hf_t0k3n",
    "hf_br0k3n",
)
SECRETS = (USER, PASSWORD, SIGNATURE, REDIRECTED, TOKEN, BAD_TOKEN, b64encode(f"{USER}:{PASSWORD}".encode()).decode())
SHOWS = """
print(open("/proc/self/cmdline").read(), dict(os.environ), open("job.json").read(), flush=True)
"""
FETCHES = (
    SHOWS
    + """
for artifact in (config["model"]["artifact"], config["preprocessor"]["artifact"]):
    status, answer = post("/resources/fetch", {"resource": artifact, "path": "in"})
    print("fetched" if status == 200 else "failed", status, answer, flush=True)
sys.exit(3)
"""
)


@dataclass
class Web:
    """A web server, and a hub, with what was asked of them."""

    address: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Path with query, and authorization."""

    def url(self, path: str) -> str:
        return f"http://{USER}:{PASSWORD}@{self.address}{path}?X-Amz-Signature={SIGNATURE}#{SIGNATURE}"

    def uri(self, path: str) -> UriReference:
        return UriReference(value=self.url(path))


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    made = Web()

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        made.asked.append((request.path, request.headers.get("authorization")))
        if request.path.startswith("/moved"):
            return 302, {"location": f"http://{made.address}/elsewhere?X-Amz-Signature={REDIRECTED}"}, b"content"
        return {"/found": 200, "/missing": 404}.get(request.path.partition("?")[0], 403), {}, b"content"

    with served(answers(answer)) as url:
        made.address = url.removeprefix("http://")
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield made


@pytest.fixture
def everything(tmp_path: Path, caplog: pytest.LogCaptureFixture, recorded: Any) -> Callable[[], str]:
    """Return a function that returns all logs, spans and logs of jobs."""
    caplog.set_level(logging.DEBUG, "hypha_worker")
    caplog.set_level(logging.DEBUG, "hypha_net")

    def read() -> str:
        formatted = "\n".join(logging.Formatter().format(record) for record in caplog.records)
        stored = "".join(path.read_text() for path in tmp_path.glob("work/logs/*/*.log"))
        return f"{formatted}\n{[span.to_json() for span in recorded.spans]}\n{recorded.values}\n{stored}"

    return read


def assert_no_secret(text: str) -> None:
    for secret in SECRETS:
        at = text.find(secret)
        assert at < 0, text[max(0, at - 200) : at + 100]


def with_artifacts(model: Any, preprocessor: Any) -> dict[str, Any]:
    """Return settings of a task that trains."""
    return {
        "model": Model(task="auto", artifact=model, input_names=()),
        "preprocessor": Preprocessor(task="auto", artifact=preprocessor, input_names=()),
    }


def hub(token: str) -> HuggingFaceReference:
    return HuggingFaceReference(repository="org/model", filenames=("config.json",), token=token)


HUBS = {"hub": hub(TOKEN), "bad token": hub(BAD_TOKEN + "\n")}
HOSTS = {"closed": "127.0.0.1:9", "not allowed": "localhost", "no URL": "[127.0.0.1"}


def second_url(web: Web, second: str) -> str:
    """Return a URL with secrets, of a path of the web server or of another host."""
    return web.url("/x").replace(web.address, HOSTS[second]) if second in HOSTS else web.url(second)


@pytest.mark.parametrize("second", ["/missing", "/moved", "closed", "not allowed", "no URL", "hub", "bad token"])
async def test_a_job_shows_no_secret_whether_its_fetches_succeed_or_fail(
    in_lab: Any, web: Web, everything: Callable[[], str], second: str
) -> None:
    other = HUBS.get(second) or UriReference(value=second_url(web, second))
    async with in_lab(connectors={"hosts": ["127.0.0.1"]}) as lab:
        await lab.start(FETCHES, lab.train_spec(**with_artifacts(web.uri("/found"), other)))
        end = await lab.scheduler.ended()
        assert end.outcome == "failed"
        lines = "\n".join(end.last_lines)
        assert "fetched 200" in lines, lines
        assert "failed" in lines, lines
        assert_no_secret(repr(end))
    assert_no_secret(everything())
    basic = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    assert (f"/found?X-Amz-Signature={SIGNATURE}", f"Basic {basic}") in web.asked
    if second == "hub":
        assert f"Bearer {TOKEN}" in {authorization for _, authorization in web.asked}


@pytest.mark.parametrize("second", ["/found", "/missing", "/moved", "closed", "hub", "bad token"])
async def test_a_task_shows_no_secret_whether_it_succeeds_or_fails(
    in_task_lab: Any, web: Web, everything: Callable[[], str], second: str
) -> None:
    uri = None if second in HUBS else UriSource(value=second_url(web, second))
    resources = (
        TaskResource(name="first", uri=UriSource(value=web.url("/found"))),
        TaskResource(name="second", huggingface=HUBS.get(second), uri=uri),
    )
    async with in_task_lab(executors=[EXECUTOR], connectors={"hosts": ["127.0.0.1"]}) as (_lab, tasks, lease):
        tasks.start(lease, "t", SHOWS, resources=resources)
        report = await tasks.end("t")
        if second == "/found":
            assert report.finished is not None, report
        else:
            assert report.failed is not None, report
            assert report.failed.resource == "second"
        assert_no_secret(repr(report))
    assert_no_secret(everything())


def test_executors_name_urls_by_what_is_not_secret_of_them(web: Web) -> None:
    """Two that differ in what is hidden stay two."""
    first, second = web.uri("/get"), UriReference(value=web.url("/get") + "&id=2")
    plain = UriReference(value="https://host/model.safetensors")
    config = training(PeerId.from_public_key(bytes(32)), data=plain, **with_artifacts(first, second))
    spec = TaskSpec(executor="train/x", training=config)
    shown: Any = without_secrets(config)
    assert_no_secret(repr(shown))
    assert with_secrets(spec, shown.model.artifact) == first
    assert with_secrets(spec, shown.preprocessor.artifact) == second
    assert shown.data == plain
    chosen = UriReference(value="https://host/other?version=2")
    assert with_secrets(spec, chosen) == chosen


def test_executors_name_repositories_without_their_token() -> None:
    config = training(PeerId.from_public_key(bytes(32)), **with_artifacts(hub(TOKEN), hub(TOKEN)))
    shown: Any = without_secrets(config).model.artifact
    assert_no_secret(repr(shown))
    other = msgspec.structs.replace(shown, repository="org/other")
    spec = TaskSpec(executor="train/x", training=config)
    assert (with_secrets(spec, shown), with_secrets(spec, other)) == (hub(TOKEN), other)
