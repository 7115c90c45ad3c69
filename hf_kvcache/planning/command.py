"""`hf-kvcache plan`: what every cache takes for a model, and whether it fits. No torch, and no download for local configs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from hf_kvcache.errors import ConfigError
from hf_kvcache.planner import DTYPE_BYTES, first_of, layers_of
from hf_kvcache.planning import chips
from hf_kvcache.planning.fit import Fit, Room, fits
from hf_kvcache.planning.source import config_of_numbers, read_config
from hf_kvcache.planning.weights import WEIGHT_BITS, Weights, prefill_flops, weights_of

ABOUT = "Bytes of every cache for a model, the longest context, the largest batch and the least time per token."
EPILOG = """\
examples:
  hf-kvcache plan meta-llama/Llama-3.1-8B --batch 32 --context 8192 --gpu h100
  hf-kvcache plan ./my-model/config.json --memory 24GiB --bandwidth 1008GB --weights 4bit
  hf-kvcache plan --layers 80 --kv-heads 8 --head-dim 128 --batch 32 --context 8192 --json

MODEL is a config.json, a folder that holds one, or a Hub id. Only a Hub id is ever downloaded (its config.json alone).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add_model(parser)
    add("--batch", type=int, default=1, help="sequences at once (%(default)s)")
    add("--context", type=int, default=8192, help="tokens in each, prompt and answer (%(default)s)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that say which model and which machine, and how to tell what was found."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="config.json, folder or Hub id")
    add("--layers", type=int, help="instead of MODEL: attention layers")
    add("--kv-heads", type=int, help="instead of MODEL: key/value heads of a layer")
    add("--head-dim", type=int, help="instead of MODEL: numbers in a key")
    add("--heads", type=int, help="with these: query heads (as --kv-heads)")
    add("--window", type=int, help="with these: tokens a layer looks back to (all)")
    add("--gpu", metavar="CHIP", help=f"memory and bandwidth of: {', '.join(chips.CHIPS)}")
    add("--gpus", type=int, default=1, help="how many of them share model and cache (%(default)s)")
    add("--memory", help="of the machine, such as 80GB (10**9 bytes) or 80GiB (2**30)")
    add("--bandwidth", help="of that memory per second, such as 3350GB")
    add("--usable", type=float, default=0.9, help="share of memory for weights and cache (%(default)s)")
    add("--weights", choices=tuple(WEIGHT_BITS), help="how they are stored (as --dtype)")
    add("--params", metavar="N", help="weights in all, such as 70B, where the config does not tell")
    add("--dtype", choices=tuple(DTYPE_BYTES), default="bfloat16", help="of exact keys and values (%(default)s)")
    add("--json", action="store_true", help="print JSON")


def model_config(options: argparse.Namespace) -> dict[str, Any]:
    """The config that the options of `add_model` name. Raises ConfigError."""
    numbers = {name: getattr(options, name) for name in ("layers", "kv_heads", "head_dim", "heads", "window")}
    if options.model is None:
        return config_of_numbers(numbers)
    given = [f"--{name.replace('_', '-')}" for name, value in numbers.items() if value is not None]
    if given:
        raise ConfigError(f"{given[0]} goes without MODEL, and {options.model!r} was given too: give one of them")
    return read_config(options.model)


def machine(options: argparse.Namespace) -> chips.Chip | None:
    """The chip of `--gpu`, with `--memory` and `--bandwidth` in its stead where given; None without any of them."""
    if options.gpus < 1:
        raise ConfigError(f"--gpus {options.gpus}: accepted are whole numbers from 1")
    if not 0 < options.usable <= 1:
        raise ConfigError(f"--usable {options.usable}: accepted are shares above 0 and up to 1")
    base = chips.chip(options.gpu) if options.gpu else None
    if base is None and options.memory is None:
        if options.bandwidth is not None:
            raise ConfigError("--bandwidth needs --memory or --gpu")
        return None
    memory = chips.amount(options.memory, "--memory") if options.memory else base.memory if base else 0
    rate = chips.amount(options.bandwidth, "--bandwidth") if options.bandwidth else base.bandwidth if base else None
    name = base.name if base else "given"
    return chips.Chip(name, memory * options.gpus, None if rate is None else rate * options.gpus)


def weights(config: dict[str, Any], params: str | None) -> Weights | None:
    """From the config, or as many as `--params` says, all of them read in every step."""
    if params is None:
        return weights_of(config)
    try:
        count = float(params.upper().removesuffix("B").removesuffix("M").removesuffix("T"))
        unit = {"T": 1e12, "B": 1e9, "M": 1e6}.get(params[-1:].upper(), 1.0)
    except ValueError:
        count, unit = 0.0, 1.0
    if not 0 < count < 1e15:
        raise ConfigError(f"--params {params!r}: accepted are counts such as 70B or 350M")
    return Weights(round(count * unit), 0, 0)


