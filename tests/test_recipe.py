from pathlib import Path

import pytest
import yaml

from ssmzoo.data.paths import expand
from ssmzoo.files import package_data
from ssmzoo.recipe import Recipe, load_recipe

SMALL = {
    "model": {"family": "longhorn", "config": {"hidden_size": 32}},
    "data": {"text": "a.txt"},
    "train": {"steps": 10, "batch_size": 4, "seq_len": 32, "lr": 1e-3},
}


@pytest.fixture
def written(tmp_path):
    def write(**changes):
        fields = {section: dict(values) for section, values in SMALL.items()}
        for name, value in changes.items():
            section, _, field = name.partition("__")
            if value is None:
                fields[section].pop(field, None)
            else:
                fields.setdefault(section, {})[field] = value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(fields), encoding="utf-8")
        return path

    return write


def refusal(kind, path, overrides=()):
    with pytest.raises(kind) as caught:
        load_recipe(path, overrides)
    text = str(caught.value.args[0])
    assert "\n" not in text
    return text


def test_a_recipe_reads_back_equal_to_itself(written, tmp_path):
    recipe = load_recipe(written(data__validation=0.1, train__warmup=3))
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(copy) == recipe


@pytest.mark.parametrize("text", ["1e3", "12e4567", "-1E+5", "1_0e2", "0x1F", "null", "1.5"])
def test_text_that_looks_like_a_number_stays_text(text, written, tmp_path):
    recipe = load_recipe(written(data__text=None), [f"data.jsonl='{text}'"])
    recipe = load_recipe(recipe, [f"data.text_field='{text}'"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(copy) == recipe


def test_an_unknown_field_is_named_with_a_suggestion(written):
    text = refusal(LookupError, written(train__lrr=1e-3, train__lr=None))
    assert text == "recipe.yaml: train has no field 'lrr'; did you mean 'lr'?"


def test_an_unknown_section_is_named_with_a_suggestion(written):
    assert "the recipe has no field 'trian'; did you mean 'train'?" in refusal(
        LookupError, written(trian__lr=1.0)
    )


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("train__lr", -1, "recipe.yaml: train.lr must be greater than 0, got -1"),
        ("train__lr", "fast", "train.lr must be a valid number, got 'fast'"),
        ("train__steps", True, "train.steps must be a valid integer, got True"),
        ("train__steps", 1.5, "train.steps must be a valid integer"),
        ("train__seq_len", 1, "train.seq_len must be greater than or equal to 2, got 1"),
        ("train__dtype", "float16", "'float32' or 'bfloat16', got 'float16'"),
        ("train__betas", [0.9], "train.betas"),
        ("train__lr", float("inf"), "train.lr must be a finite number, got inf"),
        ("train__lr", None, "train.lr is missing"),
        (
            "train__tokens",
            100,
            "train must have exactly one of steps, tokens, epochs, got steps and tokens",
        ),
        (
            "train__accumulate",
            3,
            "train.batch_size must be a multiple of train.accumulate = 3, got 4",
        ),
        ("train__warmup", 11, "train.warmup must be at most the run's 10 steps, got 11"),
        ("train__warmup", 1.5, "train.warmup must be below 1 or a whole number of steps, got 1.5"),
        ("model__family", None, "model must have exactly one of family, config_of, init_from"),
        ("model__init_from", "x", "got family and init_from"),
        ("data__jsonl", "b.jsonl", "got text and jsonl"),
        ("data__text", ["a.txt", "b.jsonl.gz"], "give 'b.jsonl.gz' as data.jsonl"),
        ("data__text", "b.parquet", "give 'b.parquet' as data.parquet"),
        ("data__validation", "b.jsonl", "data.validation must be text, too, got 'b.jsonl'"),
        ("train__seed", 2**64, "train.seed must be less than 9223372036854775808"),
        ("data__streaming", True, "data.streaming must be false with data.text"),
        ("data__validation", 0.0, "data.validation must be a share between 0 and 1"),
        ("data__config", "en", "data.config needs data.dataset"),
        ("data__split", "test", "data.split needs data.dataset, got data.text"),
        (
            "data__text_field",
            "body",
            "needs data.jsonl or data.parquet or data.dataset, got data.t",
        ),
        ("data__shuffle_buffer", 10, "data.shuffle_buffer needs data.streaming: true"),
        ("data__workers", -1, "data.workers must be greater than or equal to 0, got -1"),
        ("data__task_args", {"num_pairs": 4}, "data.task_args needs data.task"),
        ("data__text", [], "data.text"),
        ("train__sequence_parallel", 0, "train.sequence_parallel must be greater than or equal"),
        ("train__sequence_parallel", 3, "must divide train.seq_len = 32, got 3"),
    ],
)
def test_a_wrong_value_names_field_rule_and_value(written, field, value, expected):
    assert expected in refusal(ValueError, written(**{field: value}))


