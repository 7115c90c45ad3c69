"""Every way to generate: exact caches equal transformers' own token for token, quantized ones keep their rows apart."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TextStreamer

import hf_kvcache
from tests.grids import CACHE, DECODERS, EXACT, FULL, LOSSY, SLIDING, cache_of, model, padded, prompt, thinned

NEW = 24
ALL = (*DECODERS, "t5")


def generate(
    name: str, cache: str | None = None, options: dict[str, Any] | None = None, /, **kwargs: Any
) -> torch.Tensor:
    """Token ids, with a cache of ours or, by default, transformers' own."""
    given = {"input_ids": prompt(2), "max_new_tokens": NEW, "do_sample": False, **kwargs}
    if cache is not None:
        given |= {"cache_implementation": cache, "cache_config": options}
    torch.manual_seed(3)
    return model(name).generate(**given)


@functools.cache
def assistant(name: str) -> Any:
    """A model that agrees with the main one now and then."""
    small = copy.deepcopy(model(name))
    with torch.no_grad():
        small.get_output_embeddings().weight += 0.3 * torch.randn(small.get_output_embeddings().weight.shape) * 0.2
    return small


MODES: dict[str, Callable[[str], dict[str, Any]]] = {
    "greedy": lambda name: {},
    "sampling": lambda name: {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    "beams": lambda name: {"num_beams": 3, "num_return_sequences": 2, "input_ids": prompt(2, 15)},
    "beam sampling": lambda name: {"num_beams": 2, "do_sample": True, "top_k": 20, "max_new_tokens": 12},
    "prompt lookup": lambda name: {"prompt_lookup_num_tokens": 4, "input_ids": prompt(1, 8).repeat(1, 4)},
    "assisted": lambda name: {"assistant_model": assistant(name), "input_ids": prompt(1, 30)},
    "left padding": lambda name: padded((5, 17, 33))[0],
    "prefill in chunks": lambda name: {"prefill_chunk_size": 7, "input_ids": prompt(2, 40)},
    "inputs_embeds": lambda name: {"input_ids": None, "inputs_embeds": model(name).get_input_embeddings()(prompt(2))},
    "repetition penalty": lambda name: {"repetition_penalty": 1.3},
}


def without_fault(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What transformers' own cache can be asked for: before 5.20 a sliding assistant of its own gets more keys than its
    mask has columns, and raises. Assisted decoding is greedy decoding, so that has to be the answer.
    """
    return {key: value for key, value in kwargs.items() if key != "assistant_model" or name not in SLIDING}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mode", MODES)
def test_exact_equals_dynamic(mode: str, name: str) -> None:
    kwargs = MODES[mode](name)
    expected = generate(name, **without_fault(name, kwargs))
    distinct = 1 if mode == "prompt lookup" else 3  # which looks for what repeats itself
    assert len(set(expected[:, -NEW:].flatten().tolist())) > distinct, "a model that repeats itself proves nothing"
    for options in EXACT.values():
        assert torch.equal(generate(name, "paged_exact", options, **kwargs), expected)


@pytest.mark.parametrize("name", ALL)
def test_logits_step_by_step(name: str) -> None:
    kwargs = {"return_dict_in_generate": True, "output_logits": True, **padded((9, 21))[0]}
    expected = generate(name, **kwargs)
    for options in EXACT.values():
        got = generate(name, "paged_exact", options, **kwargs)
        assert type(paged(cache_of(got))) is hf_kvcache.PagedCache
        for a, b in zip(got.logits, expected.logits, strict=True):
            assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max()))


def paged(cache: Any) -> Any:
    """Our part of what `generate` returns."""
    return getattr(cache, "self_attention_cache", cache)


@pytest.mark.parametrize("name", DECODERS)
def test_three_turns_continue_from_the_returned_cache(name: str) -> None:
    def talk(cache: str | None, options: dict[str, Any] | None = None) -> list[torch.Tensor]:
        ids, held, out = prompt(2, 9), None, []
        for turn in range(3):
            more = {CACHE: held} if held is not None else {}
            asked = (cache, options) if held is None else (None, None)
            got = generate(name, *asked, input_ids=ids, return_dict_in_generate=True, max_new_tokens=11, **more)
            held = cache_of(got)
            out.append(got.sequences)
            ids = torch.cat((got.sequences, prompt(2, 7, seed=turn + 5)), dim=1)
        return out

    expected = talk(None)
    for options in EXACT.values():
        assert all(torch.equal(a, b) for a, b in zip(talk("paged_exact", options), expected, strict=True))


@pytest.mark.parametrize("name", DECODERS)
def test_a_deep_copy_is_a_prefix_for_many_prompts(name: str) -> None:
    prefix = prompt(1, 26)
    for options in EXACT.values():
        cache = hf_kvcache.make_cache("paged_exact", model(name).config, **options)
        model(name)(prefix, **{CACHE: cache})
        live = [kind.table.pool.live for kind in cache.kinds]
        for seed in (1, 2, 3):
            ids = torch.cat((prefix, prompt(1, 3 + seed, seed)), dim=1)
            expected = generate(name, input_ids=ids)
            assert torch.equal(generate(name, input_ids=ids, **{CACHE: copy.deepcopy(cache)}), expected)
        assert cache.get_seq_length() == 26
        assert [kind.table.pool.live for kind in cache.kinds] == live


@pytest.mark.parametrize("attached", [False, True], ids=["plain", "attached"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_hand_written_loop(name: str, attached: bool) -> None:
    net = copy.deepcopy(model(name))
    expected = generate(name)
    for options in EXACT.values():
        cache = hf_kvcache.make_cache("paged_exact", net.config, **options)
        if attached:
            hf_kvcache.attach(net)
        ids = new = prompt(2)
        for _ in range(NEW):
            logits = net(new, **{CACHE: cache}).logits
            new = logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, new), dim=1)
        hf_kvcache.detach(net)
        assert torch.equal(ids, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_attentions_are_given_when_asked_for(name: str) -> None:
    net = model(name, "eager")
    kwargs = {"max_new_tokens": 6, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    expected = net.generate(prompt(2), **kwargs)
    for options in EXACT.values():
        got = net.generate(prompt(2), cache_implementation="paged_exact", cache_config=options, **kwargs)
        assert torch.equal(got.sequences, expected.sequences)
        assert len(got.attentions) == 6
        for step, other in zip(got.attentions, expected.attentions, strict=True):
            for a, b in zip(step, other, strict=True):
                assert a is not None
                assert a.shape == b.shape
                assert (a - b).abs().max() <= 1e-5


def test_attentions_asked_for_in_the_config() -> None:
    net = copy.deepcopy(model("llama", "eager"))
    net.config.output_attentions = True
    kwargs = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    expected = net.generate(prompt(1), **kwargs)
    got = net.generate(prompt(1), cache_implementation="paged_exact", **kwargs)
    cache = hf_kvcache.make_cache("paged_exact", net.config)
    net(prompt(1), **{CACHE: cache})
    step = net(prompt(1)[:, :1], **{CACHE: cache})
    assert all(a is not None for a in step.attentions)
    assert torch.equal(got.sequences, expected.sequences)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_eager_models_are_served(name: str) -> None:
    net = model(name, "eager")
    expected = net.generate(**padded((5, 30))[0], max_new_tokens=NEW, do_sample=False)
    for options in EXACT.values():
        got = net.generate(
            **padded((5, 30))[0],
            max_new_tokens=NEW,
            do_sample=False,
            cache_implementation="paged_exact",
            cache_config=options,
        )
        assert torch.equal(got, expected)
    assert net.config._attn_implementation == "eager"


def test_streaming() -> None:
    class Collect(TextStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    streamer = Collect()
    out = generate("llama", "paged_exact", input_ids=prompt(1), streamer=streamer)
    assert streamer.tokens == [*out[0].tolist(), -1]
    assert torch.equal(out, generate("llama", input_ids=prompt(1)))


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, 67)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", padding_side="left")


def test_pipeline() -> None:
    from transformers import pipeline

    pipe = pipeline("text-generation", model=model("llama"), tokenizer=word_tokenizer(), device="cpu")
    texts = ["w5 w9 w11 w3", "w7"]
    kwargs = {"max_new_tokens": 20, "do_sample": False, "batch_size": 2}
    expected = pipe(texts, **kwargs)
    assert pipe(texts, cache_implementation="paged_exact", **kwargs) == expected
    assert len(pipe(texts, cache_implementation="paged_fp8", **kwargs)) == 2


# ---- formats that lose digits


@pytest.mark.parametrize(("fmt", "name"), thinned(LOSSY, ("llama", "qwen2", "gpt2", "gemma2")))
def test_each_row_of_a_padded_batch_equals_the_row_alone(fmt: str, name: str) -> None:
    batch, rows = padded((5, 17, 64))
    kwargs = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    together = generate(name, f"paged_{fmt}", None, **batch, **kwargs)
    for b, row in enumerate(rows):
        alone = generate(name, f"paged_{fmt}", None, input_ids=row, **kwargs)
        # The first read through the cache: later ones amplify a rounding that falls the other way.
        for step in (0, 1):
            gap = (together.logits[step][b] - alone.logits[step][0]).abs().max()
            assert gap <= 2e-2 * alone.logits[step].abs().max()


@pytest.mark.parametrize(("fmt", "name"), thinned(LOSSY, ("llama", "qwen2", "gemma2", "gpt_oss")))
def test_attached_and_decoded_reads_agree(fmt: str, name: str) -> None:
    net = copy.deepcopy(model(name))
    ids = prompt(2, 70)
    logits = []
    for attached in (False, True):
        cache = hf_kvcache.make_cache(f"paged_{fmt}", net.config, impl="torch")
        if attached:
            hf_kvcache.attach(net)
        net(ids[:, :60], **{CACHE: cache})
        logits.append([net(piece, **{CACHE: cache}).logits for piece in (ids[:, 60:61], ids[:, 61:66])])
        hf_kvcache.detach(net)
    assert (logits[0][0] - logits[1][0]).abs().max() <= 2e-3 * logits[0][0].abs().max()
    assert (logits[0][1] - logits[1][1]).abs().max() <= 2e-2 * logits[0][1].abs().max()


@pytest.mark.parametrize(("fmt", "mode"), thinned(LOSSY, MODES))
def test_every_mode_runs_with_every_format(fmt: str, mode: str) -> None:
    out = generate("llama", f"paged_{fmt}", {"page_size": None}, **{"max_new_tokens": 8, **MODES[mode]("llama")})
    again = generate("llama", f"paged_{fmt}", {"page_size": None}, **{"max_new_tokens": 8, **MODES[mode]("llama")})
    assert torch.equal(out, again)


def test_fewer_digits_move_the_logits() -> None:
    """A cache that is never read would pass every other test of this file."""
    ids = prompt(1, 60)

    def last(name: str) -> torch.Tensor:
        cache = hf_kvcache.make_cache(name, model("llama").config)
        model("llama")(ids[:, :-1], **{CACHE: cache})
        return model("llama")(ids[:, -1:], **{CACHE: cache}).logits

    exact = last("paged_exact")
    assert 1e-5 < (last("paged_int8") - exact).abs().max() < (last("paged_fp8_e5m2") - exact).abs().max()


@pytest.mark.parametrize("name", FULL)
def test_group_beams_as_far_as_transformers_has_them(name: str) -> None:
    kwargs = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
    try:
        expected = generate(name, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever transformers says: ours must say the same
        with pytest.raises(type(error), match=str(error)[:30].replace("(", r"\(")):
            generate(name, "paged_exact", **kwargs)
        return
    assert torch.equal(generate(name, "paged_exact", **kwargs), expected)


@pytest.mark.parametrize("cache", ["paged_exact", "paged_fp8"])
def test_a_cache_as_long_as_the_input_behaves_as_transformers_own(cache: str) -> None:
    ids = prompt(1, 20)
    results = []
    for held in (None, hf_kvcache.make_cache(cache, model("llama").config)):
        from transformers import DynamicCache

        held = DynamicCache(config=model("llama").config) if held is None else held
        model("llama")(ids, **{CACHE: held})
        try:
            results.append(generate("llama", input_ids=ids, **{CACHE: held}).shape)
        except Exception as error:  # noqa: BLE001 - the same from both is what is asked
            results.append(type(error))
    assert results[0] == results[1]
