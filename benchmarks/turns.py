"""Fair timing on a machine that is never quite alone: contestants take turns in every round, medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Step = Callable[[], object]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # cpu: of all threads together


def interleave(steps: Mapping[str, Step], rounds: int, slice_s: float, clock: str) -> dict[str, list[float]]:
    """Seconds of one step of each contestant, one figure a round.

    In every round each contestant runs steps for about `slice_s` seconds, at least one, in turn, so that what disturbs
    a round disturbs all of them.
    """
    now = CLOCKS[clock]
    repeats = {}
    for name, step in steps.items():
        step()
        begin = time.perf_counter()
        step()
        repeats[name] = max(1, min(200, int(slice_s / max(time.perf_counter() - begin, 1e-7))))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = now()
            for _ in range(repeats[name]):
                step()
            seconds[name].append((now() - begin) / repeats[name])
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """How many times faster: the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def read_bandwidth(clock: str, megabytes: int = 256, rounds: int = 7) -> float:
    """Bytes a second that summing a large float32 tensor reads, the best of some rounds, on torch's threads."""
    x = torch.ones(megabytes << 18)
    seconds = interleave({"sum": x.sum}, rounds, 0.0, clock)["sum"]
    return x.numel() * 4 / min(seconds)