def test_segments_and_sequence_parallel_exclude_each_other(written):
    cut = ["train.sequence_parallel=2", "train.segments.count=2"]
    assert "train.segments both cut a row; give one" in refusal(ValueError, written(), cut)
    examples = {"data": {"task": "digits"}, "train": {**SMALL["train"], "seq_len": None}}
    examples["train"]["sequence_parallel"] = 2
    with pytest.raises(ValueError, match=r"sequence_parallel needs rows of train\.seq_len tokens"):
        Recipe.model_validate({**SMALL, **examples})


def test_a_field_given_twice_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("train:\n  lr: 1\n  lr: 2\n", encoding="utf-8")
    assert "the field 'lr' appears twice" in refusal(ValueError, path)


def test_a_file_that_is_no_yaml_is_one_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("train: [1,\nx: {", encoding="utf-8")
    assert "recipe.yaml: not valid YAML" in refusal(ValueError, path)
    path.write_text("just words", encoding="utf-8")
    assert "must hold the sections" in refusal(ValueError, path)


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes("# Größe\n".encode("latin-1"))
    text = refusal(ValueError, path)
    assert text.startswith(f"{path}: a recipe must be UTF-8 text: ")
    assert "byte 0xf6 in position 4" in text


def test_exponents_are_numbers(tmp_path):
    text = yaml.safe_dump(SMALL).replace("lr: 0.001", "lr: 3e-4").replace("steps: 10", "steps: 1e3")
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    recipe = load_recipe(path)
    assert (recipe.train.lr, recipe.train.steps) == (3e-4, 1000)


def test_a_section_is_overridden_as_a_whole(written):
    recipe = load_recipe(written(), ["log={every: 3, curves: false}"])
    assert (recipe.log.every, recipe.log.curves) == (3, False)
    assert "log must be" in refusal((LookupError, ValueError), written(), ["log=3"])


def test_a_recipe_of_nearly_that_name_beside_is_suggested(written, tmp_path):
    written()
    told = refusal(LookupError, str(tmp_path / "recipe.yml"))
    assert f"neither a file nor a shipped one; did you mean '{tmp_path / 'recipe.yaml'}'" in told


def test_overrides_win_and_are_checked_like_the_file(written):
    recipe = load_recipe(
        written(), ["train.lr=3e-4", "model.config.hidden_size=64", "eval.every=7"]
    )
    assert recipe.train.lr == 3e-4
    assert recipe.model.config == {"hidden_size": 64}
    assert recipe.eval.every == 7
    assert "did you mean 'lr'" in refusal(LookupError, written(), ["train.lrr=1"])
    assert "train.lr=3e-4" in refusal(ValueError, written(), ["lr"])
    assert "which is no section" in refusal(ValueError, written(), ["train.lr.x=1"])


def test_tokens_are_rounded_up_to_steps(written):
    recipe = load_recipe(written(train__steps=None, train__tokens=1000, train__warmup=0.25))
    assert recipe.train.total_steps == 8  # 7.8 steps of 4 x 32 tokens
    assert recipe.train.warmup_of(8) == 2


