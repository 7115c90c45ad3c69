"""The names of our attention functions, by the base implementation that plain tensors go to.

transformers tests such names for "sdpa", "flash" and "paged|", so none may contain them.
"""

from __future__ import annotations

BASES = {"sdpa": "hfkv", "eager": "hfkv_eager", "flash_attention_2": "hfkv_fa2", "flash_attention_3": "hfkv_fa3"}
OBSERVER = "hfkv_observer"  # stands in for a base while queries are watched
