"""What a key/value cache is, in one attention layer: the same tokens with and without, and the work of each.

    python examples/kv_cache_from_scratch.py

The "model" has one layer of attention and random weights. It is fed a prompt, then writes token after token. Without a
cache every step computes keys and values of all tokens again; with a cache, those of the newest token only.
"""

import argparse
import math

import torch

VOCABULARY, WIDTH, HEADS = 50, 32, 4


class Layer:
    """Attention of `HEADS` heads, and a count of the multiplications it has made."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.q, self.k, self.v, self.out = torch.randn(4, WIDTH, WIDTH, generator=generator) / math.sqrt(WIDTH)
        self.work = 0

    def project(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[T, WIDTH]` -> `[HEADS, T, WIDTH / HEADS]`: every token by itself."""
        self.work += x.shape[0] * WIDTH * WIDTH
        return (x @ weights).view(len(x), HEADS, -1).transpose(0, 1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`Q` newest tokens look at all `T`, none at its future: `[HEADS, Q, D]` -> `[Q, WIDTH]`."""
        new, all_ = q.shape[1], k.shape[1]
        self.work += 2 * new * all_ * WIDTH  # scores, and the sum over values
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
        future = torch.ones(new, all_).tril(all_ - new) == 0
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return mixed.transpose(0, 1).reshape(new, WIDTH) @ self.out

    def next_token(self, x: torch.Tensor) -> int:
        """The likeliest token after the last of `[T, WIDTH]`."""
        return int((self.embedding @ x[-1]).argmax())


def write_without_cache(layer: Layer, tokens: list[int], count: int) -> tuple[list[int], list[int]]:
    """`count` tokens after the prompt, and the work of each step."""
    tokens, work = list(tokens), []
    for _ in range(count):
        layer.work = 0
        x = layer.embedding[tokens]  # all of them, every time
        y = layer.attend(layer.project(x, layer.q), layer.project(x, layer.k), layer.project(x, layer.v))
        tokens.append(layer.next_token(y))
        work.append(layer.work)
    return tokens, work


def write_with_cache(layer: Layer, tokens: list[int], count: int) -> tuple[list[int], list[int]]:
    """The same. The first pass (the prefill) reads the whole prompt; each later one (decoding) a single token."""
    tokens, work = list(tokens), []
    keys = values = torch.empty(HEADS, 0, WIDTH // HEADS)  # the cache
    new = tokens
    for _ in range(count):
        layer.work = 0
        x = layer.embedding[new]
        keys = torch.cat([keys, layer.project(x, layer.k)], dim=1)  # a token's key and value never change:
        values = torch.cat([values, layer.project(x, layer.v)], dim=1)  # they do not look at other tokens
        y = layer.attend(layer.project(x, layer.q), keys, values)
        new = [layer.next_token(y)]
        tokens += new
        work.append(layer.work)
    return tokens, work


def main(arguments: list[str] | None = None) -> None:
    """Write with and without a cache, compare, and print the work of some steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to write (%(default)s)")
    options = parser.parse_args(arguments)

    layer = Layer()
    prompt = [i % VOCABULARY for i in range(options.prompt)]
    again, work = write_without_cache(layer, prompt, options.tokens)
    cached, cached_work = write_with_cache(layer, prompt, options.tokens)
    assert again == cached, "a cache changes what is computed twice, not what comes out"

    print(f"{options.tokens} tokens, the same with and without a cache\n")
    print(f"{'step':>8}  {'without':>12}  {'with':>12}   multiplications")
    for i in sorted({0, 1, options.tokens // 2, options.tokens - 1}):
        print(f"{i:>8}  {work[i]:>12,}  {cached_work[i]:>12,}   {'prefill' if i == 0 else 'decode'}")
    print(f"{'all':>8}  {sum(work):>12,}  {sum(cached_work):>12,}   {sum(work) / sum(cached_work):.1f} times as many without\n")

    held = 2 * (options.prompt + options.tokens) * WIDTH
    print(f"The price: {held:,} numbers held, 2 x {WIDTH} for every token of every layer and sequence, read in every step.")
    print(f"Prefill reads each weight once for {options.prompt} tokens: it is bound by arithmetic.")
    print("Decoding reads each weight and the whole cache for one token: it is bound by memory, and a smaller cache is quicker.")


if __name__ == "__main__":
    main()
