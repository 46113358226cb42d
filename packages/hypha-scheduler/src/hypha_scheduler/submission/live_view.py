"""Live view of a job on a terminal: draws a `JobView`, and prints the lines of events above it.

Texts of events may come from workers: they are drawn as they are, never as markup, with control characters escaped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hypha_scheduler.submission.job_view import JobView, ShownWorker, readable_seconds
from hypha_scheduler.submission.log_client import escape_controls

REFRESHES: Final = 4
"""Times a second that the view is drawn, at most."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_BAR_WIDTH: Final = 24
_OTHER_LINES: Final = 7
"""Lines of the view that are no workers, and of the terminal that stay free."""


def render(state: JobView, now: float, height: int = 24) -> RenderableType:
    """Return the view at a time, for a terminal with so many lines."""
    parts: list[RenderableType] = [_line(_headline(state, now))]
    if state.losses:
        parts.append(_line(f"loss {state.losses[-1]:.4g}  {sparkline(list(state.losses))}"))
    if state.rows:
        parts += _workers(list(state.rows.values()), max(1, height - _OTHER_LINES))
    return Group(*parts)


def _headline(state: JobView, now: float) -> str:
    found = ["paused" if state.is_paused and state.state == "running" else state.state]
    if (progress := state.progress) is not None:
        done, planned, what = progress
        found.append(f"{_bar(done, planned)}{done}{f'/{planned}' if planned is not None else ''} {what}")
    if (left := state.seconds_left) is not None:
        found.append(f"{readable_seconds(max(0.0, left - max(0.0, now - state.at)))} left")
    found.append(f"cost {state.cost(now):.4g}")
    found += [f"{count} {what}" for count, what in ((state.lost, "lost"), (state.late, "late")) if count]
    return "  ".join(found)


def _bar(done: int, planned: int | None) -> str:
    if not planned:
        return ""
    filled = min(_BAR_WIDTH, max(0, done * _BAR_WIDTH // planned))
    return f"{'━' * filled}{'─' * (_BAR_WIDTH - filled)} "


def sparkline(values: list[float]) -> str:
    """Return a character for each value, the taller the larger it is among them."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[min(len(_BARS) - 1, int((value - low) * scale))] for value in values)


def _workers(rows: list[ShownWorker], most: int) -> list[RenderableType]:
    shown = sorted(rows, key=lambda row: row.is_gone)[:most]  # those that have left come last
    table = Table(box=None, pad_edge=False, expand=False, header_style="dim")
    for title, width in (("worker", 24), ("role", 10), ("price/h", None), ("does", 16), ("batch", None), ("/s", None)):
        table.add_column(title, no_wrap=True, overflow="ellipsis", max_width=width)
    for row in shown:
        style = "red" if row.is_late or row.is_gone else ""
        numbers = (_number(row.batch_size), _number(row.samples_per_second))
        cells = (row.shown_name, row.role, f"{row.price:g}", row.doing, *numbers)
        table.add_row(*(Text(escape_controls(cell), style) for cell in cells))
    rest = len(rows) - len(shown)
    return [table, *([_line(f"and {rest} more")] if rest else [])]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _line(text: str) -> Text:
    return Text(escape_controls(text), no_wrap=True, overflow="ellipsis")


@contextmanager
def show_live(console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Draw the view until the end of the context; yield what takes an event, in any thread."""
    state, lock = JobView(), threading.Lock()

    def draw() -> RenderableType:
        with lock:
            return render(state, time.time(), console.height)

    live = Live(
        get_renderable=draw,
        console=console,
        refresh_per_second=REFRESHES,
        redirect_stdout=False,
        redirect_stderr=False,
    )

    def take(event: dict[str, Any]) -> None:
        with lock:
            line = state.add(event)
        if line is not None:
            console.print(Text(escape_controls(line)))

    with live:
        yield take
