"""Distillation: long filters become filters of small order, and the model stays itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ssmzoo.auto  # noqa: F401
from ssmzoo.checkpoints.load import holds_tokenizer
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.distillation.distill import REPORT, distill
from ssmzoo.distillation.fit import ModalFit, fit_modal, fit_rational
from ssmzoo.modeling import add_state_adapter
from ssmzoo_rtf import RTFConfig, RTFForCausalLM

TINY = {"vocab_size": 31, "hidden_size": 6, "num_hidden_layers": 2, "d_conv": 3}


def hyena(taps=96, **fields):
    torch.manual_seed(0)
    return RTFForCausalLM(RTFConfig(**TINY, filter="implicit", trunc_len=taps, **fields)).eval()


def oscillations(channels=5, pairs=3, taps=200, seed=0, slowest=0.95):
    """Filters that 2 ``pairs`` real states make exactly."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(0.6, slowest, (channels, pairs))
    poles = size * np.exp(1j * rng.uniform(0.2, 3.0, (channels, pairs)))
    weights = rng.normal(size=(channels, pairs)) + 1j * rng.normal(size=(channels, pairs))
    h = np.einsum("dp,dpt->dt", weights, poles[..., None] ** np.arange(taps)).real
    return torch.from_numpy(h)


def response(found, count):
    """Step the recurrence on an impulse, or add up powers."""
    if isinstance(found, ModalFit):
        powers = found.poles.to(torch.complex128)[..., None] ** torch.arange(count)
        return (found.residues[..., None] * powers).sum(1).real
    a, b = found.a.double(), found.b.double()
    state, out = torch.zeros_like(b), []
    for t in range(count + 1):
        out.append((b * state).sum(1))
        newest = float(t == 0) - (a * state).sum(1)
        state = torch.cat([newest[:, None], state[:, :-1]], dim=1)
    return torch.stack(out[1:], dim=1)


@pytest.mark.parametrize("fit", [fit_rational, fit_modal])
@pytest.mark.parametrize("order", [6, 10])
def test_an_order_that_is_enough_gives_the_filters_back(fit, order):
    taps = oscillations()
    found = fit(taps, order, steps=0)
    # float32 coefficients of poles this far apart move the response by no more
    assert found.error.max() <= 1e-5
    assert torch.allclose(response(found, 200), taps, atol=1e-4)


@pytest.mark.parametrize("fit", [fit_rational, fit_modal])
def test_the_reported_error_is_the_error_of_the_response(fit):
    taps = oscillations(pairs=6)
    found = fit(taps, 4, steps=20)
    got = response(found, 200)
    expected = (got - taps).norm(dim=1) / taps.norm(dim=1)
    assert torch.allclose(found.error, expected, rtol=1e-6)
    assert found.error.min() > 1e-3  # 4 states cannot make what 12 made
    assert found.error.max() < 1


@pytest.mark.parametrize("fit", [fit_rational, fit_modal])
def test_descent_and_a_higher_order_lower_the_error(fit):
    taps = oscillations(pairs=6)
    first, better = fit(taps, 4, steps=0), fit(taps, 4, steps=25)
    assert (better.error <= first.error).all()
    assert better.error.mean() < first.error.mean()
    assert fit(taps, 8, steps=0).error.mean() < first.error.mean()


@pytest.mark.parametrize("fit", [fit_rational, fit_modal])
def test_fitted_filters_are_stable_even_where_the_given_ones_grow(fit):
    growing = 1.02 ** torch.arange(150, dtype=torch.float64) * oscillations(taps=150)
    found = fit(growing, 6, steps=10)
    if isinstance(found, ModalFit):
        assert (found.poles.abs() < 1).all()
    else:
        for row in found.a.double().numpy():
            assert np.abs(np.roots([1, *row])).max() < 1


@pytest.mark.parametrize("fit", [fit_rational, fit_modal])
def test_a_zero_filter_is_distilled_to_zero(fit):
    taps = oscillations()
    taps[2] = 0
    found = fit(taps, 6, steps=5)
    assert found.error[2] == 0
    assert not response(found, 50)[2].any()


def test_bad_taps_and_orders_are_refused():
    taps = oscillations(taps=20)
    with pytest.raises(ValueError, match=r"order must be between 1 and .* 20 taps, got 11"):
        fit_rational(taps, 11)
    with pytest.raises(ValueError, match="order must be even"):
        fit_modal(taps, 5)
    taps[3, 4] = torch.nan
    with pytest.raises(ValueError, match="channel 3 must have finite taps"):
        fit_rational(taps, 4)


