"""The table of docs/papers.md: whatever it tells one to type for a row of the papers exists."""

import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from ssmzoo.analysis.describe import installed_families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"
LRA = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
TIED = {"vocab_size": 50304, "tie_word_embeddings": True}


def rows():
    lines = [x for x in PAGE.read_text(encoding="utf-8").splitlines() if x.startswith("|")]
    assert lines[:2] == ["| paper | table | row | preset |", "|---|---|---|---|"]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def typed(cell):
    """Presets and types of transformers that a cell names, with short forms written out."""
    presets, types = [], []
    for name in re.findall(r"`([^`]+)`", cell.split("not built")[0]):
        if name.startswith("model.config_of: "):
            types.append(name.removeprefix("model.config_of: "))
        elif name.endswith("*"):
            presets += [name[:-1] + task for task in LRA]
        elif name.startswith("-"):
            presets.append(presets[-1].rpartition("-")[0] + name)
        elif "-" in name:
            presets.append(name)
    return presets, types


def test_every_row_names_a_preset_or_a_model_of_transformers_or_says_that_it_has_none():
    known = {preset for family in installed_families() for preset in family["presets"] or ()}
    heads = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    found = 0
    assert len({tuple(row[:3]) for row in rows()}) == len(rows())
    for row in rows():
        assert len(row) == 4, row
        presets, types = typed(row[3])
        assert set(presets) <= known, (row, set(presets) - known)
        assert all(name in heads for name in types), row
        assert presets or types or "not built" in row[3] or "the same" in row[3], row
        found += len(presets)
    assert found > 100


@pytest.mark.parametrize(
    ("kind", "fields", "millions"),
    [
        ("mamba", {"hidden_size": 768, "num_hidden_layers": 24}, 129.2),
        ("mamba", {"hidden_size": 1024, "num_hidden_layers": 48}, 371.5),
        ("llama", {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048}, 123.6),
        ("llama", {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2816}, 359.8),
        ("rwkv", {"hidden_size": 768, "num_hidden_layers": 12}, 130.8),
        ("rwkv", {"hidden_size": 1024, "num_hidden_layers": 24}, 378.9),
    ],
    ids=str,
)
def test_stock_models_of_longhorns_table_1_have_the_sizes_of_their_rows(kind, fields, millions):
    own = {"attention_hidden_size": fields["hidden_size"]} if kind == "rwkv" else {}
    own |= {"num_attention_heads": fields["hidden_size"] // 64} if kind == "llama" else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**TIED, **fields, **own))
    assert round(model.num_parameters() / 1e6, 1) == millions
    name = {"mamba": "Mamba", "llama": "LLaMA", "rwkv": "RWKV"}[kind]
    (row,) = (row for row in rows() if row[:2] == ["Longhorn", "1"] and row[2].startswith(name))
    assert f"{millions} M" in row[2]
