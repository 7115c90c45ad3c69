"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEADER = (
    "cache",
    "perplexity",
    "change %",
    "95 % interval",
    "mean KL",
    "99 % KL",
    "top-1 %",
    "bits",
    "MiB",
    "tokens/s",
)


def table(results: list[dict[str, Any]]) -> str:
    """Results (see `perplexity.measure`) as aligned columns, a row a cache."""
    return aligned(rows(results))


def rows(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The header, and the cells of each result."""
    return [HEADER, *(_cells(result) for result in results)]


def aligned(table_: Sequence[tuple[str, ...]], left: int = 1) -> str:
    """Rows of cells as columns under a ruled header; the first `left` columns start at their left edge."""
    widths = [max(len(cells[i]) for cells in table_) for i in range(len(table_[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in table_
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    interval = result["change_interval"]
    return (
        result["cache"]["text"],
        f"{result['perplexity']:.4f}",
        _signed(result["change_percent"]),
        "-" if interval is None else f"{_signed(interval[0])} .. {_signed(interval[1])}",
        f"{abs(result['kl_mean']):.6f}",  # below zero by rounding alone
        f"{abs(result['kl_p99']):.6f}",
        f"{100 * result['top1']:.2f}",
        f"{result['bits_per_element']:.2f}",
        f"{result['bytes'] / 2**20:.2f}",
        f"{result['tokens_per_second']:.1f}",
    )


def _signed(percent: float) -> str:
    """Three digits and a sign, which zero has not."""
    return f"{percent:+.3f}" if round(percent, 3) else "0.000"
