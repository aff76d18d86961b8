"""ViL, Longhorn's vision model: its sizes, its equations, and how it is loaded and trained."""

import numpy as np
import pytest
import torch
from tests.oracles import longhorn as oracle

from ssmzoo.recipe import load_recipe
from ssmzoo.tasks import load_task
from ssmzoo.testing.subject import Subject
from ssmzoo.training.model import build_config, model_class
from ssmzoo_longhorn import FAMILY

BOTH = ("both-shared", "both-separate")
SMALL = {
    **{"num_hidden_layers": 2, "hidden_size": 16, "d_state": 4, "use_bias": False},
    **{"image_size": 12, "patch_size": 4, "num_labels": 5, "dt_rank": 2},
}


def build(dtype=torch.float64, **fields):
    subject = Subject(FAMILY)
    fields = {**FAMILY.presets["vil-tiny"], **SMALL, **fields}
    return subject.build(FAMILY.image_classification_class, dtype, fields)


# Section 5.5 and Table 3: 7 M and 26 M. Their "26 M" is Vision Mamba's, which has two matrices A a
# layer more, 24 * 2 * 768 * 16 = 589,824 numbers
@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("vil-tiny", 6_871_528),
        ("vil-tiny-shared", 6_290_920),
        ("vil-small", 25_243_624),
        ("vil-small-shared", 23_640_040),
    ],
)
def test_the_presets_have_the_sizes_of_vision_mamba_without_its_matrices(preset, parameters):
    config = FAMILY.config(preset)
    with torch.device("meta"):
        model = FAMILY.image_classification_class(config)
    assert model.num_parameters() == parameters
    width, layers, inner = config.hidden_size, 24, 2 * config.hidden_size
    rank, states = width // 16, 16
    way = inner * (4 + 1) + inner * (rank + 2 * states) + rank * inner + 2 * inner + inner
    ways = 2 * way if config.directions == "both-separate" else way + inner
    block = width * 2 * inner + ways + inner * width + width
    patches = (16 * 16 * 3 + 1) * width + (14 * 14 + 1) * width + width
    assert parameters == layers * block + patches + width + (width + 1) * 1000
    matrices = layers * 2 * inner * states
    if preset == "vil-tiny":
        assert round(parameters / 1e6) == 7
    if preset == "vil-small":
        assert round((parameters + matrices) / 1e6) == 26


@pytest.mark.parametrize("directions", BOTH)
@torch.no_grad()
def test_it_computes_what_the_paper_and_the_authors_code_say(directions):
    model = build(directions=directions)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    pixels = np.random.default_rng(0).standard_normal((2, 3, 12, 12))
    expected = oracle.image_logits(weights, model.config.to_dict(), pixels)
    got = model(torch.from_numpy(pixels)).logits.numpy()
    assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()


@torch.no_grad()
def test_the_middle_of_the_sequence_is_the_class_token():
    model = build()
    embeds = model.model.embed_images(torch.zeros(2, 3, 12, 12, dtype=torch.float64))
    layer = model.model.embed_images
    assert embeds.shape == (2, 10, 16)
    assert torch.equal(embeds[0, 4], layer.class_token[0, 0] + layer.positions[0, 4])


@pytest.mark.parametrize("directions", BOTH)
def test_ssm_parameters_stay_float32_where_weights_are_bfloat16(directions, tmp_path):
    model = build(torch.float32, directions=directions)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    for some in (loaded, model.to(torch.bfloat16)):
        dtypes = {name: p.dtype for name, p in some.named_parameters()}
        kept = {name for name, dtype in dtypes.items() if dtype is torch.float32}
        expected = {n for n in dtypes if n.rpartition(".")[2] in ("D", "dt_bias")}
        assert kept == expected
    assert loaded(torch.rand(1, 3, 12, 12)).logits.isfinite().all()


def test_the_digits_recipes_compare_models_of_equal_size_and_training():
    recipes = [load_recipe(name) for name in ("vil-digits", "vit-digits")]
    sizes = []
    for recipe in recipes:
        task = load_task(str(recipe.data.task), "train", 0, **recipe.data.task_args)
        config = build_config(recipe.model, None, task)
        sizes.append(model_class(config, task)(config).num_parameters())
    assert sizes == [134_026, 134_070]
    assert recipes[0].train == recipes[1].train
    assert recipes[0].data == recipes[1].data
