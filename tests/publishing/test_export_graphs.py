"""Models leave Python as programs of torch.export; the kit's checks hold each family to it."""

import zipfile

import pytest
import torch
from tests.environments import import_package
from tests.testing.test_foreign_families import FOLDER

from ssmzoo.family import load_family
from ssmzoo.publishing import export_graphs
from ssmzoo.publishing.export_graphs import (
    export_program,
    export_step,
    initial_states,
)
from ssmzoo.testing.standalone import as_published, package_of
from ssmzoo.testing.subject import Subject

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def subject_of(name):
    foreign = FOLDER / name / f"ssmzoo_{name}"
    family = import_package(foreign).FAMILY if foreign.is_dir() else None
    return Subject(family or load_family(name))


def reads(program, model, portions):
    """Fail unless a program reads prompts and goes on as the model reads the whole."""
    for rows, parts in portions.items():
        ids = torch.randint(64, (rows, sum(parts)))
        states, found = initial_states(model, rows), []
        for part in ids.split(parts, dim=1):
            logits, states = program(part, states)
            found.append(logits)
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-5, atol=1e-5)


def test_modules_keep_their_training_mode_through_an_export():
    family = load_family("longhorn")
    model = family.causal_lm_class(family.config(**family.tiny)).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    initial_states(model, 2)
    assert [module.training for module in model.modules()] == before


@pytest.mark.long
@pytest.mark.parametrize(("name", "portable"), [("gru", False), ("longhorn", True)])
@torch.no_grad()
def test_a_program_reads_prompts_and_goes_on_with_any_batch_and_length(name, portable, tmp_path):
    model = subject_of(name).fresh(num_hidden_layers=1)
    program = export_program(model, portable=portable)
    torch.export.save(program, tmp_path / "program.pt2")
    with zipfile.ZipFile(tmp_path / "program.pt2") as file:  # it names no folder of this machine
        written = b"".join(map(file.read, file.namelist()))
    assert b"/ssmzoo/" not in written
    assert b"/site-packages/" not in written
    loaded = torch.export.load(tmp_path / "program.pt2")
    ours = {str(node.target) for node in loaded.graph.nodes if "ssmzoo" in str(node.target)}
    assert not portable or not ours
    reads(loaded.module(), model, {1: [1, 1, 1], 3: [7, 1, 5], 2: [30, 1]})


@pytest.mark.parametrize(
    "name",
    [
        "longhorn",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("bmojo", "coffee", "dss", "rtf")),
    ],
)
@torch.no_grad()
def test_the_code_of_a_checkpoint_leaves_python_by_torch_export(name):
    model, Dim = subject_of(name).fresh(), torch.export.Dim
    traced, other = (
        torch.randint(64, (2, 12)),
        torch.randint(64, (3, 12 if name == "bmojo" else 40)),
    )
    shapes = {0: Dim("rows", max=64), 1: Dim("length", min=2, max=100)}
    if name == "bmojo":
        del shapes[1]  # its chunks are counted as it is traced
    options = {"use_cache": False, "return_dict": False}
    moving = {"input_ids": shapes, **dict.fromkeys(options)}
    with package_of(load_family(name)) as package:
        program = torch.export.export(
            as_published(package, model), (traced,), options, dynamic_shapes=moving, strict=False
        )
        logits = program.module()(other, **options)[0]
    torch.testing.assert_close(logits, model(other).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_graph_of_bmojos_logits_has_any_length_with_and_without_gradients():
    model = subject_of("bmojo").fresh()
    moving = {"input_ids": {1: torch.export.Dim.DYNAMIC}, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(
            model, (torch.randint(64, (2, 12)),), {"use_cache": False}, dynamic_shapes=moving
        ).module()
    for length in (3, 12, 33):
        ids = torch.randint(64, (2, length))
        expected = model(ids).logits
        for learns in (False, True):
            with torch.set_grad_enabled(learns):
                logits = program(ids, use_cache=False).logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_where_modes_of_dss_grow_a_token_past_the_norm_length_is_out_of_bounds():
    model = subject_of("dss").fresh(kernel_norm_length=4, num_hidden_layers=1)
    step = export_step(model).module()
    token, states = torch.ones(2, 1, dtype=torch.int64), initial_states(model, 2)
    for _ in range(4):
        _, states = step(token, states)
    with pytest.raises(IndexError, match="out of bounds"):
        step(token, states)


@torch.no_grad()
def test_a_prompt_past_the_norm_length_fails_in_a_program_as_in_the_model():
    model = subject_of("dss").fresh(kernel_norm_length=16, num_hidden_layers=1)
    program, ids = export_program(model).module(), torch.randint(64, (2, 17))
    reads(program, model, {2: [13, 1, 2]})
    _, states = program(ids[:, :9], initial_states(model, 2))
    for given, before in ((ids, initial_states(model, 2)), (ids[:, 9:], states)):
        program(given[:, :-1], before)
        with pytest.raises(RuntimeError, match="kernel_norm_length must cover all tokens"):
            program(given, before)
    whole = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    with pytest.raises(RuntimeError, match="kernel_norm_length must cover all tokens"):
        whole.module()(input_ids=ids, use_cache=False)


def test_models_whose_states_grow_are_refused_in_one_line():
    grows = subject_of("bmojo").fresh(num_hidden_layers=1, mixer_types=["attention"])
    with pytest.raises(ValueError, match="'keys' of layer 0, which grows"):
        export_step(grows)
    with pytest.raises(TypeError, match="model must be a causal language model of the zoo, got Li"):
        export_step(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="causal language model"):
        export_step(grows.model)


@pytest.mark.parametrize(
    "name",
    [
        "coffee",
        "longhorn",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("bmojo", "dss", "rtf")),
    ],
)
@pytest.mark.long
def test_the_exporter_of_transformers_takes_our_models(name):
    exporters = pytest.importorskip("transformers.exporters.exporter_dynamo")
    fields = {} if name == "bmojo" else {"num_hidden_layers": 1}
    model = subject_of(name).fresh(**fields)
    other = torch.randint(64, (3, 12 if name == "bmojo" else 20))
    config = exporters.DynamoConfig(dynamic=True)
    given = {"input_ids": torch.randint(64, (2, 12)), "use_cache": False}
    program = exporters.DynamoExporter().export(model, given, config=config)
    torch.testing.assert_close(program(input_ids=other).logits, model(other).logits)


def test_an_onnx_export_replaces_nothing_but_an_export(tmp_path, monkeypatch):
    monkeypatch.setattr(export_graphs, "_NEEDED", ())  # it looks before it traces
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("file", f"folder/{export_graphs.CONTENTS}", "folder/notes"):
        (tmp_path / name).write_text("mine")
    for folder, rule in (("file", "is a file"), ("folder", "holds files"), (".", "a name of its")):
        with pytest.raises(ValueError, match=rule):
            export_graphs.export_onnx(subject_of("longhorn").fresh(), folder)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3
