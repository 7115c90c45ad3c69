"""Where a model's config comes from: a file, a folder, the Hub, or numbers on the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_kvcache.errors import ConfigError


def read_config(place: str) -> dict[str, Any]:
    """The config of `place`: a `config.json`, a folder that holds one, or a Hub id (only then is anything downloaded).

    Raises ConfigError in one line.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _parse(path, place)
    if place.endswith(".json") or place.startswith((".", "/", "~")) or place.count("/") != 1:
        raise ConfigError(
            f"{place!r} is no config.json, no folder with one and no Hub id such as owner/name; "
            "or give numbers: --layers 80 --kv-heads 8 --head-dim 128"
        )
    return _parse(_download(place), place)


def _parse(path: Path, place: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place!r}: {path.name} cannot be read ({str(error).splitlines()[0]})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{place!r}: {path.name} holds a {type(config).__name__}, and a config is an object")
    return config


def _download(name: str) -> Path:
    help_ = "give a local config.json or folder, or numbers: --layers 80 --kv-heads 8 --head-dim 128"
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise ConfigError(f"model {name!r} is not here, and huggingface_hub is not installed: {help_}") from None
    try:
        return Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError, HfHubHTTPError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        why = "HF_HUB_OFFLINE is set and it is not in the cache" if offline else str(error).strip().splitlines()[0]
        raise ConfigError(f"the config of {name!r} cannot be had from the Hub ({why}): {help_}") from error


def config_of_numbers(numbers: Mapping[str, int | None]) -> dict[str, Any]:
    """`layers`, `kv_heads`, `head_dim` and, optional, `heads`, `window` as a config. Raises ConfigError if one lacks."""
    missing = [f"--{name.replace('_', '-')}" for name in ("layers", "kv_heads", "head_dim") if numbers.get(name) is None]
    if missing:
        raise ConfigError(f"give a model or config, or all of --layers --kv-heads --head-dim; {', '.join(missing)} lacks")
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: accepted are whole numbers from 1")
    return {
        "num_hidden_layers": numbers["layers"],
        "num_attention_heads": numbers.get("heads") or numbers["kv_heads"],
        "num_key_value_heads": numbers["kv_heads"],
        "head_dim": numbers["head_dim"],
        "sliding_window": numbers.get("window"),
    }
