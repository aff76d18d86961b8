"""The benchmarks of whole models: what is timed and what is written, not how fast it is."""

import csv

import pytest
import torch

from ssmzoo.analysis import bench


def test_families_and_peers_are_timed_on_the_same_passes_and_compared(tmp_path, monkeypatch):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 1000}

    def peer():
        import transformers

        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, intermediate_size=16, num_attention_heads=2)
        )

    monkeypatch.setattr(bench, "_peers", lambda: {"peer": bench.Peer(peer)})
    for name, value in {"HIDDEN": 16, "LAYERS": 1, "STATE": 2, "BATCH": 2, "DECODED": 8}.items():
        monkeypatch.setattr(bench, name, value)
    lines = []
    rows = bench.bench(
        ["longhorn"], lengths=(32,), output=tmp_path / "cpu.csv", report=lines.append
    )
    assert [(row["variant"], row["pass"]) for row in rows] == [
        ("longhorn", "decode after 100"),
        ("longhorn", "decode after 20000"),
        ("longhorn", "train L=32"),
        ("peer", "decode after 100"),
        ("peer", "train L=32"),
    ]
    for row in rows:
        tokens = 2 * 32 if row["pass"].startswith("train") else 2
        assert row["tokens_per_second"] == pytest.approx(
            tokens / row["milliseconds"] * 1000, rel=0.01
        )
    ratio = rows[2]["tokens_per_second"] / rows[4]["tokens_per_second"]
    assert f"longhorn / peer, train L=32: {ratio:.2f} times" in lines
    assert any(line.startswith("longhorn, decoding after 20,000 tokens") for line in lines)
    written = list(csv.DictReader((tmp_path / "cpu.csv").read_text().splitlines()))
    assert [line["pass"] for line in written] == [row["pass"] for row in rows]
    assert {line["torch"] for line in written} == {torch.__version__}


def test_an_unknown_family_is_refused_before_anything_is_timed():
    with pytest.raises(LookupError, match="did you mean 'longhorn'"):
        bench.bench(["longhron"], report=lambda _: pytest.fail("timed"))


def test_the_peak_of_a_matrix_product_is_its_operations_over_its_time(monkeypatch):
    calls = []

    def time_call(call, device):
        calls.append(call().shape)
        return 0.5

    monkeypatch.setattr(bench, "time_call", time_call)
    assert bench.matmul_peak(torch.device("cpu"), size=100) == pytest.approx(2 * 100**3 / 0.5 / 1e9)
    assert calls == [(100, 100)]


def test_a_call_is_warmed_up_once_and_its_median_time_is_taken(monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    calls = []
    assert bench.time_call(lambda: calls.append(1), torch.device("cpu"), repeats=3) == 2.0
    assert len(calls) == 4


def test_several_runs_take_turns_over_the_models_and_give_median_least_and_most(
    tmp_path, monkeypatch
):
    calls = []

    def seconds(model, size, device, **options):
        calls.append((model.name, size))
        return {"a": (1.0, 4.0, 2.0), "b": (8.0, 8.0, 8.0)}[model.name][calls.count(calls[-1]) - 1]

    class Model:
        def __init__(self, name):
            self.name = name

        def to(self, device):
            return self

    peer = bench.Peer(lambda: Model("b"), decode=False)
    monkeypatch.setattr(bench, "_peers", lambda: {"b": peer})
    monkeypatch.setattr(bench, "_family", lambda name: lambda: Model(name))
    monkeypatch.setattr(bench, "_train_seconds", seconds)
    monkeypatch.setattr(bench, "_decode_seconds", seconds)
    rows = bench.bench(
        ["a"], lengths=(32,), runs=3, output=tmp_path / "x.csv", report=lambda _: None
    )
    assert calls == [("a", 100), ("a", 20_000)] * 3 + [("a", 32), ("b", 32)] * 3
    row = next(row for row in rows if row["pass"] == "train L=32")
    tokens = bench.BATCH * 32
    assert (row["variant"], row["runs"], row["milliseconds"]) == ("a", 3, 2000.0)
    assert (row["tokens_per_second"], row["slowest"], row["fastest"]) == (
        tokens // 2, tokens // 4, tokens,
    )  # fmt: skip
    (written, *_) = csv.DictReader((tmp_path / "x.csv").read_text().splitlines())
    assert {"commit", "dirty", "cpu_vectors", "kernel_vectors", "omp_num_threads"} <= set(written)
    with pytest.raises(ValueError, match="runs must be at least 1, got 0"):
        bench.bench(["longhorn"], runs=0)
