"""A node that serves every protocol, as the target of a fuzzer: ``python fuzz_target.py CERT KEY TRUST FOLDER``.

Prints its address and serves until its standard input is closed.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import anyio
import anyio.to_thread

from hypha_net import EndpointSettings, open_endpoint, pubsub, rpc, transfer
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import NetError
from hypha_net.identity import load_identity
from hypha_net.message_channel import MessageChannel, receive_frame
from hypha_proto import datasets, health, leases, offers, round_membership, task_resources, training_reports
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.protocols import TASKS, RpcMethod
from hypha_proto.tasks import MAX_FRAME, SchedulerFrame, StatusUpdate, Subscribe, TaskDefinition, WorkerFrame
from hypha_proto.transfer import PullRequest, PushHeader, Refusal

CONVERSATIONS: tuple[RpcMethod[object, object], ...] = tuple(
    value
    for module in (round_membership, health, leases, offers, training_reports, datasets, task_resources)
    for value in vars(module).values()
    if isinstance(value, RpcMethod)
)
"""All defined RPC methods."""


SUBSCRIBE = to_cbor(Subscribe, Subscribe(lease=uuid.UUID(int=1), next=0))
SUBSCRIBE = len(SUBSCRIBE).to_bytes(4, "little") + SUBSCRIBE
"""First message of a task stream, behind its length."""


class SchedulerCodec:
    """Frames of a task stream as a scheduler sends and receives them."""

    def encode(self, sequence: int, acknowledged: int, message: TaskDefinition | None) -> bytes:
        return to_cbor(SchedulerFrame, SchedulerFrame(sequence=sequence, acknowledged=acknowledged, definition=message))

    def decode(self, data: bytes) -> tuple[int, int, StatusUpdate | None]:
        frame: WorkerFrame = from_cbor(WorkerFrame, data, MAX_FRAME)
        return frame.sequence, frame.acknowledged, frame.report


async def serve_task_stream(stream: Stream) -> None:
    """Receive reports until the peer breaks the rules."""

    async def ignore(_report: StatusUpdate) -> None:
        pass

    try:
        from_cbor(Subscribe, await receive_frame(stream, 1 << 10) or b"")
        await MessageChannel[TaskDefinition, StatusUpdate](SchedulerCodec(), ignore, MAX_FRAME).run(stream, 0)
    except (NetError, DecodeError):
        await stream.reset()


async def refuse(_peer: PeerId, request: object) -> object:
    """Reject every decoded request; decoding it without failing is what the fuzzer tests."""
    raise rpc.RequestError(f"no answer to {type(request).__name__}")


async def serve(endpoint: Endpoint, folder: Path) -> None:
    """Serve every protocol."""
    for conversation in CONVERSATIONS:
        if conversation is not health.HEALTH_CHECK:
            rpc.serve(endpoint, conversation, refuse)

    endpoint.handle(TASKS, serve_task_stream)

    async def healthy(_peer: PeerId, _request: health.HealthRequest) -> health.Health:
        return health.Health(healthy=True)

    async def land(_peer: PeerId, _header: PushHeader) -> transfer.FilePushTarget | Refusal:
        async def arrived(_size: int, _digest: str) -> None:
            (folder / "landed").unlink()

        return transfer.FilePushTarget(folder / "landed", 1 << 20, arrived)

    async def offer(_peer: PeerId, _request: PullRequest) -> transfer.PullSource | Refusal:
        return transfer.PullSource(Path(__file__))

    rpc.serve(endpoint, health.HEALTH_CHECK, healthy)
    transfer.serve_pushes(endpoint, land)
    transfer.serve_pulls(endpoint, offer)
    async with pubsub.subscribe(endpoint, offers.WORKER_REQUESTS) as heard:
        async for _ in heard:
            pass


async def main(files: list[Path], folder: Path) -> None:
    """Open the endpoint and serve."""
    settings = EndpointSettings(("/ip4/127.0.0.1/tcp/0",), role="gateway", relay_circuit=False, state_dir=folder)
    async with (
        open_endpoint(load_identity(files[0], files[1], files[2]), settings) as endpoint,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(serve, endpoint, folder)
        print(endpoint.addresses[0], flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, [Path(name) for name in sys.argv[1:4]], Path(sys.argv[4]), backend="trio")
