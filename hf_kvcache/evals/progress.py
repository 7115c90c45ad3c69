"""Progress on stderr: a bar with the time left on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 30.0  # seconds between plain lines


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that is told of each `n` units done, out of `total`."""
    bar = _bar() if sys.stderr.isatty() else None
    if bar is None:
        yield _lines(label, total)
        return
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)


def _bar():  # type: ignore[no-untyped-def]  # rich is optional, and so are its types
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _lines(label: str, total: int) -> Callable[[int], None]:
    start = last = time.monotonic()
    done = 0

    def advance(units: int) -> None:
        nonlocal done, last
        done += units
        now = time.monotonic()
        if now - last >= EVERY and done < total:
            last = now
            left = (now - start) * (total - done) / done
            print(f"{label}: {100 * done / total:.0f} %, about {left:.0f} s left", file=sys.stderr, flush=True)

    return advance
