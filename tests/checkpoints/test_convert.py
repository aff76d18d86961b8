"""``ssmzoo convert``: official weights become models here, and go back as they were."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedConfig,
)

import ssmzoo.auto  # noqa: F401
from ssmzoo import load_family
from ssmzoo.cli.main import main

# of each family that goes both ways: fields of its smallest model, what the official weights do not
# tell, and the same as an official configuration
SMALL = {
    "longhorn": (
        {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "d_state": 4},
        {"d_model": 16, "n_layer": 1, "vocab_size": 24},
    ),
    "rtf": (
        {
            **{"vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 1, "norm_type": "layer"},
            **{"block": "hyena", "mixer_rank": 3, "d_state": 4, "num_denominators": 4},
            **{"kernel_mode": "truncated", "trunc_len": 16, "legacy_double_h0": True},
            **{"denominator_constraint": "none", "constraint_margin": 0.0},
            "intermediate_size": 32,
        },
        {"trunc_len": 16},
    ),
    "dss": (
        {
            **{"vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 1, "norm_type": "batch"},
            **{"d_state": 4, "num_labels": 3, "kernel_variant": "softmax"},
        },
        {"kernel_variant": "softmax"},
    ),
    "linear_attention": (
        {
            **{"vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 1, "norm_type": "rms"},
            **{"intermediate_size": 12, "mlp_type": "swiglu", "rms_norm_eps": 1e-6},
            **{"num_heads": 2, "head_k_dim": 4, "head_v_dim": 4, "tie_word_embeddings": False},
        },
        {
            **{"model_type": "gated_deltanet", "vocab_size": 24, "hidden_size": 8},
            **{"num_hidden_layers": 1, "intermediate_size": 12, "norm_eps": 1e-6},
            **{"num_heads": 2, "head_dim": 4, "expand_v": 1, "use_gate": True},
            "use_short_conv": True,
        },
    ),
}


def saved(name, folder):
    """Save the smallest model of a family's converter; return its weights."""
    torch.manual_seed(0)
    family = load_family(name)
    family.converter.model_class(family.config(**SMALL[name][0])).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def run(capsys, *arguments):
    """Run the command; return its status, its output and its errors."""
    capsys.readouterr()
    return main(["convert", *map(str, arguments)]), *capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "by"),
    [*((name, "--config") for name in SMALL), ("longhorn", "--set"), ("longhorn", "beside")],
)
def test_weights_go_to_official_names_and_back_bit_for_bit(name, by, tmp_path, capsys):
    weights = saved(name, tmp_path / "model")
    theirs = tmp_path / "official" / "theirs.safetensors"
    status, out, err = run(capsys, tmp_path / "model", "--to", "official", "--output", theirs)
    assert (status, out) == (0, f"{theirs}\n"), err
    assert load_file(theirs).keys() - weights.keys()
    told, options = SMALL[name][1], []
    if by == "--set":
        options = [word for key, value in told.items() for word in ("--set", f"{key}={value}")]
    else:
        place = theirs.parent / ("config.json" if by == "beside" else "told.json")
        place.write_text(json.dumps(told))
        options = [] if by == "beside" else ["--config", place]
    target = tmp_path / "ours"
    status, out, err = run(capsys, theirs, "--to", name, "--output", target, *options)
    assert (status, out) == (0, f"{target}\n"), err
    back = load_file(target / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weights[key]) for key in weights)
    kind = load_family(name).converter.model_class
    assert AutoConfig.from_pretrained(target).architectures == [kind.__name__]
    assert isinstance(kind.from_pretrained(target), kind)


@pytest.mark.parametrize("name", SMALL)
def test_a_configuration_may_have_all_fields_of_transformers_own(name):
    """As ``config.to_dict()`` has, where a config.json leaves out what is usual."""
    family, (fields, told) = load_family(name), SMALL[name]
    converter, config = family.converter, family.config(**fields)
    theirs = converter.to_official(converter.model_class(config).state_dict(), config)
    weights, ours = converter.from_official(theirs, {**PreTrainedConfig().to_dict(), **told})
    expected, known = converter.from_official(theirs, told)
    assert ours.to_dict() == known.to_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.parametrize("tied", [False, True])
