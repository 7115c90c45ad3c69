"""The command `hf-kvcache`. A command imports what it needs when it runs, so that `--help` and `list` need no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import hf_kvcache
from hf_kvcache.config import LAYOUTS
from hf_kvcache.errors import KVCacheError
from hf_kvcache.evals import calibrate, front, generation, memory, page, perplexity, retrieval, speed
from hf_kvcache.formats.spec import FORMATS
from hf_kvcache.planning import advise
from hf_kvcache.planning import command as plan

COMMANDS = {"plan": plan, "advise": advise, "report": page, "calibrate": calibrate}
EVALS = {
    "perplexity": perplexity,
    "front": front,
    "retrieval": retrieval,
    "generation": generation,
    "speed": speed,
    "memory": memory,
}
EPILOG = """\
examples:
  hf-kvcache list
  hf-kvcache plan --layers 80 --kv-heads 8 --head-dim 128 --batch 32 --context 8192 --gpu h100
  hf-kvcache eval perplexity --caches paged_fp8 paged_int8
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `func`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "hf-kvcache", description="Paged and quantized KV caches for transformers.", epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"hf-kvcache {hf_kvcache.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    about = "the names for cache_implementation, and what each is"
    listing = commands.add_parser(
        "list", help=about, description=about, epilog="example:\n  hf-kvcache list", formatter_class=raw
    )
    listing.set_defaults(func=list_caches)

    for name, module in COMMANDS.items():
        _add(commands, name, module)
    evals = commands.add_parser(
        "eval", help="measure caches", description="Measure caches.", epilog=EPILOG, formatter_class=raw
    )
    kinds = evals.add_subparsers(required=True, metavar="WHAT")
    for name, module in EVALS.items():
        _add(kinds, name, module)
    return parser


def _add(commands: Any, name: str, module: Any) -> None:
    """Add the command that a module makes up: its `ABOUT`, `EPILOG`, `add_arguments` and `run`."""
    parser = commands.add_parser(
        name,
        help=module.ABOUT,
        description=module.ABOUT,
        epilog=module.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(func=module.run)


def list_caches(_: argparse.Namespace) -> int:
    """Print every `<layout>_<format>` name."""
    names = {
        f"{layout}_{fmt}": f"{spec.about}; {about}"
        for layout, about in LAYOUTS.items()
        for fmt, spec in FORMATS.items()
    }
    width = max(map(len, names))
    for name, about in names.items():
        print(f"{name:<{width}}  {about}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0, 1 (a failed self-test) or 2 (bad input), with one line on stderr."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.func(options))
    except KVCacheError as error:
        print(f"hf-kvcache: error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)


if __name__ == "__main__":
    sys.exit(main())
