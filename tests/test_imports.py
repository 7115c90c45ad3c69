"""Importing is light and works in any order; each case in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = """
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
"""
MODEL = """
import torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, eos_token_id=None, pad_token_id=0))
"""
GENERATE = """
ids = torch.arange(2, 12).view(1, -1)
asked = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
out = model.generate(ids, cache_implementation="paged_fp8", **asked)
cache = out["cache"] if "cache" in out else out["past_key_values"]
assert type(cache).__name__ == "PagedCache", type(cache)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    heavy = ("torch", "transformers", "triton", "numba", "numpy")
    assert run(f"import hf_kvcache, sys; print([name for name in {heavy} if name in sys.modules])") == "[]"


def test_names_and_formats_need_no_torch() -> None:
    code = BLOCK.format(blocked=("torch", "transformers", "numpy"))
    code += "import hf_kvcache; print(*hf_kvcache.cache_names(), *hf_kvcache.FORMATS, hf_kvcache.__version__)"
    assert {"paged_fp8", "fp8"} <= set(run(code).split())


def test_every_public_name_is_there() -> None:
    run("import hf_kvcache\nfor name in hf_kvcache.__all__: getattr(hf_kvcache, name)")


def test_a_wrong_attribute_is_an_attribute_error() -> None:
    assert run("import hf_kvcache; print(hasattr(hf_kvcache, 'nothing'))") == "False"


ORDERS = {
    "ours": "import hf_kvcache\n" + MODEL,
    "theirs": MODEL + "import hf_kvcache\n",
    "by hand": "import hf_kvcache\nimport transformers\nhf_kvcache.register()\n" + MODEL,
    "public names": "from hf_kvcache import attach, detach, make_cache, PagedCache\n" + MODEL,
    "theirs lazily": "import transformers\nimport hf_kvcache\n" + MODEL,
    "theirs half": "import transformers.generation\nimport hf_kvcache\n" + MODEL,
    "our caches": "import hf_kvcache.caches\n" + MODEL,
    "attaching": "from hf_kvcache.integration.attaching import attach\n" + MODEL,
}


@pytest.mark.parametrize(
    "order", [name if i < 4 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(ORDERS)]
)
def test_either_may_be_imported_first(order: str) -> None:
    run(ORDERS[order] + GENERATE)


@pytest.mark.parametrize("blocked", [("triton",), ("triton", "numba")], ids=" ".join)
def test_optional_packages_may_be_missing(blocked: tuple[str, ...]) -> None:
    report = f"""
import hf_kvcache
report = hf_kvcache.impl_report()
assert report["torch"] == report["reference"] == "available"
assert all(report[name] != "available" for name in {blocked!r}), report
"""
    run(BLOCK.format(blocked=blocked) + "import hf_kvcache\n" + MODEL + GENERATE + report)


def test_unregister_before_transformers_is_imported_leaves_it_alone() -> None:
    code = """
import hf_kvcache
hf_kvcache.unregister()
import transformers.generation.configuration_utils as names
assert "paged_fp8" not in names.ALL_CACHE_IMPLEMENTATIONS
import sys
assert not [finder for finder in sys.meta_path if "hf_kvcache" in type(finder).__module__]
"""
    run(code)


def test_our_finder_is_gone_once_transformers_is_there() -> None:
    code = (
        MODEL
        + GENERATE
        + """
import sys
assert not [finder for finder in sys.meta_path if "hf_kvcache" in type(finder).__module__]
import transformers.generation.utils as utils
assert "hf_kvcache" not in type(utils.__loader__).__module__
assert "hf_kvcache" not in type(utils.__spec__.loader).__module__
"""
    )
    run("import hf_kvcache\n" + code)


def test_a_failed_import_of_transformers_is_theirs() -> None:
    code = (
        BLOCK.format(blocked=("transformers",))
        + """
import hf_kvcache
try:
    hf_kvcache.make_cache
except ModuleNotFoundError as error:
    print(str(error.name).split(".")[0])
"""
    )
    assert run(code) == "transformers"