def test_a_mamba_of_transformers_becomes_a_bmojo_with_the_same_logits(tied, tmp_path, capsys):
    torch.manual_seed(0)
    fields = {"vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}
    mamba = MambaForCausalLM(MambaConfig(**fields, tie_word_embeddings=tied)).eval()
    mamba.save_pretrained(tmp_path / "mamba")
    target = tmp_path / "ours"
    status, _, err = run(capsys, tmp_path / "mamba", "--to", "bmojo", "--output", target)
    assert status == 0, err
    ours = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        gap = (ours(ids).logits - mamba(ids).logits).abs().max()
    assert gap <= 1e-5 * mamba(ids).logits.abs().max()


def test_half_precision_weights_keep_their_dtype_between_codes(tmp_path, capsys):
    saved("longhorn", tmp_path / "model")
    theirs = tmp_path / "theirs.safetensors"
    assert (
        main(["convert", str(tmp_path / "model"), "--to", "official", "--output", str(theirs)]) == 0
    )
    save_file({name: x.bfloat16() for name, x in load_file(theirs).items()}, theirs)
    fields = [f"--set={key}={value}" for key, value in SMALL["longhorn"][1].items()]
    assert run(capsys, theirs, "--to", "longhorn", "--output", tmp_path / "ours", *fields)[0] == 0
    back = load_file(tmp_path / "ours" / "model.safetensors")
    assert {x.dtype for x in back.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("nix.safetensors --to rtf --output o", "source must be a .safetensors file or a folder"),
        ("theirs.bin --to rtf --output o", "write one with torch.load(file, weights_only=True)"),
        ("theirs.safetensors --to rtf --output o", "config must have 'trunc_len'"),
        ("theirs.safetensors --to longhorn --output o", "it lacks d_model, n_layer, vocab_size"),
        ("theirs.safetensors --to bmojo --output o", "a config.json of transformers' Mamba"),
        ("theirs.safetensors --to rtf --output o --set trunc_len", "must look like trunc_len=1024"),
        ("theirs.safetensors --to rtf --output o --set trunc_len=[", "must be YAML"),
        (
            "theirs.safetensors --to longhorn --output o --set d_model=a --set n_layer=1 "
            "--set vocab_size=2",
            "Field 'hidden_size' expected int, got str (value: 'a')",
        ),
        ("theirs.safetensors --to rtf --output o --config nix", "nix does not exist"),
        (
            "theirs.safetensors --to coffee --output o",
            "have one: bmojo, dss, h3, hybrid, linear_attention, longhorn, mamba3, rtf",
        ),
        (
            "theirs.safetensors --to rtf --output model",
            "must be a new or an empty folder, got 'model'",
        ),
        ("cut.safetensors --to rtf --output o", "cut.safetensors is corrupt or truncated"),
        ("model --to official --output o.bin", "output must end in .safetensors, got 'o.bin'"),
        ("model --to official --output model/model.safetensors", "output must be a new file, got"),
        ("nix --to official --output o.safetensors", "no model 'nix'"),
        ("a/b --to official --output o.safetensors", "a folder with a saved model, got 'a/b'"),
        (
            "model --to official --output o.safetensors --set a=b",
            "--config and --set must be absent",
        ),
        ("mamba --to official --output o.safetensors", "model of an installed family"),
        (
            "coffee --to official --output o.safetensors",
            "have one: dss, hybrid, linear_attention, longhorn, mamba3, rtf",
        ),
        ("labels --to official --output o.safetensors", "has a RTFForCausalLM only"),
    ],
)
def test_a_model_that_cannot_be_converted_prints_one_line_and_writes_nothing(
    arguments, answer, examples, capsys
):
    before = sorted(examples.rglob("*"))
    status, out, err = run(capsys, *arguments.split())
    assert (status, out) == (2, "")
    assert answer in err
    assert err.count("\n") == 1
    assert sorted(examples.rglob("*")) == before


@pytest.fixture(scope="module")
def _examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    weights = saved("rtf", folder / "model")
    save_file(weights, folder / "theirs.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "theirs.safetensors").read_bytes()[:-9])
    (folder / "theirs.bin").touch()
    kinds = {"mamba": "mamba", "coffee": "ssmzoo_coffee", "labels": "ssmzoo_rtf"}
    for name, model_type in kinds.items():
        (folder / name).mkdir()
        config = {"model_type": model_type}
        if name == "labels":
            config["architectures"] = ["RTFForTokenClassification"]
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def examples(_examples, monkeypatch):
    monkeypatch.chdir(_examples)
    return _examples