@pytest.mark.parametrize("kind", ["rational", "modal"])
def test_distilled_models_with_filters_of_enough_order_give_the_same_logits(kind, tmp_path):
    torch.manual_seed(0)
    fields = {"d_state": 4, "denominator_constraint": "none", "coefficient_init": "zeros"}
    teacher = RTFForCausalLM(RTFConfig(**TINY, **fields)).eval()
    with torch.no_grad():  # order 4, poles well apart
        for mixer in (layer.mixer for layer in teacher.model.layers):
            for row, (x, y) in enumerate(
                zip((0.5, 0.7, 0.8) * 2, (1.0, 1.5, 2.0) * 2, strict=True)
            ):
                pairs = np.array([x * np.exp(1j * y), 0.6 * np.exp(2.6j)])
                mixer.a[row] = torch.from_numpy(np.poly([*pairs, *pairs.conj()]).real[1:])
            mixer.b.normal_()
    student, report = distill(teacher, 4, kind, tmp_path / "out", steps=0, length=120)
    assert student.config.filter == kind
    assert report.worst <= 1e-5
    ids = torch.randint(31, (2, 40))
    with torch.no_grad():
        expected = teacher(ids).logits
        assert torch.allclose(student(ids).logits, expected, atol=1e-5)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.equal(loaded(ids).logits, student(ids).logits)


def test_a_hyena_becomes_a_checkpoint_that_decodes_by_recurrence(tmp_path):
    teacher = hyena()
    teacher.generation_config.max_length = 77
    teacher.save_pretrained(tmp_path / "hyena")
    student, report = distill(tmp_path / "hyena", 24, output_dir=tmp_path / "rtf", steps=20)
    assert student.config.filter == "rational"
    assert student.config.d_state == 24
    assert len(report.errors) == 2
    assert len(report.errors[0]) == 6
    written = json.loads((tmp_path / "rtf" / REPORT).read_text())
    assert written["errors"] == [list(layer) for layer in report.errors]
    assert len(report.table().splitlines()) == 3
    for layer, errors in zip(
        zip(teacher.model.layers, student.model.layers, strict=True), report.errors, strict=True
    ):
        given, fitted = (each.mixer.kernel(96).double().detach() for each in layer)
        gains = [each.mixer.gain().double().detach() for each in layer]
        fitted[:, 0] += gains[1] - gains[0]
        own = (fitted - given).norm(dim=1) / given.norm(dim=1)
        assert torch.allclose(own, torch.tensor(errors, dtype=torch.float64), rtol=1e-3, atol=1e-6)
    ids = torch.randint(31, (1, 20))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "rtf")
    assert loaded.generation_config.max_length == 77
    with torch.no_grad():
        out = loaded(ids[:, :12], use_cache=True)
        assert out.cache.layers[0].states["ring"].shape == (1, 25, 6)
        rest = loaded(ids[:, 12:], cache=out.cache).logits
        assert torch.allclose(rest, student(ids).logits[:, 12:], atol=1e-5)


def test_a_higher_order_is_nearer_to_the_hyena():
    teacher = hyena(taps=64)
    (far, worse), (near, better) = (distill(teacher, order, steps=0) for order in (2, 24))
    assert worse.mean > better.mean
    ids = torch.randint(31, (2, 60))
    with torch.no_grad():
        expected = teacher(ids, use_cache=False).logits
        distances = [(student(ids).logits - expected).norm() for student in (near, far)]
    assert distances[0] < distances[1]


def test_modes_too_close_for_coefficients_are_written_as_modes(monkeypatch):
    teacher = hyena(taps=400)
    steps = torch.arange(400, dtype=torch.float64)
    # slow poles, side by side, as S4 has them
    rates = torch.arange(1, 13, dtype=torch.float64)[:, None]
    slow = torch.exp(-0.01 * steps) * (torch.cos(0.02 * torch.pi * rates * steps) / rates).sum(0)
    with monkeypatch.context() as patch:
        taps = slow.repeat(6, 1).float()
        patch.setattr(type(teacher.model.layers[0].mixer), "kernel", lambda self, n: taps[:, :n])
        modal = fit_modal(taps[:, 1:], 24, steps=0)
        rational = fit_rational(taps[:, 1:], 24, steps=0)
        student, _ = distill(teacher, 24, "modal", steps=0)
    assert modal.error.max() < 1e-5
    assert rational.error.min() > 0.1
    for layer in student.model.layers:
        got = layer.mixer.kernel(400).detach()
        assert (got[:, 1:] - taps[:, 1:]).norm() <= 1e-4 * taps[:, 1:].norm()


