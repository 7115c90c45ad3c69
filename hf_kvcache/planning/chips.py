"""Memory and bandwidth of common chips, and amounts of memory as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_kvcache.config import suggest
from hf_kvcache.errors import ConfigError


@dataclass(frozen=True)
class Chip:
    """One chip. memory: bytes. bandwidth: of that memory in bytes per second, or None where it was not given."""

    name: str
    memory: int
    bandwidth: float | None


# Published figures: GB of memory (sold in units of 2**30 bytes) and GB/s (10**9 bytes). Sources, by maker:
# NVIDIA: product data sheets "T4", "V100" (SXM2, 32 GB), "A10", "L4", "L40S", "RTX A6000", "A100" (40 GB; 80 GB SXM),
#     "H100" (SXM5, PCIe, NVL), "H200", "DGX B200" (an eighth of 1,440 GB and 64 TB/s), and the pages of the GeForce
#     RTX 3090, 4090 and 5090 and of the RTX PRO 6000 Blackwell. AWS sells the A10G with the A10's memory.
# AMD: data sheets "Instinct MI250X", "MI300X", "MI325X". Apple: technical specifications of the machines.
_PUBLISHED: dict[str, tuple[int, int]] = {
    "t4": (16, 320),
    "v100": (32, 900),
    "a10": (24, 600),
    "a10g": (24, 600),
    "l4": (24, 300),
    "l40s": (48, 864),
    "a6000": (48, 768),
    "a100-40gb": (40, 1555),
    "a100": (80, 2039),
    "h100": (80, 3350),
    "h100-pcie": (80, 2000),
    "h100-nvl": (94, 3900),
    "h200": (141, 4800),
    "b200": (180, 8000),
    "rtx3090": (24, 936),
    "rtx4090": (24, 1008),
    "rtx5090": (32, 1792),
    "rtx-pro-6000": (96, 1792),
    "mi250x": (128, 3277),
    "mi300x": (192, 5300),
    "mi325x": (256, 6000),
    "m2-ultra": (192, 800),
    "m3-ultra": (512, 819),
    "m4-max": (128, 546),
}
CHIPS = {name: Chip(name, gigabytes * 2**30, rate * 1e9) for name, (gigabytes, rate) in _PUBLISHED.items()}

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def chip(name: str) -> Chip:
    """A chip by name, however it is spelled (`H100`, `RTX 4090`). Raises ConfigError with the accepted names."""
    wanted = re.sub(r"[ _]", "-", name.strip().lower())
    found = next((CHIPS[key] for key in CHIPS if key.replace("-", "") == wanted.replace("-", "")), None)
    if found is None:
        raise ConfigError(
            f"--gpu {name!r} is not in the table.{suggest(wanted, CHIPS)} Accepted: {', '.join(CHIPS)}; "
            "or give --memory 80GB and --bandwidth 3350GB"
        )
    return found


def amount(text: str, what: str) -> int:
    """`80GB` (10**9), `80GiB` or `80G` (2**30), `85899345920` -> bytes. Raises ConfigError naming `what`."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([a-z]*)(?:/s)?", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise ConfigError(f"{what} {text!r}: accepted are amounts such as 80GB (10**9 bytes), 80GiB (2**30) or 512MB")
    return int(float(match[1]) * _UNITS[match[2]])


def readable(count: float) -> str:
    """Bytes for people, in units of 1024: `85.3 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
