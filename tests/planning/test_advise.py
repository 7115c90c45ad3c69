"""`hf-kvcache advise`: each branch of the tree, what it asks for, what it prints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from hf_kvcache import cache_names, cli
from hf_kvcache.planning import advise

LLAMA = str(Path(__file__).parent / "configs" / "llama-3.1-8b.json")


def advice(capsys, bottleneck: str, *arguments: str) -> dict:
    assert cli.main(["advise", LLAMA, "--bottleneck", bottleneck, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_ladder_names_caches():
    assert set(advise.LADDER) <= set(cache_names())


def test_throughput_takes_the_mildest_lossy_cache(capsys):
    found = advice(capsys, "throughput", "--batch", "32", "--context", "8192", "--gpu", "h100")
    assert found["cache"] == "paged_int8"
    assert found["engines"][0].startswith("transformers serve MODEL --continuous-batching")
    assert found["engines"][1] == "vllm serve MODEL --max-model-len 8192 --max-num-seqs 32 --kv-cache-dtype fp8"


def test_short_contexts_stay_exact(capsys):
    assert advice(capsys, "throughput", "--batch", "1", "--context", "512", "--gpu", "h100")["cache"] == "paged_exact"


@pytest.mark.parametrize(("context", "cache"), [("8192", "paged_exact"), ("81920", "paged_int8"), ("163840", "paged_int4")])
def test_cost_takes_what_fits(context, cache, capsys):
    """24 GiB, 90 % of it, less 15 GiB of weights: about 6.6 GiB; 128 KiB a token when exact, half of it in 8 bits."""
    assert advice(capsys, "cost", "--batch", "1", "--context", context, "--gpu", "rtx4090")["cache"] == cache


def test_the_first_token_is_not_quicker_with_a_smaller_cache(capsys):
    found = advice(capsys, "first-token", "--batch", "1", "--context", "32768", "--gpu", "h100")
    assert found["cache"] == "paged_exact"
    assert found["generate"] == {"prefill_chunk_size": 2048}
    assert any("computed once" in step for step in found["steps"])


def test_one_machine_is_outgrown(capsys):
    found = advice(capsys, "cost", "--batch", "64", "--context", "131072", "--gpu", "l4")
    assert found["cache"] is None
    assert found["chips"] == 16
    assert "--tensor-parallel-size 16" in found["engines"][0]


def test_the_text_ends_in_code_that_can_be_pasted(capsys):
    assert cli.main(["advise", LLAMA, "--bottleneck", "cost", "--batch", "1", "--context", "32768", "--gpu", "h100"]) == 0
    shown = capsys.readouterr().out
    assert 'model.generate(**inputs, cache_implementation="paged_exact", prefill_chunk_size=2048)' in shown
    assert "vllm" not in shown


def options(**given: object) -> argparse.Namespace:
    names = ("bottleneck", "batch", "context", "memory", "gpu")
    return argparse.Namespace(**{name: given.get(name) for name in names})


def test_it_asks_for_what_is_missing():
    answers = iter(["cost", "1,000", "h100"])
    asked = options(batch=4)
    advise.complete(asked, lambda question: next(answers))
    assert vars(asked) == {"bottleneck": "cost", "batch": 4, "context": 1000, "memory": None, "gpu": "h100"}


@pytest.mark.parametrize(("answer", "words"), [(["speed"], "'speed' is no bottleneck"), (["cost", "few"], "'few': accepted")])
def test_a_wrong_answer_is_refused(answer, words):
    answers = iter(answer)
    with pytest.raises(advise.ConfigError, match=words):
        advise.complete(options(), lambda question: next(answers))


def test_without_a_terminal_it_says_what_is_missing(capsys):
    assert cli.main(["advise", LLAMA, "--batch", "1", "--json"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "hf-kvcache: error: --bottleneck, --context, --memory must be given where nobody can be asked; "
        "--memory may be --gpu CHIP\n"
    )
