"""Times of GPU work: medians, with the L2 cache emptied before each run. On a CPU, wall time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


class Timer:
    """Times calls on one device. `runs` is the number of timed calls."""

    def __init__(self, device: str, runs: int) -> None:
        self.device, self.runs = device, runs
        self._flush = torch.empty((256 << 20) if device == "cuda" else 1, dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time of `call`."""
        if self.device != "cuda":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        for _ in range(3):
            call()
        times = []
        for _ in range(self.runs):
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def copy_bandwidth(self) -> float:
        """Bytes per second that a plain copy reads and writes."""
        source = torch.empty((1 << 30) if self.device == "cuda" else 1 << 20, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.seconds(lambda: target.copy_(source))
