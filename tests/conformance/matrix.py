"""The matrix: architectures x ways to generate x formats, and what a cell says."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

import hf_kvcache
from tests.conformance.architectures import ARCHITECTURES, tiny
from tests.grids import CACHE, cache_of, padded, prompt

NEW = 8
LONG = 60  # tokens of a prompt: a page of 32 is sealed, and some are left for the ring
FORMATS: dict[str, dict[str, Any]] = {
    "exact": {"page_size": 16},
    "int8": {"page_size": 16},
    "int4": {"page_size": 32, "residual_length": 16},
}
SIMPLE = ("greedy", "left padding", "prefill in chunks", "two turns")  # whose logits can be compared step by step


@functools.cache
def assistant(name: str) -> Any:
    """A model that agrees with the main one now and then."""
    small = copy.deepcopy(tiny(name))
    head = small.get_output_embeddings()
    torch.manual_seed(4)
    head.weight = torch.nn.Parameter(head.weight + 0.03 * torch.randn_like(head.weight), requires_grad=False)
    return small


MODES: dict[str, Callable[[str], dict[str, Any]]] = {
    "greedy": lambda name: {"input_ids": prompt(2, LONG)},
    "sampling": lambda name: {"input_ids": prompt(2, LONG), "do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": lambda name: {"input_ids": prompt(2, LONG), "num_beams": 3, "num_return_sequences": 2},
    "beam sampling": lambda name: {"input_ids": prompt(1, LONG), "num_beams": 2, "do_sample": True, "top_k": 20},
    "left padding": lambda name: padded((5, 33, LONG))[0],
    "prefill in chunks": lambda name: {"input_ids": prompt(2, LONG), "prefill_chunk_size": 7},
    "prompt lookup": lambda name: {"input_ids": prompt(1, 15).repeat(1, 4), "prompt_lookup_num_tokens": 4},
    "assisted": lambda name: {"input_ids": prompt(1, LONG), "assistant_model": assistant(name)},
    "two turns": lambda name: {"input_ids": prompt(2, LONG)},
}


def run(name: str, mode: str, options: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Token ids and, where they can be compared, the logits of each step."""
    net, given = tiny(name), {"max_new_tokens": NEW, "do_sample": False, **MODES[mode](name)}
    simple = mode in SIMPLE
    torch.manual_seed(3)  # once the models are built
    out = net.generate(**given, **options, return_dict_in_generate=True, output_logits=simple)
    if mode == "two turns":
        seq2seq = net.config.is_encoder_decoder
        more = {} if seq2seq else {CACHE: cache_of(out)}
        ids = out.sequences if seq2seq else torch.cat((out.sequences, prompt(2, 7, seed=5)), dim=1)
        options = options if seq2seq else {}
        given = {**given, "input_ids": ids, **more}
        out = net.generate(**given, **options, return_dict_in_generate=True, output_logits=True)
    return out.sequences, list(out.logits) if simple else []


def asked(fmt: str, impl: str) -> dict[str, Any]:
    """`generate` arguments for a format."""
    return {"cache_implementation": f"paged_{fmt}", "cache_config": {**FORMATS[fmt], "impl": impl}}


def cell(name: str, mode: str, fmt: str, impl: str = "auto") -> str:
    """`equal`, `refused: ...` in transformers' own words, or `DIFFERS: ...`.

    exact is compared with transformers' default cache: the same tokens, logits to 1e-5. The others, read by `impl`, with
    the same cache read by the reference: logits to 2e-2 until the first token that differs (a rounding that falls the
    other way grows).
    """
    try:
        theirs = run(name, mode, {})
    except Exception as error:  # noqa: BLE001 - whatever it is: it is what the cell says
        words = " ".join(str(error).split())
        try:
            run(name, mode, asked(fmt, impl))
        except Exception as ours:  # noqa: BLE001
            return f"refused: {words}" if type(ours) is type(error) else f"DIFFERS: {ours} in place of {words}"
        return "equal"  # ours does more than the default
    got = run(name, mode, asked(fmt, impl))
    expected = theirs if fmt == "exact" else run(name, mode, asked(fmt, "reference"))
    bound = 1e-5 if fmt == "exact" else 2e-2
    prompt_tokens = expected[0].shape[1] - len(expected[1])
    for step, (a, b) in enumerate(zip(got[1], expected[1], strict=False)):
        if not (a - b).abs().max() <= bound * max(1.0, float(b.abs().max())):
            return f"DIFFERS: logits of step {step} by {float((a - b).abs().max()):.1e}"
        end = prompt_tokens + step + 1
        if fmt != "exact" and not torch.equal(got[0][:, :end], expected[0][:, :end]):
            return "equal"
    same = torch.equal(got[0], expected[0])
    return "equal" if same else "DIFFERS: tokens"


def groups() -> dict[str, list[str]]:
    """Architectures by what their layers get."""
    out: dict[str, list[str]] = {}
    for name, config in ARCHITECTURES.items():
        made = config()
        cache = hf_kvcache.make_cache("paged_int8", made)
        windows = {layer.window for layer in cache.paged_layers}
        latent = "latents" in cache.describe()
        others = {type(layer).__name__ for layer in cache.layers if layer not in cache.paged_layers}
        what = "latents in pages, absorbed decode" if latent else "all tokens in pages"
        if windows != {None}:
            what = "the model's window in pages" if None not in windows else "windows and all tokens in pages, by layer"
        if others:
            what += "; linear attention: transformers' own"
        if made.is_encoder_decoder:
            what += "; cross-attention: transformers' own"
        out.setdefault(what, []).append(name)
    return out


def model_table() -> str:
    """The rows of the README's table of models."""
    return "\n".join(f"| {what} | {', '.join(names)} |" for what, names in groups().items())
