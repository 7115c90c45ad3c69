"""Compiled decode attention against a float64 softmax over the decoded tokens, within float32's error bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hf_kvcache.errors import ImplError
from hf_kvcache.formats.spec import FormatSpec, SideSpec
from hf_kvcache.ops import api, reference
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.view import KVView
from tests.ops.views import Shape, make_view
from tests.threads import at_once

pytest.importorskip("numba")
from hf_kvcache.ops.cpu import attend, attention, kernels, machine, plan, threads, why_not  # noqa: E402

EXACT = SideSpec("exact", 16)
INT8 = SideSpec("int", 8, rotate=True)


def low(bits: int, per: str = "token", group: int | None = None, rotate: bool = False) -> SideSpec:
    """An integer side with zero points."""
    return SideSpec("int", bits, per, group, symmetric=False, rotate=rotate)  # type: ignore[arg-type]


SIDES = {
    "exact": (EXACT, EXACT),
    "fp8": (SideSpec("fp8_e4m3", 8), SideSpec("fp8_e4m3", 8)),
    "fp8_e5m2": (SideSpec("fp8_e5m2", 8), SideSpec("fp8_e5m2", 8)),
    "int8": (INT8, INT8),
    "int8_groups": (SideSpec("int", 8, "token", 32), SideSpec("int", 8, "token", 16)),
    "int8_zero": (low(8), low(8)),
    "int4": (low(4, rotate=True), low(4, rotate=True)),
    "int4_groups": (low(4, group=32, rotate=True), low(4, group=32, rotate=True)),
    "int3": (low(3), low(3)),
    "int3_groups": (low(3, group=16), low(3, group=24)),
    "int2_groups": (low(2, group=16, rotate=True), low(2, group=16)),
    "kivi4": (low(4, "channel"), low(4)),
    "kivi2": (low(2, "channel", 16), low(2, group=32)),
    "k8v4": (INT8, low(4, group=16)),
    "exact_keys": (EXACT, low(2)),
    "channels": (low(4, "channel", 8), low(2, "channel", 8)),
}
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 200)
SHAPES = {  # shape, query heads of a KV head, query tokens, more
    "plain": (Shape(LENGTHS), 1, 1, {}),
    "draft": (Shape(LENGTHS, page=64, new=5, sinks=4, residual=40), 3, 5, {"softcap": 3.0}),
    "window": (Shape(LENGTHS, page=16, key_dim=80, value_dim=112, window=50, new=2, dtype=torch.float16), 7, 2, {}),
    "odd": (Shape((200, 0, 33), 1, key_dim=100, value_dim=36, page=32, residual=8, dtype=torch.bfloat16), 4, 16, {}),
    "wide": (Shape((65, 17), heads=3, key_dim=256, value_dim=96, page=64, dtype=torch.bfloat16), 8, 1, {"sinks": 1.0}),
}


def spec_of(name: str) -> FormatSpec:
    key, value = SIDES[name]
    return FormatSpec(name, key, value)


def make_call(view: KVView, group: int, queries: int, dtype: torch.dtype, **extra: object) -> AttendCall:
    """A call with random queries that stand in memory as a model's do, `[B, Q, HQ, D]`."""
    layout = view.layout
    query = torch.randn(view.batch, queries, layout.heads * group, layout.key_dim).to(dtype).transpose(1, 2)
    if "sinks" in extra:
        extra["sinks"] = torch.randn(layout.heads * group)
    return AttendCall(query, view, layout.key_dim**-0.5, None, **extra)  # type: ignore[arg-type]


