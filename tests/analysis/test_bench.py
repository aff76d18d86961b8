"""Benchmarks of ops and of models: what is timed and what is written, not how fast it is."""

import ast
import csv
import importlib.util
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ssmzoo.analysis import bench
from ssmzoo.modeling import SSMConfig

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


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
    other = ["op", "cpu", "fwd", "1", "float32", "7"]
    columns = ["what", "variant", "pass", "shape", "dtype", "gflops"]
    (tmp_path / "cpu.csv").write_text(f"{','.join(columns)}\n{','.join(other)}\n")
    measured = {}
    monkeypatch.setattr(
        "ssmzoo_kernels.machine.measured_apart", lambda program: measured.setdefault(program, 1.5)
    )
    rows = bench.bench(
        ["longhorn"], lengths=(32,), memory=True, output=tmp_path, report=lines.append
    )
    assert [program.partition("print_peak(")[2] for program in measured] == [
        "'longhorn', 32)",
        "'peer', 32)",
    ]
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
            tokens / row["milliseconds"] * 1000, rel=0.01, abs=0.51
        )
    ratio = rows[2]["tokens_per_second"] / rows[4]["tokens_per_second"]
    assert f"longhorn / peer, train L=32: {ratio:.2f} times" in lines
    assert any(line.startswith("longhorn, decoding after 20,000 tokens") for line in lines)
    kept, *written = csv.DictReader((tmp_path / "cpu.csv").read_text().splitlines())
    assert [kept[name] for name in columns] == other
    assert [line["pass"] for line in written] == [row["pass"] for row in rows]
    assert [line["peak_mib"] for line in written] == ["", "", "1.5", "", "1.5"]
    assert {line["torch"] for line in written} == {version("torch")}


def test_the_peak_memory_of_a_training_step_is_printed(capsys, monkeypatch):
    for name, value in {"HIDDEN": 16, "LAYERS": 1, "STATE": 2, "BATCH": 2}.items():
        monkeypatch.setattr(bench, name, value)
    bench.print_peak("longhorn", 32)
    assert float(capsys.readouterr().out) >= 0
    with pytest.raises(LookupError, match="did you mean 'longhorn'"):
        bench.print_peak("longhron", 32)


