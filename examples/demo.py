"""`make demo`: SmolLM2-135M writes with a paged fp8 cache, then what fp8 and int8 pages cost and save on real text.

The text is the essay in evals/data, or the file that $HF_KVCACHE_TEXT names (one record a line, such as WikiText).
"""

import os
import sys
import time
from pathlib import Path

import hf_kvcache
from hf_kvcache.evals import models, perplexity

TEXT = os.environ.get("HF_KVCACHE_TEXT") or str(Path(__file__).parent.parent / "evals" / "data" / "ferry.txt")
QUESTION = "Explain in a few sentences how a river can push a ferry from one bank to the other."
PROTOCOL = ["--windows", "4", "--window", "512", "--prefill", "416", "--batch", "4"]


def generate() -> None:
    """One answer by `cache_implementation="paged_fp8"`, and the memory it took."""
    model, tokenizer = models.load(models.SMOLLM2)
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    start = time.perf_counter()
    output = model.generate(
        **inputs, cache_implementation="paged_fp8", max_new_tokens=80, do_sample=False, return_dict_in_generate=True
    )
    seconds = time.perf_counter() - start
    cache = getattr(output, "cache", None) or output.past_key_values
    prompt = inputs["input_ids"].shape[1]
    print(f"> {QUESTION}\n{tokenizer.decode(output.sequences[0, prompt:], skip_special_tokens=True).strip()}\n")
    columns = cache.get_seq_length()
    exact = _exact_bytes(model.config, columns, model.dtype.itemsize)
    print(f"{output.sequences.shape[1] - prompt} tokens in {seconds:.1f} s, {columns} tokens in the cache")
    print(
        f"{cache.nbytes / 1024:.0f} KiB held; a {str(model.dtype).removeprefix('torch.')} cache: {exact / 1024:.0f} KiB"
    )
    print(cache.describe() + "\n")


def _exact_bytes(config, tokens: int, itemsize: int) -> int:
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens * itemsize


def main() -> int:
    """Generate, then measure; the exit code of the measurement."""
    print(f'hf_kvcache {hf_kvcache.__version__}: model.generate(..., cache_implementation="paged_fp8")\n')
    try:
        generate()
    except hf_kvcache.KVCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments = ["--model", models.SMOLLM2, "--text-file", TEXT, "--caches", "paged_fp8", "paged_int8", *PROTOCOL]
    print("hf-kvcache eval perplexity " + " ".join([*arguments[:3], Path(TEXT).name, *arguments[4:]]))
    return perplexity.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
