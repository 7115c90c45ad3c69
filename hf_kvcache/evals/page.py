"""Records as one HTML page that needs nothing else: `hf-kvcache report RESULTS...`."""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hf_kvcache.evals import front, generation, memory, perplexity, report, retrieval, speed, suite
from hf_kvcache.evals.candidates import EXACT, installed
from hf_kvcache.evals.errors import EvalError
from hf_kvcache.evals.record import SCHEMA

ABOUT = "Records of the evals as one HTML page with tables and, where matplotlib is installed, plots."
EPILOG = """\
examples:
  hf-kvcache report results.jsonl
  hf-kvcache report evals/results/*.jsonl --out report.html --plots plots

Records are what `--out` of the evals appends; of equal cells the last one counts. The page depends on nothing but them.
"""
# Metric -> what it is called, the rows of its table, and its plot.
Draw = Callable[[list[dict[str, Any]], BinaryIO], bool]
APART = ("context", "length", "depth")  # what may differ within a table
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border-bottom: 1px solid #8884; padding: .2rem .8rem; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { font-family: ui-monospace, monospace; text-align: left; }
img { background: #fff; max-width: 100%; }
.about { color: #777; }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="files of records")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="the page (%(default)s)")
    parser.add_argument("--plots", metavar="FOLDER", help="also write the plots there, as PNG")


def run(options: argparse.Namespace) -> int:
    """Write the page and the plots; 0. Raises EvalError when there is nothing to show."""
    missing = [path for path in options.results if not Path(path).is_file()]
    if missing:
        raise EvalError(f"{missing[0]!r}: there is no such file of records")
    for folder in filter(None, [str(Path(options.out).parent), options.plots and str(Path(options.plots).parent)]):
        if not Path(folder).is_dir():
            raise EvalError(f"there is no folder {folder!r} to write to")
    drawable = installed("matplotlib")
    groups = grouped(read(options.results))
    plots = plots_of(groups) if drawable else {}
    Path(options.out).write_text(page(groups, plots), encoding="utf-8")
    if options.plots:
        if not drawable:
            raise EvalError('--plots needs matplotlib, which is not installed: pip install "hf-kvcache[eval]"')
        Path(options.plots).mkdir(exist_ok=True)
        for name, png in plots.items():
            (Path(options.plots) / f"{name}.png").write_bytes(png)
    print(f"{options.out}: {len(groups)} tables, {len(plots)} plots")
    if not drawable:
        print('no plots: matplotlib is not installed (pip install "hf-kvcache[eval]")')
    return 0


def read(paths: list[str]) -> list[dict[str, Any]]:
    """The records of some files, the last of equal cells. Raises EvalError for what is not a record of this schema."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        found |= suite.recorded(path)
    for line in found.values():
        if line.get("schema") != SCHEMA or line["metric"] not in KINDS:
            raise EvalError(
                f"a record of schema {line.get('schema')!r} and metric {line['metric']!r}: "
                f"accepted are schema {SCHEMA} and {', '.join(KINDS)}"
            )
    if not found:
        raise EvalError(f"no records in {', '.join(paths)}")
    return list(found.values())


def grouped(records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Records that one table may compare: same metric, model, machine and protocol, but for context, length and depth."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in sorted(records, key=lambda r: list(KINDS).index(r["metric"])):
        protocol = {name: value for name, value in r["protocol"].items() if name not in APART}
        text = r.get("text", {}).get("sha256")
        same = [r["metric"], r["model"], r["machine"]["device"], r["machine"]["processor"], protocol, text]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(r)
    return list(groups.values())


def plots_of(groups: list[list[dict[str, Any]]]) -> dict[str, bytes]:
    """Name -> PNG of each group that has a plot."""
    out = {}
    for i, records in enumerate(groups):
        file = io.BytesIO()
        if KINDS[records[0]["metric"]][2](records, file):
            out[name_of(i, records)] = file.getvalue()
    return out


def name_of(index: int, records: list[dict[str, Any]]) -> str:
    """A file's name for a group's plot."""
    return f"{index + 1:02d}-{KINDS[records[0]['metric']][0].split()[0].lower().rstrip(':')}"


def page(groups: list[list[dict[str, Any]]], plots: dict[str, bytes]) -> str:
    """The whole page. The same records and plots give the same text."""
    body = "\n".join(_section(records, plots.get(name_of(i, records))) for i, records in enumerate(groups))
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>hf_kvcache: measured</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>hf_kvcache: measured</h1>\n{body}\n</body>\n</html>\n"
    )


def _section(records: list[dict[str, Any]], png: bytes | None) -> str:
    title, rows, _ = KINDS[records[0]["metric"]]
    header, *lines = rows(_exact_first(records))
    table = "\n".join(f"<tr>{_cells('td', line)}</tr>" for line in lines)
    image = ""
    if png is not None:
        image = f'<p><img alt="{html.escape(title)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>\n'
    return (
        f"<h2>{html.escape(title)}</h2>\n<p class=about>{html.escape(_about(records))}</p>\n{image}"
        f"<table>\n<tr>{_cells('th', header)}</tr>\n{table}\n</table>"
    )


def _cells(tag: str, line: tuple[str, ...]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)


def _about(records: list[dict[str, Any]]) -> str:
    """Model, protocol, machine and versions; those of the first record, and how many commits there are."""
    first = records[0]
    machine, model = first["machine"], first["model"]
    protocol = {name: value for name, value in first["protocol"].items() if name not in (*APART, "bos", "text")}
    where = f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores, {machine['device']}"
    versions = ", ".join(f"{name} {first['packages'][name]}" for name in ("torch", "transformers") if name in first["packages"])
    commits = dict.fromkeys(r["git"]["commit"][:12] for r in records if r["git"])
    settings = ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in protocol.items())
    text = f" on {first['text']['source']}" if "text" in first else ""
    parts = [f"{model['name']} ({model['dtype']}){text}", settings, where, versions, "commit " + ", ".join(commits) if commits else ""]
    return "; ".join(part for part in parts if part)


def _exact_first(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda r: r["cache"]["text"] != EXACT)


def _ordered(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By context, and where equal as they came."""
    return sorted(records, key=lambda r: r["protocol"]["context"])


def _front(records: list[dict[str, Any]], file: BinaryIO) -> bool:
    rows = front.ranked(records)
    if not any(row["kl_mean"] > 0 for row in rows):
        return False
    front.draw(rows, file, records[0]["model"]["name"])
    return True


def _by_context(value: Callable[[dict[str, Any]], float], label: str) -> Draw:
    """A plot of lines, a cache each, over the context; both axes logarithmic."""

    def draw(records: list[dict[str, Any]], file: BinaryIO) -> bool:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        for name in dict.fromkeys(r["cache"]["text"] for r in records):
            points = [(r["protocol"]["context"], value(r)) for r in _ordered(records) if r["cache"]["text"] == name]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel=label, title=records[0]["model"]["name"])
        axes.grid(visible=True, which="both", linewidth=0.3)
        axes.legend(fontsize=8)
        figure.savefig(file, dpi=120)
        return True

    return draw


def _no_plot(records: list[dict[str, Any]], file: BinaryIO) -> bool:
    return False


KINDS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], list[tuple[str, ...]]], Draw]] = {
    perplexity.METRIC: ("Quality: bits against KL divergence", report.rows, _front),
    retrieval.METRIC: ("Retrieval of a pass key", retrieval.rows, _no_plot),
    generation.METRIC: ("Generation, greedy", generation.rows, _no_plot),
    speed.METRIC: (
        "Speed against context",
        lambda records: speed.rows(_ordered(records)),
        _by_context(lambda r: float(r["decode_tokens_per_second"]), "decode tokens/s"),
    ),
    memory.METRIC: (
        "Memory against context",
        lambda records: memory.rows(_ordered(records)),
        _by_context(lambda r: r["bytes"] / 2**20, "MiB held by the cache"),
    ),
}