@pytest.mark.parametrize("output", ["notes.md", "notes.csv", "absent/x.csv", "absent"])
def test_an_output_that_is_no_csv_of_rows_is_refused_before_anything_is_timed(
    output, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench, "_decode_seconds", None)
    for name in ("notes.md", "notes.csv"):
        (tmp_path / name).write_text("my notes, of today\nand more\n")
    with pytest.raises(ValueError, match=f"output must .* got '.*{output}'"):
        bench.bench(["longhorn"], peers=False, output=tmp_path / output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.csv", "notes.md"]
    assert (tmp_path / "notes.csv").read_text() == "my notes, of today\nand more\n"


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(bench, "_decode_seconds", None)
    with pytest.raises(RuntimeError, match="output '/proc' cannot be written"):
        bench.bench(["longhorn"], peers=False, output="/proc/x.csv")


class Stateless(SSMConfig):
    model_type = "stateless"


class Refusing(Stateless):
    def check(self):
        raise ValueError("hidden_size must be odd")


@pytest.fixture
def family_of(monkeypatch):
    def install(kind):
        family = SimpleNamespace(config_class=kind, config=kind, causal_lm_class=lambda c: c)
        monkeypatch.setattr("ssmzoo.family.load_family", lambda name: family)

    return install


def test_a_family_is_given_the_sizes_that_it_has(family_of):
    assert bench._family("linear_attention")().config.d_state == bench.STATE
    family_of(Stateless)
    config = bench._family("stateless")()
    assert (config.hidden_size, config.num_hidden_layers) == (bench.HIDDEN, bench.LAYERS)


def test_a_family_that_refuses_the_sizes_is_known_before_anything_is_timed(family_of, monkeypatch):
    peer = bench.Peer(lambda: pytest.fail("built"))
    monkeypatch.setattr(bench, "_peers", lambda: {"peer": peer})
    family_of(Refusing)
    with pytest.raises(ValueError, match="hidden_size"):
        bench.bench(["refusing"], report=lambda _: pytest.fail("timed"))


def test_rows_of_stock_models_that_are_not_timed_now_stay(tmp_path, monkeypatch):
    folder = KERNELS.parent / "eval" / "speed"
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location("speed_of_stock", folder / "stock.py")
    stock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    row = {"model": "mamba", "pass": "train", "milliseconds": 2}
    table = tmp_path / "stock.csv"
    stock.write_rows([{**row, "variant": name} for name in ("default", "ours")], table)
    stock.write_rows([{**row, "variant": "ours", "milliseconds": 1}], table)
    written = csv.DictReader(table.read_text().splitlines())
    assert [(line["variant"], line["milliseconds"]) for line in written] == [
        ("default", "2"),
        ("ours", "1"),
    ]


def test_an_unknown_family_is_refused_before_anything_is_timed():
    with pytest.raises(LookupError, match="did you mean 'longhorn'"):
        bench.bench(["longhron"], report=lambda _: pytest.fail("timed"))


@pytest.fixture
def ops(monkeypatch):
    """The benchmarks of ops, which are not installed; they find their neighbours."""
    monkeypatch.syspath_prepend(KERNELS / "benchmarks")
    spec = importlib.util.spec_from_file_location("run", KERNELS / "benchmarks" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_peak_of_a_matrix_product_is_its_operations_over_its_time(ops, monkeypatch):
    size = 2048
    sizes = []

    def typical_seconds(calls, device):
        sizes.append([call().shape for call in calls])
        return [0.5]

    monkeypatch.setattr(ops, "typical_seconds", typical_seconds)
    peaks = ops.Peaks(torch.device("cpu"))
    assert peaks.copy == pytest.approx(2 * 4 * 2**25 / 0.5 / 1e9)
    for _ in range(2):
        assert peaks.product("float32") == pytest.approx(2 * size**3 / 0.5 / 1e9)
    assert sizes == [[(2**25,)], [(size, size)]]


def test_an_entry_that_fails_is_told_and_the_others_are_timed(ops, monkeypatch, tmp_path, capsys):
    def time_entry(entry, device, peaks):
        if entry.op == "rms_norm":
            raise CompilerError("no layout")
        return [{"what": entry.op}]

    class CompilerError(Exception):
        pass

    class NoPeaks:
        def __init__(self, device):
            self.copy = 1.0

        def product(self, dtype):
            return 1.0

    monkeypatch.setattr(ops, "time_entry", time_entry)
    monkeypatch.setattr(ops, "tests_pass", lambda *words: True)
    monkeypatch.setattr(ops, "Peaks", NoPeaks)
    target = tmp_path / "cpu.csv"
    monkeypatch.setattr(
        ops.sys, "argv", ["run", "--only", "rms_norm", "add_rms_norm", "--output", str(target)]
    )
    assert ops.main() == 1
    assert "rms_norm 1x4096x768x1: CompilerError('no layout')" in capsys.readouterr().err
    written = csv.DictReader(target.read_text().splitlines())
    assert [line["what"] for line in written] == ["add_rms_norm"]


def test_bytes_that_must_be_moved_are_those_of_inputs_output_and_gradients(ops):
    entry = next(x for x in ops.ENTRIES if x.op == "rms_norm" and x.cpu)
    x, weight = 4096 * 768 * 4, 768 * 4
    found = ops.least_bytes(entry, torch.device("cpu"))
    assert found == {"fwd": 2 * x + weight, "fwd+bwd": 3 * (x + weight) + 2 * x}


def test_a_row_of_ops_replaces_its_earlier_one_and_leaves_those_of_models(ops, tmp_path):
    row = {"what": "fft_conv", "variant": "cpu", "pass": "fwd", "shape": "1", "dtype": "float32"}
    for what, seconds in (("model", 1), ("fft_conv", 2), ("fft_conv", 3)):
        ops.write(tmp_path / "cpu.csv", [{**row, "what": what, "milliseconds": seconds}])
    written = list(csv.DictReader((tmp_path / "cpu.csv").read_text().splitlines()))
    assert [(line["what"], line["milliseconds"]) for line in written] == [
        ("model", "1"),
        ("fft_conv", "3"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.csv"]


def test_kernels_and_their_benchmarks_import_nothing_of_models():
    files = sorted(KERNELS.rglob("*.py"))
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            assert not [name for name in names if name.split(".")[0] == "ssmzoo"], file


def test_a_call_is_warmed_up_once_and_its_median_time_is_taken(monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    calls = []
    assert bench.time_call(lambda: calls.append(1), torch.device("cpu"), repeats=3) == 2.0
    assert len(calls) == 4


def test_repeated_runs_alternate_models_and_report_median_and_range(tmp_path, monkeypatch):
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
