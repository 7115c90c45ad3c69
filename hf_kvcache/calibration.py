"""A calibration: for each layer, the few directions that most of the queries share. A small JSON file.

`hf-kvcache calibrate MODEL` writes one; `cache_config={"calibration": path}` steers the rounding of keys by it
(`formats.steering`): the same bytes, better spent.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_kvcache.errors import ConfigError
from hf_kvcache.formats import hadamard, steering
from hf_kvcache.formats.spec import SideSpec

KIND = "hf_kvcache calibration 1"
MOST = 8  # directions of a head


def write(path: str | Path, directions: Mapping[int, torch.Tensor], about: Mapping[str, Any]) -> None:
    """Write directions `[H, D, r]` by layer, and `about`, what they were made from. The file appears whole or not at all."""
    layers = {
        str(i): [[[float(f"{x:.4g}") for x in channel] for channel in head] for head in m.tolist()]
        for i, m in directions.items()
    }
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps({"kind": KIND, **about, "layers": layers}), encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}") from None
    finally:
        draft.unlink(missing_ok=True)


def read(path: str | Path) -> dict[int, torch.Tensor]:
    """Directions `[H, D, r]` by layer. Raises ConfigError when the file is not a calibration."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["kind"] != KIND:
            raise ValueError(f"kind is {found['kind']!r}, expected {KIND!r}")
        layers = {int(i): torch.tensor(m, dtype=torch.float64) for i, m in found["layers"].items()}
        for i, m in layers.items():
            if m.dim() != 3 or not 1 <= m.shape[2] <= MOST or not bool(m.isfinite().all()):
                raise ValueError(f"layer {i} is not finite numbers [heads, channels, 1 to {MOST}]")
    except OSError as error:
        raise ConfigError(f"calibration={str(path)!r} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"calibration={str(path)!r} is not a calibration ({error}): make one with `hf-kvcache calibrate MODEL`"
        ) from None
    return layers


def steers(path: str | Path, layer: int, spec: SideSpec) -> torch.Tensor | None:
    """What steers the rounding of one layer's keys, `[H, D, 2, r]`; None where there is nothing to steer."""
    if not steering.serves(spec):
        return None
    try:
        stamp = os.stat(path).st_mtime_ns
    except OSError as error:
        raise ConfigError(f"calibration={str(path)!r} cannot be read: {error}") from None
    return _prepared(str(path), stamp, spec.rotate).get(layer)


@functools.lru_cache(maxsize=8)
def _prepared(path: str, stamp: int, rotate: bool) -> dict[int, torch.Tensor]:
    """All layers of a file, in the basis that is encoded. `stamp` tells one version of the file from the next."""
    return {i: steering.prepare(_rotated(m) if rotate else m) for i, m in read(path).items()}


def _rotated(directions: torch.Tensor) -> torch.Tensor:
    return hadamard.rotate(directions.float().transpose(1, 2)).transpose(1, 2)