def test_a_runs_recipe_does_not_depend_on_the_working_directory(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(written(data__validation="held/*.txt")).with_absolute_paths()
    assert recipe.data.text == [str(tmp_path / "a.txt")]
    assert recipe.data.validation == [str(tmp_path / "held" / "*.txt")]


def test_a_relative_glob_matches_in_a_folder_with_brackets(written, tmp_path, monkeypatch):
    here = tmp_path / "project [v2]"
    (here / "texts").mkdir(parents=True)
    for name in ("a.txt", "b[1].txt"):
        (here / "texts" / name).write_text("ant")
    monkeypatch.chdir(here)
    recipe = load_recipe(written(data__text=["texts/*.txt"], data__validation="texts/b[1].txt"))
    data = recipe.with_absolute_paths().data
    assert expand(data.text, "data.text") == [here / "texts/a.txt", here / "texts/b[1].txt"]
    assert data.validation == [str(here / "texts/b[1].txt")]


def test_a_tilde_is_the_home_in_every_field(written, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = str(tmp_path / "folder")
    (tmp_path / "folder").mkdir()
    changes = {"model": {"init_from": "~/folder"}, "data": {"dataset": "~/folder"}}
    changes["data"]["tokenizer"] = "~/folder"
    recipe = Recipe.model_validate({**SMALL, **changes}).with_absolute_paths()
    assert recipe.model.init_from == recipe.data.dataset == recipe.data.tokenizer == folder
    beside = load_recipe(written(data__text="~of-nobody.txt")).with_absolute_paths()
    assert beside.data.text == [str(Path.cwd() / "~of-nobody.txt")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.text", ""),
        ("data.jsonl", ["a.jsonl", " "]),
        ("data.dataset", ""),
        ("data.validation", ""),
        ("data.tokenizer", ""),
        ("model.init_from", ""),
    ],
)
def test_a_blank_name_is_refused(field, value, written):
    section, _, name = field.partition(".")
    fields = {"model": dict(SMALL["model"]), "data": {}, "train": SMALL["train"]}
    if name in ("validation", "tokenizer") or section == "model":
        fields["data"]["text"] = "a.txt"
    fields[section] = {name: value} if section == "model" else {**fields["data"], name: value}
    with pytest.raises(ValueError, match=rf"{field} must .*, got '"):
        Recipe.model_validate(fields)


def test_an_unknown_recipe_lists_the_shipped_ones():
    text = refusal(LookupError, "longhorn-dmo")
    assert "did you mean 'longhorn-demo'?" in text
    assert "longhorn-mqar-d64" in text


# test_train_supervised.py has the others
OF_ROWS = [
    p for p in sorted(package_data("eval/recipes").glob("*.yaml")) if not load_recipe(p).supervised
]


@pytest.mark.parametrize("path", OF_ROWS, ids=lambda p: p.stem)
def test_every_shipped_recipe_is_valid_down_to_the_model(path):
    from ssmzoo.data.sources import data_source
    from ssmzoo.data.tokenizer import byte_tokenizer
    from ssmzoo.training.model import build_config

    recipe = load_recipe(path)
    assert load_recipe(path.stem) == recipe
    local = recipe.data.tokenizer in (None, "bytes")
    tokenizer = data_source(recipe).tokenizer if local else byte_tokenizer()
    config = build_config(recipe.model, tokenizer)
    assert config.vocab_size >= len(tokenizer)


@pytest.mark.parametrize(
    ("name", "steps", "tokens_a_step", "lr"),
    [
        ("longhorn-openwebtext-120m", 4800, 491_520, 6e-4),
        ("longhorn-openwebtext-350m", 13_500, 491_520, 3e-4),
        ("longhorn-slimpajama-1.3b", 47_684, 2_097_152, 3e-4),
    ],
)
def test_the_papers_recipes_have_the_papers_numbers(name, steps, tokens_a_step, lr):
    train = load_recipe(name).train
    assert (train.total_steps, train.batch_size * train.seq_len) == (steps, tokens_a_step)
    assert (train.lr, train.min_lr_ratio, train.clip) == (lr, 0.1, 1.0)


def test_a_recipe_object_takes_overrides_too():
    recipe = Recipe.model_validate(SMALL | {"data": {"text": ["a.txt"]}})
    assert load_recipe(recipe, ["train.seed=5"]).train.seed == 5