def answer(options: argparse.Namespace) -> dict[str, Any]:
    """All that the command tells, as `--json` prints it: `model`, `machine`, `weights`, `prefill_flops`, `caches`."""
    for name in ("batch", "context"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: accepted are whole numbers from 1")
    config = model_config(options)
    layers = layers_of(config)
    chip, found = machine(options), weights(config, options.params)
    stored = options.weights or ("32bit" if options.dtype == "float32" else "16bit")
    bits = WEIGHT_BITS[stored]
    memory = None if chip is None else int(chip.memory * options.usable)
    size = 0 if found is None else found.nbytes(bits)
    room = Room(memory, size, lambda rows: 0 if found is None else found.read(bits, rows), None if chip is None else chip.bandwidth)
    rows = fits(layers, options.batch, options.context, room, options.dtype)
    text = {**config, **config.get("text_config", {})}
    return {
        "model": {
            "name": options.model or "numbers",
            "layers": len(layers),
            "layers_with_cache": sum(shape.stored for shape in layers),
            "layers_with_window": sum(shape.window is not None for shape in layers),
            "longest_trained_context": first_of(text, "max_position_embeddings", "n_positions", "max_seq_len"),
        },
        "batch": options.batch,
        "context": options.context,
        "dtype": options.dtype,
        "machine": None
        if chip is None
        else {"name": chip.name, "count": options.gpus, "memory": chip.memory, "usable": memory, "bandwidth": chip.bandwidth},
        "weights": None
        if found is None
        else {"stored": stored, "count": found.total, "active": found.active, "bytes": size, "read": found.read(bits, options.batch)},
        "prefill_flops": prefill_flops(config, found, options.batch, options.context),
        "caches": [dataclasses.asdict(row) for row in rows],
    }


def run(options: argparse.Namespace) -> int:
    """Print the table or JSON; 0. Raises ConfigError."""
    found = answer(options)
    print(json.dumps(found, indent=2) if options.json else text_of(found))
    return 0


def text_of(found: dict[str, Any]) -> str:
    """`answer` for people."""
    return "\n".join([*_headline(found), "", *_table([Fit(**row) for row in found["caches"]]), "", *_notes(found)])


def _headline(found: dict[str, Any]) -> list[str]:
    model, weights_, chip = found["model"], found["weights"], found["machine"]
    kinds = [f"{model['layers_with_cache']} of {model['layers']} layers have a cache"]
    if model["layers_with_window"]:
        kinds.append(f"{model['layers_with_window']} of them a window")
    lines = {"model": f"{model['name']}: {', '.join(kinds)}"}
    if weights_:
        active = "" if weights_["active"] >= 0.9 * weights_["count"] else f", {weights_['active'] / 1e9:.1f} B for a token"
        lines["weights"] = f"{weights_['count'] / 1e9:.2f} B{active}, {weights_['stored']}: {chips.readable(weights_['bytes'])}"
    else:
        lines["weights"] = "not known, so not counted: give --params 70B"
    if chip:
        many = f"{chip['count']} x " if chip["count"] > 1 else ""
        rate = "bandwidth not given" if chip["bandwidth"] is None else f"{chip['bandwidth'] / 1e9:,.0f} GB/s"
        lines["machine"] = f"{many}{chip['name']}: {chips.readable(chip['usable'])} to use of {chips.readable(chip['memory'])}, {rate}"
    what = "all that a token goes through" if weights_ else "attention alone, without the weights"
    lines["request"] = f"{found['batch']} x {found['context']:,} tokens in {found['dtype']}"
    lines["prefill"] = f"{found['prefill_flops']:.3g} FLOP ({what})"
    return [f"{name:<8} {line}" for name, line in lines.items()]


HEADER = ("cache", "bytes/token", "total", "bits", "longest context", "largest batch", "ms/token, least", "fits")


def _table(rows: list[Fit]) -> list[str]:
    cells = [HEADER, *(_cells(row) for row in rows)]
    shown = [i for i in range(len(HEADER)) if any(line[i] != "-" for line in cells[1:])]
    widths = {i: max(len(line[i]) for line in cells) for i in shown}
    lines = ["  ".join(line[i].rjust(widths[i]) if i else line[i].ljust(widths[i]) for i in shown).rstrip() for line in cells]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _cells(row: Fit) -> tuple[str, ...]:
    def limit(value: int | None) -> str:
        return "-" if row.fits is None else "no limit" if value is None else f"{value:,}"

    return (
        row.name,
        f"{row.bytes_per_token:,.0f}",
        chips.readable(row.nbytes),
        f"{row.bits:.2f}",
        limit(row.longest_context),
        limit(row.largest_batch),
        "-" if row.floor_ms is None else f"{row.floor_ms:.2f}",
        "-" if row.fits is None else "yes" if row.fits else "no",
    )


def _notes(found: dict[str, Any]) -> list[str]:
    lines = ["bytes: codes, scales, exact tokens and whole pages, all rows; block tables (some bytes a page) are not counted"]
    if found["machine"]:
        lines.append(f"longest context: at batch {found['batch']}; largest batch: at {found['context']:,} tokens; by memory alone")
        trained = found["model"]["longest_trained_context"]
        if trained:
            lines.append(f"the model itself was made for {trained:,} tokens")
        if found["machine"]["bandwidth"] is not None:
            lines.append("ms/token, least: weights and cache read once at full bandwidth; no step of this batch is quicker")
    else:
        lines.append("give --gpu h100 or --memory 80GB to see what fits")
    return lines