@pytest.mark.parametrize("order", [2, 30])
def test_modal_filters_of_any_order_distil_and_decode_in_five_forms(order, tmp_path):
    student, report = distill(hyena(taps=64), order, "modal", tmp_path / "out", steps=2)
    assert report.worst < 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    rows = [torch.randint(31, (1, length)) for length in (40, 27)]
    with torch.no_grad():
        alone = [loaded(row, use_cache=False).logits for row in rows]
        assert torch.equal(student(rows[0], use_cache=False).logits, alone[0])
        found = {}
        for name, sizes in (("chunks", [1, 20, 19]), ("tokens", [1] * 40)):
            cache, parts = None, []
            for piece in rows[0].split(sizes, dim=1):
                out = loaded(piece, cache=cache, use_cache=True)
                cache = out.cache
                parts.append(out.logits)
            found[name] = torch.cat(parts, dim=1)
        assert cache.layers[0].states["modes"].shape == (1, 6, order // 2, 2)
        ends = torch.tensor([0, 40, 67])
        packed = loaded(torch.cat(rows, dim=1), cu_seqlens=ends, use_cache=False).logits
        batch = torch.cat([rows[0], torch.nn.functional.pad(rows[1], (13, 0))])
        mask = torch.tensor([[1] * 40, [0] * 13 + [1] * 27])
        padded = loaded(batch, attention_mask=mask).logits
    found |= {"packed": packed[:, :40], "padded": padded[:1]}
    others = {"packed": packed[:, 40:], "padded": padded[1:, 13:]}
    for expected, forms in zip(alone, (found, others), strict=True):
        for name, got in forms.items():
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize("source", ["folder", "Hub", "Hub without a tokenizer"])
def test_the_new_model_keeps_the_tokenizer_if_there_is_one(source, tmp_path, monkeypatch, caplog):
    def from_hub(*_):
        if source == "Hub":
            return byte_tokenizer()
        raise LookupError("no tokenizer from the Hub")

    teacher, place = hyena(), tmp_path / "hyena"
    if source == "folder":
        teacher.save_pretrained(place)
        byte_tokenizer().save_pretrained(place)
    else:
        place = "someone/hyena"
        monkeypatch.setattr("ssmzoo.distillation.distill.load_model", lambda *_: teacher)
        monkeypatch.setattr("ssmzoo.distillation.distill.load_tokenizer", from_hub)
    distill(place, 4, output_dir=tmp_path / "rtf", steps=0)
    if source == "Hub without a tokenizer":
        assert "saved without a tokenizer: no tokenizer from the Hub" in caplog.text
        assert not holds_tokenizer(tmp_path / "rtf")
    else:
        kept = AutoTokenizer.from_pretrained(tmp_path / "rtf")
        assert kept.encode("é") == byte_tokenizer().encode("é")


@pytest.mark.parametrize(
    ("teacher", "given", "error", "message"),
    [
        ("hyena", {"order": 4, "kind": "model"}, LookupError, "no kind of filter named 'model'"),
        ("hyena", {"order": 48}, ValueError, r"order must be between 1 and .* 95 taps"),
        ("hyena", {"order": 4, "length": 0}, ValueError, "length must be .* at most 96, .* got 0"),
        ("hyena", {"order": 4, "length": 97}, ValueError, "length must be .* at most 96.* got 97"),
        ("hyena", {"order": 4.0}, TypeError, "order must be an int, got float"),
        ("rtf", {"order": 4}, ValueError, "length must be given"),
        ("rtf", {"order": 1, "length": 2}, ValueError, "length must be at least 3, got 2"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(teacher, given, error, message):
    model = hyena() if teacher == "hyena" else RTFForCausalLM(RTFConfig(**TINY))
    with pytest.raises(error, match=message):
        distill(model, **given)


def test_other_models_and_folders_of_others_are_refused(tmp_path):
    from ssmzoo_longhorn import LonghornConfig, LonghornForCausalLM

    other = LonghornForCausalLM(LonghornConfig(vocab_size=31, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(TypeError, match="distill needs a causal model with long filters"):
        distill(other, 4, output_dir=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    mine = tmp_path / "thesis" / "chapter.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    for folder in (mine.parent, mine, Path("..")):
        with pytest.raises(ValueError, match="output_dir must be a new or an empty folder"):
            distill(hyena(), 4, output_dir=folder)
    assert mine.read_text() == "mine"


def test_an_earlier_distillation_is_replaced_unless_other_files_lie_beside_it(tmp_path):
    hyena().save_pretrained(tmp_path / "hyena")
    byte_tokenizer().save_pretrained(tmp_path / "hyena")
    target = tmp_path / "rtf"
    for order in (2, 4):
        distill(tmp_path / "hyena", order, output_dir=target, steps=0)
    card = target / "README.md"
    card.write_text("mine")
    way_out = (
        "output_dir must be new, empty or of an earlier distillation: .* holds 'README.md'; name"
    )
    with pytest.raises(ValueError, match=way_out):
        distill(tmp_path / "hyena", 6, output_dir=target, steps=0)
    assert card.read_text() == "mine"
    assert json.loads((target / REPORT).read_text())["order"] == 4


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft
def test_a_model_with_adapters_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    hyena().save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["in_proj"], init_lora_weights=False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, config)
    with pytest.raises(TypeError, match=r"PeftModel; merge .* model\.merge_and_unload\(\)"):
        distill(adapted, 4, steps=0)
    adapted.save_pretrained(tmp_path / "lora")
    for given in (tmp_path / "lora", base):
        with pytest.raises(TypeError, match=r"own weights alone.*model\.merge_and_unload\(\)"):
            distill(given, 4, steps=0, output_dir=tmp_path / "small")
    started = hyena()
    started = distill(started, 4, steps=0)[0]
    add_state_adapter(started)
    with pytest.raises(TypeError, match=r"remove_state_adapter\(model\)"):
        distill(started, 2, steps=0, length=20)
    merged = adapted.merge_and_unload()
    student, _ = distill(merged, 4, steps=0)
    for name, weight in student.state_dict().items():
        if name.endswith("in_proj.weight"):
            assert torch.equal(weight, merged.state_dict()[name])
