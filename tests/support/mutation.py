"""Mutation of valid messages for fuzzing: a seeded generator, so that a failure can be reproduced from its seed."""

from __future__ import annotations

import random


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return a message after one to four random changes."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << chance.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = chance.randbytes(chance.randint(1, 64))
            case 3:
                changed[at : at + chance.randint(1, 16)] = b""
            case 4:
                changed[at : at + 8] = chance.choice((b"\xff", b"\x00", b"\x80", b"\x7f")) * 8
            case _:
                changed[at:at] = changed[: chance.randint(0, 256)]
    return bytes(changed)
