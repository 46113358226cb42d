"""Slots of incoming pushes: the last of several pushes gets the slot, also when an earlier one hangs."""

from __future__ import annotations

import anyio
import pytest

from hypha_net.testing import simulate
from hypha_net.transfer.framing import TransferInterruptedError
from hypha_net.transfer.push_slots import PushSlots
from hypha_proto.ids import PeerId

KEY = (PeerId.from_public_key(bytes(32)), "slot")


def test_later_of_two_waiting_pushes_gets_the_slot() -> None:
    async def main(order: str) -> None:
        slots, ends = PushSlots(), dict[str, str]()
        free = anyio.Event()

        async def push(name: str) -> None:
            try:
                async with slots.hold(KEY, name):
                    if name == "first":
                        with anyio.CancelScope(shield=True):
                            await free.wait()
                    await anyio.sleep(0.1)
                ends[name] = "held on"
            except TransferInterruptedError:
                ends[name] = "gave way"

        async with anyio.create_task_group() as tasks:
            for name in ("first", "second", "third"):
                tasks.start_soon(push, name)
                await anyio.sleep(0.1)
            free.set()
        assert ends == {"first": "gave way", "second": "gave way", "third": "held on"}, order

    for seed in range(8):  # which of two waiting tasks continues first is random
        simulate(lambda seed=seed: main(f"seed {seed}"), seed=seed)


@pytest.mark.parametrize("count", [1, 2])
async def test_slot_is_released_after_its_pushes(count: int) -> None:
    slots = PushSlots()
    for _ in range(count):
        async with slots.hold(KEY, "a file"):
            pass
    async with slots.hold(KEY, "another"):
        pass
