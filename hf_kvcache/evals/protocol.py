"""Scoring through the cache: a prefill, then a token (or a chunk) at a time, several caches side by side."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_kvcache.evals.candidates import bytes_by_kind, held_bytes, held_elements
from hf_kvcache.evals.errors import EvalError

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

Builder = Callable[[], "Cache"]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Protocol:
    """How a window is read. Every scored token is fed after the prefill, so it reads stored keys and values.

    windows: how many; window: tokens fed in each; prefill: how many of them in the first pass, unscored;
    chunk: tokens in each later pass (1 is the headline); batch: windows that share a pass, as rows.
    """

    windows: int
    window: int
    prefill: int
    chunk: int
    batch: int

    def __post_init__(self) -> None:
        for name in ("windows", "window", "prefill", "chunk", "batch"):
            if getattr(self, name) < 1:
                raise EvalError(f"--{name} is {getattr(self, name)}, and has to be at least 1")
        if self.prefill >= self.window:
            raise EvalError(f"--prefill {self.prefill} leaves nothing to score in a window of {self.window}")

    @property
    def targets(self) -> int:
        """Scored tokens of one window."""
        return self.window - self.prefill

    @property
    def steps(self) -> int:
        """Scoring passes of one window."""
        return -(-self.targets // self.chunk)

    @property
    def mean_context(self) -> float:
        """Tokens that a prediction looks back on, itself included: the same in every window."""
        return (self.prefill + 1 + self.window) / 2


@dataclass
class Scores:
    """What one cache did. Arrays are `[windows, targets]`; `kl` and `same` are against the first cache.

    seconds, tokens: of the scoring passes alone. bytes, elements: held at the windows' ends, summed
    over windows; bytes_by_kind: likewise, for caches that know (`stats()`).
    """

    nll: np.ndarray
    kl: np.ndarray
    same: np.ndarray
    cache_class: str = ""
    layer_classes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    bytes: int = 0
    elements: int = 0
    bytes_by_kind: dict[str, int] = field(default_factory=dict)


class Reader:
    """Calls a causal model with a cache, by whichever argument name this version of transformers uses."""

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(model.forward).parameters
        self.model = model
        self.argument = "cache" if "cache" in parameters else "past_key_values"
        self.can_trim = "logits_to_keep" in parameters

    def __call__(self, ids: torch.Tensor, cache: Cache | None, keep: int) -> torch.Tensor:
        """Feed `[B, T]` ids; log-probabilities of the last `keep` positions, float32 `[B, keep, vocabulary]`."""
        arguments: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            arguments[self.argument] = cache
        if self.can_trim:
            arguments["logits_to_keep"] = keep
        logits: torch.Tensor = self.model(input_ids=ids, **arguments).logits
        return logits[:, -keep:].float().log_softmax(-1)

    def clock(self) -> float:
        """Seconds, once the device has done what was asked of it."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


@torch.inference_mode()
def compare(
    model: PreTrainedModel,
    windows: torch.Tensor,
    protocol: Protocol,
    builders: dict[str, Builder],
    advance: Advance,
) -> dict[str, Scores]:
    """Score `windows` (`[windows, window + 1]`, see `text.windows`) through each cache; the first is the reference.

    All caches read the same pass before any reads the next: only one step's distributions are alive.
    `advance` is called with the number of passes done. Raises EvalError when a cache gives logits that are not finite.
    """
    read = Reader(model)
    scores = {name: _empty(protocol) for name in builders}
    for first in range(0, protocol.windows, protocol.batch):
        rows = windows[first : first + protocol.batch].to(model.device)
        caches = {name: build() for name, build in builders.items()}
        for cache in caches.values():
            read(rows[:, : protocol.prefill], cache, keep=1)
        for at in range(protocol.prefill, protocol.window, protocol.chunk):
            _step(read, rows, at, first, protocol, caches, scores)
            advance(len(caches))
        elements = held_elements(next(iter(caches.values())))
        for name, cache in caches.items():
            _close(scores[name], cache, elements)
    for name, score in scores.items():
        _check(name, score, protocol)
    return scores


def _empty(protocol: Protocol) -> Scores:
    shape = (protocol.windows, protocol.targets)
    return Scores(np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, dtype=bool))


def _step(
    read: Reader,
    rows: torch.Tensor,
    at: int,
    first: int,
    protocol: Protocol,
    caches: dict[str, Cache],
    scores: dict[str, Scores],
) -> None:
    """One pass of every cache over tokens `at .. at + chunk`, scored on the tokens that follow each."""
    end = min(at + protocol.chunk, protocol.window)
    ids, targets = rows[:, at:end], rows[:, at + 1 : end + 1, None]
    place = (slice(first, first + len(rows)), slice(at - protocol.prefill, end - protocol.prefill))
    reference: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for name, cache in caches.items():
        score = scores[name]
        start = read.clock()
        log_p = read(ids, cache, keep=end - at)
        score.seconds += read.clock() - start
        score.tokens += ids.numel()
        if reference is None:
            reference = (log_p, log_p.exp(), log_p.argmax(-1))
        log_exact, exact, choice = reference
        # A token that the model rules out (-inf) has no weight: 0 * (-inf - -inf) is 0 here.
        kl = (exact * (log_exact - log_p)).masked_fill_(exact == 0, 0.0).sum(-1)
        score.nll[place] = -log_p.gather(-1, targets)[..., 0].cpu().numpy()
        score.kl[place] = kl.cpu().numpy()
        score.same[place] = (log_p.argmax(-1) == choice).cpu().numpy()


def _close(score: Scores, cache: Cache, elements: int) -> None:
    score.cache_class = type(cache).__name__
    score.layer_classes = sorted({type(layer).__name__ for layer in cache.layers})
    score.bytes += held_bytes(cache)
    score.elements += elements
    for kind, count in bytes_by_kind(cache).items():
        score.bytes_by_kind[kind] = score.bytes_by_kind.get(kind, 0) + count


def _check(name: str, score: Scores, protocol: Protocol) -> None:
    wanted = protocol.windows * protocol.targets
    if score.tokens != wanted:
        raise EvalError(f"{name}: {score.tokens} tokens were scored, and the protocol has {wanted}")
    if not (np.isfinite(score.nll).all() and np.isfinite(score.kl).all()):
        window, target = np.argwhere(~(np.isfinite(score.nll) & np.isfinite(score.kl)))[0]
        raise EvalError(f"{name}: logits are not finite at token {protocol.prefill + target} of window {window}")


@torch.inference_mode()
def one_pass(model: PreTrainedModel, windows: torch.Tensor, protocol: Protocol) -> np.ndarray:
    """The same targets without any cache, a window in one pass: `[windows, targets]` negative log-likelihoods."""
    read = Reader(model)
    nll = np.empty((protocol.windows, protocol.targets))
    for i, row in enumerate(windows.to(model.device)):
        log_p = read(row[None, :-1], None, keep=protocol.targets)
        nll[i] = -log_p[0].gather(-1, row[-protocol.targets :, None])[:, 0].cpu().numpy()
    return nll
