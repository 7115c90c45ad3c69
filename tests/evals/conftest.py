"""A tiny random model, a tokenizer and a text that the model wrote itself: nobody predicts it better than the model,
so that whatever damages the cache raises perplexity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 64
LENGTH = 320


@pytest.fixture(scope="package")
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="package")
def written(tiny: LlamaForCausalLM) -> list[int]:
    """Token ids that the model sampled."""
    torch.manual_seed(2)
    start = torch.tensor([[1]])
    return tiny.generate(start, max_new_tokens=LENGTH, do_sample=True, top_k=0, pad_token_id=0)[0].tolist()


@pytest.fixture(scope="package")
def folder(tiny: LlamaForCausalLM, written: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, a tokenizer of words `w0 <s> w2 ... w63`, and `text.txt`, ten words a line."""
    path = tmp_path_factory.mktemp("tiny")
    words = [f"w{i}" if i != 1 else "<s>" for i in range(VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="w0").save_pretrained(path)
    tiny.save_pretrained(path)
    lines = [" ".join(words[id_] for id_ in written[i : i + 10]) for i in range(0, len(written), 10)]
    (path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return path
