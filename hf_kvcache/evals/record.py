"""One result as one JSON line: the number, and all that is needed to get it again."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import hf_kvcache

SCHEMA = 1
PACKAGES = ("hf-kvcache", "torch", "transformers", "tokenizers", "numpy", "numba", "triton", "optimum-quanto", "hqq")


def environment(device: str) -> dict[str, Any]:
    """Versions of what ran, the commit of the package that ran, the machine and its device."""
    import torch

    return {
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "git": git_state(),
        "machine": {
            "system": platform.platform(terse=True),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, Any] | None:
    """Commit of the imported package's own files and whether they differ from it; None outside a checkout."""
    folder = Path(hf_kvcache.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return {"commit": _git(folder, "rev-parse", "HEAD"), "changed": bool(_git(folder, "status", "--porcelain", "."))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def append(path: str, records: list[dict[str, Any]]) -> None:
    """Add records to a file of JSON lines, the schema's number and the time in each."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with Path(path).open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({"schema": SCHEMA, "created": created, **record}) + "\n")
