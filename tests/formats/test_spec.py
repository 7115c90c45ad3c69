"""Formats are data: what a spec accepts, and where the bytes of a page are."""

from __future__ import annotations

import dataclasses

import pytest

from hf_kvcache.errors import ConfigError
from hf_kvcache.formats.spec import ALIGN, FORMATS, FormatSpec, PageLayout, SideSpec

SHAPES = [(1, 16, 16), (2, 64, 64), (3, 80, 96), (4, 128, 128), (2, 24, 16)]  # heads, key dim, value dim


def layouts(spec: FormatSpec) -> list[PageLayout]:
    return [
        PageLayout(spec, heads, key_dim, value_dim, page_size, "float16", 2, transposed)
        for heads, key_dim, value_dim in SHAPES
        for page_size in (16, 64)
        for transposed in (False, True)
        if all(page_size % (side.group or page_size) == 0 for side in (spec.key, spec.value) if side.per == "channel")
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_fields_never_overlap_and_start_on_a_cache_line(name: str) -> None:
    for layout in layouts(FORMATS[name]):
        end = 0
        for field in layout.fields.values():
            assert field.offset % ALIGN == 0
            assert field.offset >= end, f"{field.name} begins inside the field before it"
            assert field.nbytes > 0
            end = field.offset + field.nbytes
        assert end <= layout.page_bytes < end + ALIGN
        assert layout.page_bytes % ALIGN == 0


@pytest.mark.parametrize("name", FORMATS)
def test_code_bytes_are_what_the_bits_say(name: str) -> None:
    spec = FORMATS[name]
    for layout in layouts(spec):
        tokens = layout.heads * layout.page_size
        expected = sum(
            tokens * dim * (8 * layout.itemsize if side.kind == "exact" else side.bits) / 8
            for side, dim in ((spec.key, layout.key_dim), (spec.value, layout.value_dim))
        )
        assert layout.field_bytes("codes") == expected
        assert layout.field_bytes("codes") + layout.field_bytes("scales") == sum(
            f.nbytes for f in layout.fields.values()
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "int", "bits": 5}, "bits=5 is not an integer width"),
        ({"kind": "int", "bits": 4, "symmetric": True}, "symmetric codes need 8 bits, got 4"),
        ({"kind": "fp8_e4m3", "bits": 4}, "fp8_e4m3 has 8 bits"),
        ({"kind": "fp8_e5m2", "bits": 8, "symmetric": False}, "no zero point"),
        ({"kind": "int", "bits": 8, "per": "head"}, "per='head' is neither 'token' nor 'channel'"),
        ({"kind": "int", "bits": 8, "group": 38}, "group=38 is not a positive multiple of 8"),
        ({"kind": "int", "bits": 8, "group": 0}, "group=0 is not a positive multiple of 8"),
        ({"kind": "nf4", "bits": 4}, "kind='nf4'"),
        ({"kind": "exact", "bits": 8}, "exact .* 16 bits"),
    ],
)
def test_impossible_sides_are_refused_in_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SideSpec(**changes)  # type: ignore[arg-type]


def test_a_spec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["fp8"].page_size = 32  # type: ignore[misc]


def test_a_short_head_dim_is_one_group() -> None:
    side = SideSpec("int", 8, group=64)
    assert [side.groups(tokens=16, head_dim=d) for d in (16, 64, 80, 96, 128)] == [1, 1, 2, 2, 2]
