"""Every figure that needs a GPU, in one command of a few minutes.

    python benchmarks/gpu.py [--out results.jsonl] [--skip-model]
    python benchmarks/gpu.py --dry      the same road on a CPU, in Triton's interpreter, at tiny sizes

In this order: kernels against plain attention on the same bytes (it stops at the first wrong one), decode attention
of each format beside SDPA and FlashInfer (if installed), absorbed MLA, then tokens per second and peak memory of a
model of random weights in the shape of Llama 8B. One JSON line a figure, and a table. `share` is the bytes that the
call must read over the time, as a share of what a plain copy moves in the same process.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, by whomever
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.timing import Timer
from benchmarks.views import LATENTS, SPECS, bytes_read, filled_view
from hf_kvcache.formats.spec import FORMATS
from hf_kvcache.ops import reference
from hf_kvcache.ops import triton as kernels
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.view import KVView

SHAPES = ((1, 4096), (1, 32768), (8, 4096), (8, 16384), (8, 32768), (32, 4096))
LATENT_SHAPES = ((1, 32768), (32, 4096), (64, 8192))
DRY_FORMATS = ("exact", "fp8", "int8", "int4", "token2")


class Sink:
    """Keeps every figure, prints it, and writes it as a JSON line."""

    def __init__(self, path: str | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._file = open(path, "w") if path else None  # noqa: SIM115

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if self._file:
            self._file.write(line + "\n")
            self._file.flush()

    def table(self) -> str:
        """Times by shape, a column a contender."""
        times = {(r["shape"], r["name"]): r for r in self.rows if r["figure"] in ("decode", "latent")}
        names = list(dict.fromkeys(n for _, n in times))
        lines = ["| shape | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
        for shape in dict.fromkeys(s for s, _ in times):
            cells = []
            for n in names:
                r = times.get((shape, n))
                cells.append("" if r is None else f"{r['microseconds']:.0f} µs ({100 * r['share']:.0f} %)")
            lines.append(f"| {shape} | " + " | ".join(cells) + " |")
        return "\n".join(lines)


def tolerance(call: AttendCall, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The answer in float64, and twice the error of plain attention in the query's dtype (and its last place)."""
    seen = reference.visible(call)

    def attention(dtype: torch.dtype) -> torch.Tensor:
        q, k, v = (x.to(dtype) for x in (call.query, keys, values))
        scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)) * call.scale
        wide = torch.promote_types(dtype, torch.float32)
        weights = torch.where(seen, scores.to(wide), -torch.inf).softmax(-1).to(dtype)
        return (weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).double()

    exact = attention(torch.float64)
    error = float((attention(call.query.dtype) - exact).abs().max())
    return exact, 2 * error + torch.finfo(call.query.dtype).eps * float(exact.abs().max())


def gate(sink: Sink, device: str, dtype: torch.dtype, names: list[str], latents: list[str], tokens: int) -> bool:
    """Whether every kernel is right."""
    from hf_kvcache.ops.triton.run import decode_latent

    right = True
    for name in names + latents:
        latent = name in latents
        if latent:
            view = filled_view(LATENTS[name], 1, 512, dtype, 1, tokens, device, value_dim=64)
            query = torch.randn(1, 16, 1, 576, dtype=dtype, device=device)
        else:
            view = filled_view(SPECS[name], 2, 128, dtype, 2, tokens, device)
            query = torch.randn(2, 8, 1, 128, dtype=dtype, device=device)
        call = AttendCall(query, view, query.shape[-1] ** -0.5)
        keys, values = reference.decode(view)
        if latent:
            keys, values = torch.cat((keys, values), -1), keys
        exact, bound = tolerance(call, keys, values)
        out = decode_latent(call) if latent else kernels.attend(call)
        error = float((out.double() - exact).abs().max())
        right &= error <= bound
        sink.add(figure="error", name=name, error=error, bound=bound, right=error <= bound)
    return right


def decode_figures(
    sink: Sink, timer: Timer, copy: float, dtype: torch.dtype, shapes: Any, names: list[str], heads: int
) -> None:
    """Each format, and the rivals in the same run."""
    device = timer.device
    for B, L in shapes:
        query = torch.randn(B, 4 * heads, 1, 128, dtype=dtype, device=device)

        def add(name: str, seconds: float, size: int, B: int = B, L: int = L) -> None:
            sink.add(
                figure="decode",
                shape=f"{B}x{L}",
                name=name,
                microseconds=seconds * 1e6,
                bytes=size,
                share=size / seconds / copy,
            )

        for name in names:
            view = filled_view(SPECS[name], heads, 128, dtype, B, L, device)
            call = AttendCall(query, view, 128**-0.5)
            add(name, timer.seconds(functools.partial(kernels.attend, call)), bytes_read(view))
            del view, call
        keys, values = (torch.randn(B, heads, L, 128, dtype=dtype, device=device) for _ in range(2))
        sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, query, keys, values, enable_gqa=True)
        add("sdpa", timer.seconds(sdpa), 2 * keys.numel() * keys.element_size())
        if device == "cuda" and importlib.util.find_spec("flashinfer"):
            add(
                "flashinfer", timer.seconds(flashinfer_call(query, B, L, heads)), 2 * keys.numel() * keys.element_size()
            )
        del keys, values, sdpa