def oracle(call: AttendCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer in float64, and how far float32 arithmetic in any order may be from it.

    With unit roundoff u: a decoded (and rotated) value is off by at most `(2 + log2 D) u` of its vector's norm, and a
    dot product adds `D u` of the sum of magnitudes; the exponential adds 8 u. A weight's relative error `e` is twice
    that of the largest score, and the output is off by at most `2 e` and `T u` of the largest value. A result in 16
    bits is rounded once more.
    """
    view, query = call.view, call.query.double()
    group = query.shape[1] // view.layout.heads
    keys, values = (x.repeat_interleave(group, 1) for x in reference.decode(view, torch.float64))
    scores = query @ keys.transpose(-1, -2) * call.scale
    u, D = 2.0**-24, view.layout.key_dim
    norms = query.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).unsqueeze(2) * call.scale
    error = norms.amax() * u * (D + 20) + scores.abs().amax() * 4 * u
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
        error = error + call.softcap * 16 * u
    scores = scores.masked_fill(~reference.visible(call), -torch.inf)
    if call.sinks is not None:
        scores = torch.cat((scores, call.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1).nan_to_num()[..., : view.columns]
    out = weights @ values
    bound = values.norm(dim=-1).amax() * (4 * error + (view.columns + 40) * u)
    if call.query.dtype != torch.float32:
        bound = bound + out.abs() * torch.finfo(call.query.dtype).eps
    return out, bound


def check(call: AttendCall) -> torch.Tensor:
    """Serve the call, and compare."""
    assert why_not(call) is None
    got = attend(call)
    want, bound = oracle(call)
    assert got.dtype == call.query.dtype
    assert got.shape == want.shape
    worst = ((got.double() - want).abs() / bound).amax()
    assert worst <= 1, f"error is {worst:.3g} times its bound"  # NaN fails too
    return got


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("name", SIDES)
def test_every_format_over_awkward_shapes(name: str, case: str) -> None:
    """Lengths around page edges, sinks, ring, exact tail, windows, odd head dims; poison wherever no token is."""
    shape, group, queries, extra = SHAPES[case]
    view = make_view(spec_of(name), shape)
    check(make_call(view, group, queries, torch.float32, **extra))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_every_pair_of_dtypes(stored: torch.dtype, dtype: torch.dtype) -> None:
    view = make_view(spec_of("exact"), Shape((70, 3), new=2, dtype=stored))
    check(make_call(view, 2, 2, dtype))


@pytest.mark.parametrize("lanes", [(4, 16), (8, 16), (8, 32)])
@pytest.mark.parametrize("name", ["exact", "fp8", "int8", "int3_groups", "kivi2"])
def test_narrower_machines(name: str, lanes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for CPUs with shorter vectors or fewer registers than this one."""

    def forget() -> None:
        for cache in (kernels.product, kernels.dots, kernels.softmax, plan.plan):
            cache.cache_clear()

    forget()
    for module in (machine, kernels, plan):
        monkeypatch.setattr(module, "vectors", lambda: machine.Vectors(*lanes))
    shape = Shape((130, 5), key_dim=72, page=32, new=2, residual=8, dtype=torch.bfloat16)
    check(make_call(make_view(spec_of(name), shape), 3, 2, torch.float32, softcap=5.0))
    monkeypatch.undo()
    forget()


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four threads, and no call too small for them."""
    monkeypatch.setattr(attention, "SERIAL_BYTES", 0)
    monkeypatch.setattr(attention, "SPLIT_PAGES", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("crowd")
@pytest.mark.parametrize("own_pool", [False, True], ids=["torch_pool", "own_pool"])
@pytest.mark.parametrize("name", ["exact", "int8", "kivi2"])
def test_splits_over_threads(name: str, own_pool: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is cut into ranges that several threads share, in torch's pool or in Python's threads."""
    if own_pool:
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    shape = Shape((0, 7, 333), heads=1, page=16, new=3, sinks=4, residual=20)
    for extra in ({}, {"sinks": 1.0}):
        call = make_call(make_view(spec_of(name), shape), 2, 3, torch.float32, **extra)
        assert attention._shares(call.view, plan.plan(call.view.layout, 2, 3, torch.float32, False))[1] > 1
        check(call)


@pytest.mark.usefixtures("crowd")
def test_a_large_batch_is_shared_without_splits() -> None:
    view = make_view(spec_of("int8"), Shape(tuple(range(1, 25)), page=16))
    assert attention._shares(view, plan.plan(view.layout, 4, 1, torch.float32, False)) == (4, 1)
    check(make_call(view, 2, 1, torch.float32))


def test_small_calls_stay_on_one_thread() -> None:
    view = make_view(spec_of("int8"), Shape((40,)))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert attention._shares(view, plan.plan(view.layout, 4, 1, torch.float32, False)) == (1, 1)
    finally:
        torch.set_num_threads(before)


def test_two_python_threads_do_not_disturb_each_other() -> None:
    views = [make_view(spec_of("int4"), Shape((300 + 7 * i,)), seed=i) for i in range(2)]
    calls = [make_call(view, 2, 1, torch.float32) for view in views]
    want = [attend(call) for call in calls]
    wrong = []

    def repeat(i: int) -> None:
        wrong.extend(j for j in range(200) if not torch.equal(attend(calls[i]), want[i]))

    at_once(repeat, 2)
    assert wrong == []


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_without_tokens_gives_zeros(sinks: bool) -> None:
    view = make_view(spec_of("int8"), Shape((0, 20)))
    got = attend(make_call(view, 2, 1, torch.float32, **({"sinks": 1.0} if sinks else {})))
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    assert got[1].abs().sum() > 0


def test_left_padding_among_the_call_own_tokens() -> None:
    """A prompt with padding: a row that starts inside the new tokens, one that is all padding."""
    view = make_view(spec_of("exact"), Shape((0, 0, 0), new=6))
    view = replace(view, starts=torch.tensor([0, 4, 9], dtype=torch.int32))
    check(make_call(view, 2, 6, torch.float32))


def test_a_ring_that_has_wrapped_around() -> None:
    """The ring's oldest token stands in its middle; its capacity is not that of the tokens that it holds."""
    view = make_view(spec_of("kivi4"), Shape((200, 230), page=32, residual=40))
    assert all(int(s) % view.ring_keys.shape[2] for s in view.sealed)
    check(make_call(view, 2, 1, torch.float32))


def test_latents_of_576_and_512() -> None:
    """The shape of DeepSeek's absorbed attention: one KV head, many query heads."""
    view = make_view(spec_of("exact"), Shape((100,), heads=1, key_dim=576, value_dim=512, dtype=torch.bfloat16))
    check(make_call(view, 16, 1, torch.bfloat16))


def test_scores_far_apart_stay_finite_and_right() -> None:
    """Weights that a float32 cannot hold beside 1 are dropped, not turned into subnormals or NaN."""
    view = make_view(spec_of("exact"), Shape((130,), spread=30.0))
    call = make_call(view, 2, 1, torch.float32)
    got, (want, _) = attend(call), oracle(call)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-2)


