"""Where numba keeps compiled functions: a folder for each state of this package's sources.

numba only asks whether the file of the function itself has changed, not the files that it calls or takes constants
from. Here any change leads to another folder, so that old code never runs on new records.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, config

SIGNATURE = "void(voidptr)"


@functools.cache
def folder() -> Path | None:
    """`$HF_KVCACHE_HOME/compiled/<sources>` (else under `~/.cache/hf_kvcache`); None where nothing can be written."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    home = Path(os.environ.get("HF_KVCACHE_HOME") or Path.home() / ".cache" / "hf_kvcache")
    found = home / "compiled" / digest.hexdigest()[:16]
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return found if os.access(found, os.W_OK) else None


def compiled(function: Callable[[Any], None]) -> Any:
    """Compile `void function(void *)` now, or load it from the folder."""
    where = folder()
    if where is None:
        return cfunc(SIGNATURE)(function)
    before, config.CACHE_DIR = config.CACHE_DIR, str(where)
    try:
        return cfunc(SIGNATURE, cache=True)(function)
    finally:
        config.CACHE_DIR = before