def flashinfer_call(query: torch.Tensor, B: int, L: int, heads: int) -> Any:
    """FlashInfer's paged decode on pages of 64 tokens."""
    import flashinfer

    pages = B * L // 64
    cache = torch.randn(pages, 2, 64, heads, 128, dtype=query.dtype, device=query.device)
    ints = functools.partial(torch.arange, dtype=torch.int32, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=query.device), "NHD", use_tensor_cores=True
    )
    last = torch.full((B,), 64, dtype=torch.int32, device=query.device)
    wrapper.plan(ints(0, pages + 1, L // 64), ints(pages), last, 4 * heads, heads, 128, 64, q_data_type=query.dtype)
    flat = query[:, :, 0].contiguous()
    return lambda: wrapper.run(flat, cache)


def latent_figures(sink: Sink, timer: Timer, copy: float, dtype: torch.dtype, shapes: Any, heads: int) -> None:
    """Absorbed MLA, 512 + 64."""
    from hf_kvcache.ops.triton.run import decode_latent

    for B, L in shapes:
        query = torch.randn(B, heads, 1, 576, dtype=dtype, device=timer.device)
        for name, spec in LATENTS.items():
            view: KVView = filled_view(spec, 1, 512, dtype, B, L, timer.device, value_dim=64)
            seconds = timer.seconds(functools.partial(decode_latent, AttendCall(query, view, 0.07)))
            size = bytes_read(view)
            sink.add(
                figure="latent",
                shape=f"MLA {B}x{L}",
                name=name,
                microseconds=seconds * 1e6,
                bytes=size,
                share=size / seconds / copy,
            )
            del view


def model_figures(sink: Sink, device: str, dry: bool) -> None:
    """Tokens per second and peak memory of generation: transformers' caches and ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_kvcache  # noqa: F401

    tiny = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    }
    big = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    size: dict[str, Any] = tiny if dry else big
    config = LlamaConfig(
        **size, num_key_value_heads=2 if dry else 8, head_dim=64 if dry else 128, max_position_embeddings=65536
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.float32 if dry else torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    contenders: dict[str, dict[str, Any]] = {"dynamic": {}}
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        contenders["quantized (quanto, 4 bits)"] = {
            "cache_implementation": "quantized",
            "cache_config": {"backend": "quanto", "nbits": 4},
        }
    contenders |= {f"paged_{name}": {"cache_implementation": f"paged_{name}"} for name in FORMATS}
    for B, L in ((1, 96),) if dry else ((1, 4096), (1, 32768), (8, 8192)):
        prompt = torch.randint(0, config.vocab_size, (B, L), device=device)
        for name, options in contenders.items():
            seconds = {}
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for n in (1, 3) if dry else (1, 65):
                began = time.perf_counter()
                model.generate(prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0, **options)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds[n] = time.perf_counter() - began
            (few, short), (many, long) = seconds.items()
            peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
            rate = B * (many - few) / max(long - short, 1e-9)
            sink.add(
                figure="model",
                shape=f"{B}x{L}",
                name=name,
                tokens_per_second=rate,
                prefill_seconds=short,
                peak_bytes=peak,
            )


def main() -> int:
    """Run it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--out", help="file for the JSON lines")
    parser.add_argument("--runs", type=int, default=30, help="timed calls of each figure")
    parser.add_argument("--skip-model", action="store_true", help="kernels only")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        print("no GPU here: run with --dry to try the script on a CPU", file=sys.stderr)
        return 2
    device = "cpu" if args.dry else "cuda"
    dtype = torch.float16 if args.dry else torch.bfloat16
    torch.manual_seed(0)
    sink, timer = Sink(args.out), Timer(device, args.runs)
    names = list(DRY_FORMATS) if args.dry else list(SPECS)
    with torch.inference_mode():
        if not gate(sink, device, dtype, names, list(LATENTS), 150 if args.dry else 3000):
            print("a kernel is wrong: no times are taken", file=sys.stderr)
            return 1
        copy = timer.copy_bandwidth()
        sink.add(
            figure="copy",
            bytes_per_second=copy,
            device="cpu" if args.dry else torch.cuda.get_device_name(),
            torch=torch.__version__,
        )
        decode_figures(sink, timer, copy, dtype, ((1, 128),) if args.dry else SHAPES, names, 1 if args.dry else 8)
        latent_figures(sink, timer, copy, dtype, ((1, 128),) if args.dry else LATENT_SHAPES, 16 if args.dry else 128)
        if not args.skip_model:
            model_figures(sink, device, args.dry)
    print("\n" + sink.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