def test_any_strides() -> None:
    """Queries and new tokens whose last dim is not contiguous, and rings that are a part of something larger."""
    view = make_view(spec_of("kivi4"), Shape((90,), new=2, residual=8))
    call = make_call(view, 2, 2, torch.float32)
    want = attend(call)

    def scattered(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)[..., 0]

    names = ("ring_keys", "ring_values", "new_keys", "new_values")
    view = replace(view, **{name: scattered(getattr(view, name)) for name in names})
    assert torch.equal(attend(replace(call, query=scattered(call.query), view=view)), want)


def test_it_is_the_one_that_auto_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(make_view(spec_of("int8"), Shape((40,))), 2, 1, torch.float32)
    served = []
    monkeypatch.setattr(attention.threads, "run", lambda *given: served.append(given))
    api.attend(call)
    assert len(served) == 1
    assert api.impl_report()["numba"] == "available"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: replace(c, mask=torch.ones(1, 1, 1, c.view.columns, dtype=torch.bool)), "no general masks"),
        (lambda c: replace(c, query=c.query.expand(-1, -1, 17, -1)), "up to 16 query tokens, not 17"),
        (lambda c: replace(c, query=c.query.double()), "no kernels for torch.float64 queries"),
        (lambda c: _with_layout(c, transposed=True), "not transposed"),
        (lambda c: _with_layout(c, page_size=12), "multiple of 8, not 12"),
    ],
)
def test_it_says_why_not(change: object, reason: str) -> None:
    call = change(make_call(make_view(spec_of("exact"), Shape((40,))), 2, 1, torch.float32))  # type: ignore[operator]
    assert reason in (why_not(call) or "")
    with pytest.raises(ImplError, match=reason):
        api.attend(call, "numba")


def _with_layout(call: AttendCall, **changes: object) -> AttendCall:
    layout = replace(call.view.layout, **changes)  # type: ignore[arg-type]
    return replace(call, view=replace(call.view, layout=layout))
