"""A paged fp8 cache by name: the least there is to write.

    python examples/quickstart.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvcache


def main(arguments: list[str] | None = None) -> None:
    """Generate a few tokens, then say what the cache of each layer was and what it held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or folder")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--cache", default="paged_fp8", choices=hf_kvcache.cache_names(), metavar="NAME")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    inputs = tokenizer(options.prompt, return_tensors="pt")
    output = model.generate(
        **inputs,
        cache_implementation=options.cache,
        max_new_tokens=16,
        do_sample=False,
        return_dict_in_generate=True,
    )
    print(tokenizer.decode(output.sequences[0]))
    cache = output["cache"] if "cache" in output else output["past_key_values"]  # before transformers 5.24
    print(cache.describe())
    print(f"{cache.get_seq_length()} tokens in {cache.nbytes:,} bytes")


if __name__ == "__main__":
    main()
