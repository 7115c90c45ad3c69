"""Retrieval, generation, speed and memory on a tiny model: tables, records, resuming, what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from hf_kvcache import cli
from hf_kvcache.evals import candidates, generation, memory, retrieval, suite
from hf_kvcache.evals.errors import EvalError
from hf_kvcache.evals.protocol import Reader

PAGES, COARSE = "paged_exact:impl=torch", "paged_int2:residual_length=0,impl=torch"  # nothing has to be compiled
CACHES = ["dynamic", "static", PAGES, COARSE]
SMALL = {
    "retrieval": ["--lengths", "96", "--depths", "0", "0.5", "--trials", "2"],
    "generation": ["--prompts", "2", "--prompt", "100", "--tokens", "24"],
    "speed": ["--contexts", "8", "70", "--tokens", "4", "--repeat", "1"],
    "memory": ["--contexts", "128", "--batch", "2", "--tokens", "2"],
}


@pytest.fixture
def measured(folder, tmp_path, capsys):
    """Run a command; its records and what it printed."""
    out = tmp_path / "results.jsonl"

    def run(what: str, *more: str) -> tuple[list[dict], str]:
        text = ["--text-file", str(folder / "text.txt")] if what == "generation" else []
        arguments = [str(folder), *SMALL[what], *text, "--caches", *CACHES, "--out", str(out), *more]
        assert cli.main(["eval", what, *arguments]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out

    return run


def by_cache(records: list[dict]) -> dict[str, dict]:
    return {r["cache"]["text"]: r for r in records}


@pytest.fixture
def words(monkeypatch):
    """Sentences in the tiny tokenizer's words; the key itself is unknown to it."""
    monkeypatch.setattr(retrieval, "FILLER", " ".join(f"w{i}" for i in range(2, 62)))
    monkeypatch.setattr(retrieval, "NEEDLE", "w9 {key} w8 w8 ")
    monkeypatch.setattr(retrieval, "QUESTION", " w8 w9")
    monkeypatch.setattr(retrieval, "ANSWER", " w5 w6 {key} w7")


@pytest.mark.usefixtures("words")
def test_retrieval(measured):
    records, shown = measured("retrieval")
    assert len(records) == 2 * len(CACHES)
    assert " of 2" in shown
    rows = by_cache(records)
    for exact in ("static", PAGES):
        assert rows[exact]["nats"] == pytest.approx(rows["dynamic"]["nats"], abs=1e-4)
    assert abs(rows[COARSE]["nats"] - rows["dynamic"]["nats"]) > 1e-3
    assert rows["dynamic"]["protocol"] == {"length": 96, "depth": 0.5, "trials": 2, "seed": 0}
    again, shown = measured("retrieval")
    assert again == records
    assert "8 of 8 cells come from" in shown


def test_a_key_lies_at_its_depth_in_a_prompt_of_the_length(folder):
    session = suite.load(SimpleNamespace(place=str(folder), model="", dtype="float32", device="cpu", threads=None, seed=3))
    start, answer = retrieval.example(session, 80, 0.0, 0)
    end, same = retrieval.example(session, 80, 1.0, 0)
    assert (len(start), len(end), same) == (80, 80, answer)
    assert retrieval.example(session, 80, 0.0, 0) == (start, answer)
    with pytest.raises(EvalError, match="--lengths holds 8, and key and question alone take"):
        retrieval.example(session, 8, 0.5, 0)
    wanted = session.tokenizer(retrieval.NEEDLE.format(key="1"), add_special_tokens=False)["input_ids"]
    assert start[: len(wanted)] == wanted


def test_generation(measured, tiny):
    records, shown = measured("generation")
    rows = by_cache(records)
    assert [r["cache"]["text"] for r in records] == CACHES
    assert rows[PAGES]["tokens"] == rows["static"]["tokens"] == rows["dynamic"]["tokens"]
    assert rows[COARSE]["tokens"] != rows["dynamic"]["tokens"]
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.startswith(tuple(CACHES))}
    assert lines[PAGES][:2] == ["100.0", "24.0"]
    assert float(lines[COARSE][0]) < 100
    again, _ = measured("generation", "--caches", "paged_int8:impl=torch")
    assert [r["cache"]["text"] for r in again] == [*CACHES, "paged_int8:impl=torch"]


