"""ssmzoo inspect: numbers against closed forms, pictures that show something, errors that help."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from ssmzoo.analysis.inspect import REPORT, inspect_model
from ssmzoo.analysis.measure import effective_memory, measure_layers, measured_response
from ssmzoo.analysis.pictures import draw_pictures
from ssmzoo.cli.main import main
from ssmzoo.family import load_family
from ssmzoo.modeling import Dynamics, SSMConfig, SSMMixer, SSMModel, Trajectories


class Leaky(SSMMixer):
    """``y[t] = 0.9 y[t-1] + x[t]``, written without a word about its dynamics."""

    def forward(self, hidden_states, state, packing=None):
        steps = hidden_states.shape[1]
        lags = torch.arange(steps)[:, None] - torch.arange(steps)
        taps = torch.where(lags >= 0, 0.9 ** lags.clamp(min=0).double(), 0.0)
        y = torch.einsum("tj,bjd->btd", taps.to(hidden_states.dtype), hidden_states)
        state.put("y", y[:, -1])
        return y


class LeakyModel(SSMModel):
    config_class = SSMConfig
    mixer_class = Leaky


def built(family, **fields):
    """A backbone in float64, tiny but for the fields given."""
    found = load_family(family)
    torch.manual_seed(0)
    return found.model_class(found.config(**{**found.tiny, **fields})).double().eval()


def geometric_memory(rate):
    """Of the infinite kernel ``rate^l``: the first m with 1 - rate^(2 m + 2) >= 0.95."""
    return math.ceil(math.log(0.05) / (2 * math.log(rate))) - 1


# what is measured


@pytest.mark.parametrize(("rate", "scale"), [(0.3, 1e-200), (0.9, 1.0), (0.99, 1e200)])
def test_memory_of_a_decaying_kernel_is_its_closed_form(rate, scale):
    kernel = scale * rate ** torch.arange(4096, dtype=torch.float64)[None]
    assert effective_memory(kernel) == [geometric_memory(rate)]


def test_memory_is_the_smallest_lag_that_holds_the_energy():
    kernel = torch.zeros(5, 10, dtype=torch.float64)
    kernel[0, 0] = 1  # the present alone
    kernel[1, 7] = -2  # one delayed tap
    kernel[2, 0], kernel[2, 9] = math.sqrt(0.96), 0.2  # 4 % lie further back
    kernel[3, 0], kernel[3, 9] = math.sqrt(0.94), math.sqrt(0.06)  # 6 % lie further back
    assert effective_memory(kernel) == [0, 7, 0, 9, None]
    assert effective_memory(kernel, energy=0.9) == [0, 7, 0, 0, None]


def test_memory_of_two_sides_counts_the_distance():
    past, future = torch.zeros(2, 4), torch.zeros(2, 6)
    future[0, 5] = 1  # lag -6
    past[1, 1], future[1, 1] = 1, 1  # lags 1 and -2
    assert effective_memory(past, future) == [6, 2]


@pytest.mark.parametrize("energy", [0.0, 1.1, math.nan])
def test_effective_memory_refuses_energy_outside_0_and_1(energy):
    with pytest.raises(ValueError, match="energy must be above 0 and at most 1"):
        effective_memory(torch.ones(1, 3), energy=energy)


def test_a_mixer_without_dynamics_is_measured():
    config = SSMConfig(vocab_size=17, hidden_size=5, num_hidden_layers=2)
    model = LeakyModel(config).double()
    ids = torch.randint(17, (2, 64))
    found = measure_layers(model, ids)
    taps = 0.9 ** torch.arange(64, dtype=torch.float64)
    for layer in found.layers:
        assert layer.source == "measured"
        torch.testing.assert_close(layer.kernel, taps.expand(5, -1), rtol=1e-12, atol=1e-14)
        assert layer.memory == [geometric_memory(0.9)] * 5
        assert layer.poles is layer.radius is layer.time_steps is layer.decay is None
    assert found.state_bytes == 2 * 5 * 8  # two layers, five features, float64


@pytest.mark.parametrize("bidirectional", [False, True])
def test_measured_and_known_kernels_of_a_bare_filter_agree(bidirectional):
    model = built("rtf", block="filter", mixer_rank=None, bidirectional=bidirectional, d_conv=1)
    ids = torch.randint(96, (2, 33))
    known, measured = (measure_layers(model, ids, measured=m).layers for m in (False, True))
    for layer, want, got in zip(model.layers, known, measured, strict=True):
        assert (want.source, got.source) == ("exact", "measured")
        direct = layer.mixer.gain()[: model.config.hidden_size].detach()
        past = want.kernel.clone()
        past[:, 0] += direct  # a derivative sees the direct term too
        span = got.kernel.shape[1]
        assert span == (17 if bidirectional else 33)
        torch.testing.assert_close(got.kernel, past[:, :span].abs(), rtol=1e-10, atol=1e-12)
        if bidirectional:
            ahead = want.future_kernel[:, : got.future_kernel.shape[1]].abs()
            torch.testing.assert_close(got.future_kernel, ahead, rtol=1e-10, atol=1e-12)


def test_a_response_sums_over_inputs_and_averages_over_sequences():
    class Product(torch.nn.Module):
        def forward(self, x):
            return torch.stack([x[..., 0] * x[..., 1], 3 * x[..., 0].roll(1, dims=1)], dim=-1)

    x = torch.tensor([[[1.0, 2.0], [5.0, 7.0]], [[0.0, 0.0], [3.0, 4.0]]])
    got = measured_response(Product(), x, [0, 1], 1)
    both = math.sqrt((5**2 + 7**2 + 3**2 + 4**2) / 2)
    torch.testing.assert_close(got, torch.tensor([[0.0, both], [3.0, 0.0]], dtype=torch.float64))


def test_dss_kernels_and_poles_are_the_papers_formula():
    model = built(
        "dss",
        kernel_variant="exp",
        lambda_init="skew_hippo",
        kernel_norm_length=None,
        separate_dt_re_im=False,
    )
    found = measure_layers(model, torch.randint(96, (1, 50)))
    for layer, block in zip(found.layers, model.layers, strict=True):
        weights = {name: p.detach().numpy() for name, p in block.mixer.named_parameters()}
        values = -np.exp(weights["Lambda_log_neg_re"]) + 1j * weights["Lambda_im"]
        steps = np.exp(weights["log_dt"])[:, None] * values  # [H, N]
        w = weights["W"][..., 0] + 1j * weights["W"][..., 1]  # [C, H, N]
        taps = np.exp(steps[..., None] * np.arange(50))  # [H, N, K]
        kernel = np.einsum("chn,hnk->hck", w * np.expm1(steps) / values, taps).real
        np.testing.assert_allclose(layer.kernel, kernel.reshape(-1, 50), rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(layer.poles, np.exp(steps), rtol=1e-12)
        np.testing.assert_allclose(layer.radius, np.abs(np.exp(steps)).max(1), rtol=1e-12)
        np.testing.assert_allclose(layer.time_steps, np.exp(weights["log_dt"]), rtol=1e-12)
        assert layer.outside.tolist() == [0] * 16


def test_growing_modes_are_poles_outside():
    model = built("dss")  # softmax, random eigenvalues
    found = measure_layers(model, torch.randint(96, (1, 40)))
    growing = (model.layers[0].mixer.eigenvalues().real > 0).sum()
    assert growing > 0
    assert found.layers[0].outside.tolist() == [int(growing)] * 16


def test_an_rtf_filter_of_finite_response_remembers_to_its_last_tap():
    model = built("rtf", num_hidden_layers=1, num_denominators=None, denominator_constraint="none")
    mixer = model.layers[0].mixer
    b = torch.zeros(16, 4, dtype=torch.float64)
    b[:8, 3] = 1  # lag 4 alone
    b[8:, 0] = 1  # lag 1 alone
    mixer.set_filters(torch.zeros(16, 4), b, torch.ones(16))
    found = measure_layers(model, torch.randint(96, (1, 32)))
    assert found.layers[0].memory == [4] * 8 + [1] * 8
    assert found.layers[0].radius.tolist() == [0.0] * 16


def test_rtf_margins_are_those_of_known_poles():
    model = built(
        "rtf",
        num_hidden_layers=1,
        num_denominators=2,
        denominator_constraint="none",
        d_state=3,
    )
    rows = [np.poly([0.5, -0.9, 0.1]), np.poly([1.25, 0.3, -0.2])]
    a = torch.tensor(np.array([row[1:] for row in rows]))
    mixer = model.layers[0].mixer
    mixer.set_filters(a, torch.randn(16, 3, dtype=torch.float64), torch.ones(16))
    with pytest.warns(RuntimeWarning, match="outside the unit disc"):
        found = measure_layers(model, torch.randint(96, (1, 20)))
    (layer,) = found.layers
    np.testing.assert_allclose(1 - layer.radius, [0.1, -0.25], atol=1e-12)
    assert layer.outside.tolist() == [0, 1]


def test_rtf_of_high_order_has_margins_without_poles():
    model = built("rtf", num_denominators=2, d_state=200)
    (layer,) = measure_layers(model, torch.randint(96, (1, 16)), layers=[1]).layers
    assert layer.poles is None
    assert layer.radius.shape == (2,)
    assert bool((layer.radius < 1).all())


def test_longhorn_kernel_and_decay_are_products_of_what_its_tokens_forget():
    model = built("longhorn")
    ids = torch.randint(96, (2, 19))
    found = measure_layers(model, ids, layers=[0])
    mixer = model.layers[0].mixer
    with torch.no_grad():
        h = model.layers[0].norm(model.embed_tokens(ids))
        u = mixer.conv1d(mixer.in_proj(h).chunk(2, dim=-1)[0], None, None)[0]
        dt, k, q = mixer.x_proj(u).split(mixer.splits, dim=-1)
        beta = torch.sigmoid(mixer.dt_proj(dt) + mixer.dt_bias)
        eps = beta / (1 + beta * k.square().sum(-1, keepdim=True))  # [B, L, E]
        decay = 1 - eps[..., None] * k[:, :, None].square()  # [B, L, E, N]
        since = decay.flip(1).cumprod(1)  # lags 1, 2, ...
        since = torch.cat([torch.ones_like(since[:, :1]), since[:, :-1]], dim=1).flip(1)
        taps = (q[:, -1:, None] * since * eps[..., None] * k[:, :, None]).sum(-1)  # [B, L, E]
    kernel = taps.square().mean(0).sqrt().flip(0).T
    (layer,) = found.layers
    assert layer.source == "input"
    torch.testing.assert_close(layer.kernel, kernel, rtol=1e-9, atol=1e-12)
    mean = decay.log().mean(dim=(0, 1)).exp()
    torch.testing.assert_close(layer.decay, mean, rtol=1e-10, atol=0.0)


def test_kernels_that_are_not_finite_are_refused():
    class Broken(Leaky):
        def dynamics(self, hidden_states):
            kernel = torch.ones(3, hidden_states.shape[1])
            kernel[1, 4] = math.nan
            return Dynamics(kernel=kernel)

    model = LeakyModel(SSMConfig(vocab_size=5, hidden_size=3, num_hidden_layers=1))
    model.layers[0].mixer = Broken(model.config, 0)
    with pytest.raises(ValueError, match="kernels of layer 0 must be finite, channel 1 is not"):
        measure_layers(model, torch.zeros(1, 8, dtype=torch.int64))


# what is written


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out pictures, which take longer than the rest."""
    monkeypatch.setattr("ssmzoo.analysis.inspect.draw_pictures", lambda *_, **__: [])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A classifier of bytes and its tokenizer."""
    from ssmzoo.data.tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("models") / "bytes"
    family, tokenizer = load_family("longhorn"), byte_tokenizer()
    torch.manual_seed(0)
    config = family.config(**{**family.tiny, "vocab_size": len(tokenizer)})
    family.sequence_classification_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read(folder):
    return json.loads((folder / REPORT).read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "pictures"),
    [
        ("dss", "kernels memory poles margins time_steps"),
        ("rtf", "kernels memory poles margins"),
        ("longhorn", "kernels memory decay"),
        ("rtf:rtf-delay", "kernels memory margins"),
    ],
)
def test_the_report_and_pictures_show_what_the_family_knows(model, pictures, tmp_path):
    from matplotlib.image import imread

    out = tmp_path / "deep" / "out"
    report = inspect_model(model, out, sequences=2)
    assert read(out) == report
    assert report["pictures"] == [f"{name}.png" for name in pictures.split()]
    assert {path.name for path in out.iterdir()} == {REPORT, *report["pictures"]}
    for name in report["pictures"]:
        pixels = imread(out / name)
        assert min(pixels.shape[:2]) > 300
        inner = pixels[60:-60, 60:-60, :3].reshape(-1, 3)
        assert len(np.unique(inner, axis=0)) > 10, name
    family = load_family(model.partition(":")[0])
    preset = model.partition(":")[2]
    config = family.config(preset) if preset else family.config(**family.tiny)
    assert [layer["layer"] for layer in report["layers"]] == list(range(config.num_hidden_layers))
    for layer in report["layers"]:
        assert len(layer["memory"]) == layer["channels"]
        assert all(lag is None or 0 <= lag < layer["lags"] for lag in layer["memory"])
    backbone = family.model_class(config).eval()
    values = config.input_channels is not None
    x = torch.zeros(1, 5, 1) if values else torch.zeros(1, 5, dtype=torch.int64)
    with torch.no_grad():
        cache = backbone(**{"input_values" if values else "input_ids": x}, use_cache=True)
    assert report["state_bytes"] == cache.cache.nbytes
    assert report["parameters"] == sum(p.numel() for p in backbone.parameters())


@pytest.mark.usefixtures("undrawn")
def test_a_model_without_a_state_says_why(tmp_path):
    report = inspect_model("rtf:rtf-speech-commands", tmp_path / "o", length=32, layers=[2])
    assert report["state_bytes"] is None
    assert "bidirectional" in report["state_note"]
    assert report["input"]["kind"] == "random values"
    (layer,) = report["layers"]
    assert layer["layer"] == 2
    assert layer["future_lags"] == 32


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("h3", {"attn_layer_idx": [1]}),
        ("bmojo", {"mixer_types": ["mamba", "attention"], "num_hidden_layers": 2}),
    ],
)
def test_a_state_that_grows_has_no_size(family, fields):
    model = built(family, **fields)
    found = measure_layers(model, torch.zeros(1, 40, dtype=torch.int64), layers=[0])
    assert found.state_bytes is None
    assert found.state_note == "grows by every token in 1 of 2 layers"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.long
def test_without_a_length_the_model_decides(tmp_path):
    assert inspect_model("dss", tmp_path / "a")["input"]["length"] == 128
    assert inspect_model("dss", tmp_path / "b", length=77)["input"]["length"] == 77


@pytest.mark.usefixtures("undrawn")
@pytest.mark.long
def test_the_same_seed_gives_the_same_report(tmp_path):
    one, two, other = (
        inspect_model("longhorn", tmp_path / str(i), length=40, seed=seed)
        for i, seed in enumerate((3, 3, 4))
    )
    assert one == two
    assert one["layers"] != other["layers"]


@pytest.mark.usefixtures("undrawn")
def test_a_checkpoint_is_inspected_on_a_text(saved, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("seven plus seven is fourteen. " * 10, encoding="utf-8")
    report = inspect_model(saved, tmp_path / "o", text=text, length=100)
    assert report["model"] == "bytes"
    assert not report["untrained"]
    assert report["input"] == {"kind": "text", "length": 100, "sequences": 3, "seed": 0}
    other = inspect_model(saved, tmp_path / "p", length=100, sequences=3)
    assert other["layers"][0]["decay"] != report["layers"][0]["decay"]


def test_an_earlier_inspection_is_replaced_whole(tmp_path):
    out = tmp_path / "o"
    inspect_model("dss", out, length=16)
    inspect_model("longhorn", out, length=16)
    assert {path.name for path in out.iterdir()} == {REPORT, *read(out)["pictures"]}


def test_nothing_is_half_written(tmp_path, monkeypatch):
    import ssmzoo.analysis.inspect as entry

    out = tmp_path / "o"
    inspect_model("longhorn", out, length=16)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(found, folder, *, title):
        (folder / "kernels.png").write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(entry, "draw_pictures", fail)
    for target in (out, tmp_path / "new"):
        with pytest.raises(RuntimeError, match="cannot be written: no space left"):
            inspect_model("longhorn", target, length=16, seed=1)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_matplotlib_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"pip install 'ssmzoo\[inspect\]'"):
        inspect_model("longhorn", tmp_path / "o")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("undrawn")
def test_inspect_reads_the_given_tokens(tmp_path):
    rows = [[5, 6, 7, 8], [8, 7, 6, 5]]
    report = inspect_model("longhorn", tmp_path / "a", ids=rows)
    assert report["input"] == {"kind": "given tokens", "length": 4, "sequences": 2, "seed": 0}
    model = built("longhorn").float()
    found = measure_layers(model, torch.tensor(rows))
    want = [layer.decay.amax(dim=1).tolist() for layer in found.layers]
    assert [layer["decay"]["slowest"] for layer in report["layers"]] == want


class Wanderer(LeakyModel):
    def trajectories(self, input_ids):
        turns = torch.arange(input_ids.shape[1] + 1) * 0.3
        circle = torch.stack([turns.cos(), turns.sin()], dim=1)
        return Trajectories(input_ids, circle.expand(len(input_ids), -1, -1), 2 * torch.eye(2))


@pytest.mark.long
def test_a_models_trajectories_are_drawn_few_and_short(tmp_path):
    from matplotlib.image import imread

    model = Wanderer(SSMConfig(vocab_size=17, hidden_size=5, num_hidden_layers=1)).double()
    found = measure_layers(model, torch.randint(17, (11, 40)))
    assert found.trajectories.tokens.shape == (8, 32)
    assert draw_pictures(found, tmp_path, title="x")[-1] == "trajectories.png"
    inner = imread(tmp_path / "trajectories.png")[60:-60, 60:-60, :3].reshape(-1, 3)
    assert len(np.unique(inner, axis=0)) > 10


def test_states_that_never_fade_are_drawn_at_the_end_of_the_axis(tmp_path):
    model = LeakyModel(SSMConfig(vocab_size=17, hidden_size=5, num_hidden_layers=1)).double()
    found = measure_layers(model, torch.randint(17, (1, 8)))
    decay = torch.tensor([[0.5, 1.0, 1.5]], dtype=torch.float64)
    layers = [replace(found.layers[0], decay=decay)]
    assert "decay.png" in draw_pictures(replace(found, layers=layers), tmp_path, title="x")


# what goes wrong


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("longhron", "did you mean 'longhorn'?"),
        ("longhron:x", "no family named 'longhron'; did you mean 'longhorn'?"),
        ("longhorn:longhorn-1.3", "no preset 'longhorn-1.3'; did you mean 'longhorn-1.3b'?"),
        ("./nothing", "a checkpoint folder or a Hub id; no folder './nothing'"),
        ("longhorn --layers 2", "layers must be in [0, 1], got 2"),
        ("longhorn --layers two", "whole numbers with commas between, got 'two'"),
        ("longhorn --length 0", "length must be at least 1, got 0"),
        ("longhorn --sequences 0", "sequences must be at least 1, got 0"),
        ("longhorn --seed -1", "seed must be from 0"),
        ("longhorn --device abacus", "device must be one that torch can use here"),
        ("longhorn --text nowhere.txt", "text: 'nowhere.txt' does not exist"),
        ("dss --length 500", "kernel_norm_length must cover all tokens, 500"),
        ("rtf:rtf-delay --text README.md", "text must be left out: this model takes values"),
        (
            "longhorn --ids 1,2 3",
            "ids must be rows of one length of at least 1, got lengths",
        ),
        ("longhorn --ids 1,2 3,96", "ids must be in [0, 95], got 96"),
        ("longhorn --ids 1,-2", "ids must be in [0, 95], got -2"),
        ("longhorn --ids 1,2 --length 3", "ids must be given without text and length"),
        ("rtf:rtf-delay --ids 1,2", "ids must be left out: this model takes values"),
    ],
)
def test_mistakes_print_one_line(arguments, answer, tmp_path, capsys):
    model, *rest = arguments.split()
    assert main(["inspect", model, "--output", str(tmp_path / "o"), *rest]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert answer in err
    assert list(tmp_path.iterdir()) == []


def test_inspect_does_not_overwrite_foreign_folders(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    for name, answer in (
        ("file", "output_dir must be a folder"),
        ("full", "holds 'thesis.tex'; name a folder inside it"),
    ):
        with pytest.raises(ValueError, match=answer):
            inspect_model("longhorn", tmp_path / name)
    with pytest.raises(RuntimeError, match="cannot be written: Not a directory"):
        inspect_model("longhorn", tmp_path / "file" / "below")
    assert (tmp_path / "full" / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("place", [".", ""])
def test_inspect_does_not_replace_the_working_directory(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="output_dir must end in a name"):
        inspect_model("longhorn", place)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("undrawn")
def test_a_text_must_fill_a_sequence_and_fit_the_vocabulary(saved, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("short", encoding="utf-8")
    with pytest.raises(ValueError, match="at least length = 50 tokens, got 5"):
        inspect_model(saved, tmp_path / "o", text=text, length=50)
    assert inspect_model(saved, tmp_path / "o", text=text)["input"]["length"] == 5
    with pytest.raises(ValueError, match="they do not belong together"):
        inspect_model("longhorn", tmp_path / "p", text=text)


@pytest.mark.usefixtures("undrawn")
def test_the_command_prints_a_line_a_layer(tmp_path, capsys):
    arguments = ["inspect", "rtf", "--output", str(tmp_path / "o"), "--length", "32"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "layer kernel channels memory longest margin outside"
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]
    assert lines[3].startswith("state of a sequence: ")
    assert main([*arguments, "--json", "--measured", "--layers", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(x["layer"], x["kernel"]) for x in report["layers"]] == [(1, "measured")]
