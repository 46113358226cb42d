"""What a replay prints: one line for each round and what is wrong in it, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypha.accelerate_executor.replay.computation import RoundFindings


def describe_round(found: RoundFindings) -> Iterator[str]:
    """Yield the lines about a round."""
    updates, equal = f"{found.updates} update{'' if found.updates == 1 else 's'}", "equal to the bit"
    if found.is_equal:
        yield f"round {found.round}: {equal}: {updates}, the outer update and the weights"
    else:
        yield f"round {found.round}: {_state(found)}; {found.reproduced} of {updates} {equal}{_distance(found)}"
    for line in (*found.wrong, *found.differing, *found.unproven, *found.notes):
        yield f"  {line}"


def _state(found: RoundFindings) -> str:
    if found.wrong or (not found.is_close and found.differing):
        return "differs"
    return "not provable" if found.unproven else "differs within the tolerance"


def _distance(found: RoundFindings) -> str:
    if found.difference is not None:
        return f"; largest difference of the outer update {found.difference:.3g}, tolerance {found.tolerance:.3g}"
    if found.differing:
        return "; only digests can be compared, because the job kept no outer updates (rounds.keep_updates = true)"
    return ""


def conclude(rounds: Sequence[RoundFindings], recorded: int) -> tuple[bool, str]:
    """Return whether the record is proven, and the verdict.

    A machine that computes something of the job to the bit could compute all of it so: then differences are not
    rounding, however small they are.

    Args:
        rounds: what was found in the rounds that were computed.
        recorded: number of rounds of the record.
    """
    equal = [found for found in rounds if found.is_equal]
    others = [found for found in rounds if not found.is_equal]
    if not others and len(rounds) == recorded:
        return True, f"proven: {_count(recorded)} equal to the bit"
    if not any(found.is_exact for found in rounds) and all(map(_is_tolerable, others)) and len(rounds) == recorded:
        return True, (
            f"proven within the tolerance: {_count(recorded)}, {len(equal)} equal to the bit; this machine, its "
            "libraries or its number of threads compute otherwise than the workers"
        )
    reasons = [f"{_count(len(equal))} of {recorded} equal to the bit"]
    if others:
        reasons.append(f"see round {', '.join(str(found.round) for found in others)}")
    if any(found.is_exact for found in rounds) and any(_is_tolerable(found) for found in others):
        reasons.append("this machine computes other updates of the job to the bit, so the differences are not rounding")
    if len(rounds) < recorded:
        reasons.append(
            f"the rounds after {rounds[-1].round} could not be computed, because the weights that they begin from are "
            "not known"
        )
    return False, "not proven: " + "; ".join(reasons)


def _is_tolerable(found: RoundFindings) -> bool:
    return found.is_close and not found.is_equal


def _count(rounds: int) -> str:
    return f"{rounds} round{'' if rounds == 1 else 's'}"