def test_greedy_is_what_generate_does(tiny, written):
    prompt = torch.tensor([written[:20]])
    wanted = tiny.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 20:]
    spec = candidates.parse(PAGES)
    found = generation.greedy(Reader(tiny), prompt, candidates.builder(spec, tiny.config)(), 12)
    assert found[0].tolist() == wanted.tolist()


def test_repetition_and_divergence():
    assert generation.repetition(list(range(40))) == 0
    assert generation.repetition([1, 2] * 10) == pytest.approx(1 - 2 / 17)
    assert generation.repetition([1]) == 0
    assert generation.divergence([1, 2, 3], [1, 2, 4]) == 2
    assert generation.divergence([1, 2], [1, 2]) == 2


def test_speed(measured):
    records, shown = measured("speed")
    assert len(records) == 2 * len(CACHES)
    for record in records:
        assert record["decode_tokens_per_second"] == pytest.approx(1000 / record["step_ms"])
        assert record["prefill_tokens_per_second"] > 0
        assert record["step_ms_p90"] >= record["step_ms"] * 0.5
    assert "prefill tokens/s" in shown


def test_memory_is_as_planned(measured):
    records, _ = measured("memory")
    rows = by_cache(records)
    exact = 2 * 2 * 128 * 2 * (16 + 16) * 4  # layers, rows, tokens, heads, numbers, bytes
    assert rows["dynamic"]["bytes"] == rows["dynamic"]["planned_bytes"] == exact
    assert 0 <= rows["static"]["bytes"] - exact * 130 // 128 < 64  # two tokens more, and a counter in each layer
    assert rows["static"]["planned_bytes"] is None
    for name in CACHES[2:]:
        held = {**rows[name]["bytes_by_kind"], "tables": 0}
        assert sum(held.values()) == rows[name]["planned_bytes"]
    assert rows[COARSE]["bytes"] < exact * 0.7  # a page of two is sealed
    peaks = [(r["peak_bytes"], r["resident_bytes"]) for r in records]
    assert all(peak is None or peak >= max(0, after) for peak, after in peaks)


def test_a_meter_sees_what_is_taken():
    if not memory.STATUS.exists():
        pytest.skip("memory of a process is read from /proc")
    meter = memory.Meter(torch.device("cpu"))
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert meter.read()[1] > 60 * 2**20
    del block
    peak, after = meter.read()
    assert peak > 60 * 2**20 > after


@pytest.mark.parametrize(
    ("what", "more", "words"),
    [
        ("retrieval", ["--depths", "2"], "--depths holds 2.0: accepted are 0 (the start) to 1 (the end)"),
        ("retrieval", ["--lengths", "0"], "--lengths is 0, and has to be at least 1"),
        ("generation", ["--tokens", "0"], "--tokens is 0"),
        ("generation", ["--text-file", "none-such.txt"], "cannot be read"),
        ("speed", ["--caches", "paged_fp9"], "paged_fp8"),
        ("speed", ["--threads", "0"], "--threads is 0"),
        ("memory", ["--contexts", "64", "0"], "--contexts is 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(what, more, words, folder, capsys):
    assert cli.main(["eval", what, str(folder), *more]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_file_of_something_else_is_refused(folder, tmp_path, capsys):
    out = tmp_path / "notes.txt"
    out.write_text("not JSON\n")
    assert cli.main(["eval", "speed", str(folder), *SMALL["speed"], "--caches", "dynamic", "--out", str(out)]) == 2
    assert "not a file of records" in capsys.readouterr().err
    assert out.read_text() == "not JSON\n"


def test_static_needs_a_size(tiny):
    with pytest.raises(EvalError, match="static:max_cache_len=2048"):
        candidates.builder(candidates.parse("static"), tiny.config)
