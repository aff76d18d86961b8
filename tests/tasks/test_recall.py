"""The recall problems against their definitions, written out row by row."""

import json
import logging
import pickle
import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
from transformers import AutoTokenizer

from ssmzoo import tasks
from ssmzoo.evaluation.text import cut, read_documents, text_documents
from ssmzoo.tasks import IGNORED, induction_heads, mqar
from ssmzoo.tasks.common import distinct

MQAR_SHAPES = [(64, 4, 8192), (16, 4, 10), (17, 3, 64), (4, 1, 4), (512, 64, 8192)]


def recalled(context):
    """Answer a row's last symbol by what followed it before: the rule that both problems follow."""
    *before, asked = context
    place = before.index(asked) + 1 if asked in before else len(before)
    return context[place]


def solved(input_ids, labels):
    """Return the share of labels that looking back from the position before them gets right."""
    right = [
        recalled(row[:t].tolist()) == answer
        for row, row_labels in zip(input_ids, labels, strict=True)
        for t, answer in enumerate(row_labels)
        if answer != IGNORED
    ]
    return np.mean(right)


@pytest.mark.parametrize(("seq_len", "num_pairs", "vocab_size"), MQAR_SHAPES)
def test_mqar_rows_are_pairs_then_every_key_once_at_an_even_place(seq_len, num_pairs, vocab_size):
    input_ids, labels = mqar(
        50, seq_len=seq_len, num_pairs=num_pairs, vocab_size=vocab_size, seed=1
    )
    assert input_ids.shape == labels.shape == (50, seq_len)
    assert input_ids.dtype == labels.dtype == np.int64
    for row, answers in zip(input_ids.tolist(), labels.tolist(), strict=True):
        keys, values = row[0 : 2 * num_pairs : 2], row[1 : 2 * num_pairs : 2]
        assert len(set(keys)) == len(set(values)) == num_pairs
        assert all(1 <= key < vocab_size // 2 for key in keys)
        assert all(vocab_size // 2 <= value < vocab_size for value in values)
        asked = {t: row[t] for t in range(2 * num_pairs, seq_len) if row[t] != 0}
        assert sorted(asked.values()) == sorted(keys)
        assert all(t % 2 == 0 for t in asked)
        value_of = dict(zip(keys, values, strict=True))
        expected = {t + 1: value_of[key] for t, key in asked.items()}
        assert {t: a for t, a in enumerate(answers) if a != IGNORED} == expected


@pytest.mark.parametrize(
    ("input_ids", "labels"),
    [mqar(40, seed=3), induction_heads(40, seq_len=32, vocab_size=60, seed=3)],
    ids=["mqar", "induction_heads"],
)
def test_a_lookup_model_solves_the_task_only_with_the_right_labels(input_ids, labels):
    assert solved(input_ids, labels) == 1.0
    early = np.full_like(labels, IGNORED)
    early[:, :-1] = labels[:, 1:]
    assert solved(input_ids, early) < 0.2


def test_query_places_follow_the_power_law_without_replacement():
    rows, slots, power = 60_000, 6, 0.2
    input_ids, _ = mqar(
        rows, seq_len=4 + 2 * slots, num_pairs=2, vocab_size=64, power=power, seed=0
    )
    weight = power * np.arange(1, slots + 1) ** (power - 1)
    weight /= weight.sum()
    first = np.argmax(input_ids[:, 4::2] == input_ids[:, :1], axis=1)
    second = np.argmax(input_ids[:, 4::2] == input_ids[:, 2:3], axis=1)
    for a, b in permutations(range(slots), 2):
        exact = weight[a] * weight[b] / (1 - weight[a])
        found = np.mean((first == a) & (second == b))
        assert abs(found - exact) < 5 * np.sqrt(exact / rows), (a, b)
    uniform = 1 / (slots * (slots - 1))
    assert abs(np.mean((first == 0) & (second == 1)) - uniform) > 20 * np.sqrt(uniform / rows)


@pytest.mark.parametrize("high", [5, 12])
def test_distinct_draws_take_every_ordered_choice_alike(high):
    rows = 60_000
    drawn = distinct(np.random.default_rng(0), rows, 2, 1, high)
    choices, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(choices) == (high - 1) * (high - 2)
    assert np.abs(counts / rows * len(choices) - 1).max() < 5 * np.sqrt(len(choices) / rows)


def test_symbol_tokenizer_loads_without_our_code_and_means_its_ids(tmp_path):
    tasks.symbol_tokenizer(300).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = [7, 0, 299, 10, 1]
    assert tokenizer.encode("t7 t0 t299 t10 t1") == ids
    assert tokenizer.decode(ids) == "t7 t0 t299 t10 t1"
    assert len(tokenizer) == tasks.symbol_count(tokenizer) == 300
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.padding_side == "left"  # where generate goes on


def test_symbol_tokenizer_names_what_is_no_symbol_of_it():
    tokenizer = tasks.symbol_tokenizer(4)
    for text in ("t1 t9 t0", ["t1", "t9"]):
        with pytest.raises(ValueError, match="from t0 to t3 between blanks, got 't9'"):
            tokenizer(text)
    with pytest.raises(ValueError, match="got 'Once'"):
        tokenizer.encode("Once upon")
    assert pickle.loads(pickle.dumps(tokenizer)).encode("t3 t1") == [3, 1]


def test_symbol_count_knows_other_tokenizers(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"t1": 0, "t0": 1})))
    assert tasks.symbol_count(words) is None


@pytest.mark.parametrize(
    "documents",
    [
        lambda: tasks.mqar_documents(
            num_examples=60, seq_len=64, num_pairs=4, vocab_size=256, seed=9, version=1.0
        ),
        lambda: tasks.induction_documents(num_examples=60, seq_len=16, vocab_size=30, seed=9),
    ],
    ids=["mqar", "induction"],
)
def test_symbol_documents_ask_what_their_context_answers(documents):
    rows = documents()["test"].to_list()
    assert len(rows) == 60
    assert all(row["answer"] == " " + recalled(row["context"].split()) for row in rows)


def test_mqar_documents_ask_every_key_about_as_often():
    made = {"num_examples": 2000, "seq_len": 32, "num_pairs": 4, "vocab_size": 64, "seed": 0}
    contexts = [row["context"].split() for row in tasks.mqar_documents(**made)["test"]]
    asked = np.bincount([context.index(context[-1]) // 2 for context in contexts])
    assert len(asked) == 4
    assert np.abs(asked - 500).max() < 100


def test_recall_text_documents_hold_the_answer_among_different_choices():
    rows = tasks.recall_text_documents(num_examples=80, num_pairs=8, seed=4)["test"].to_list()
    for row in rows:
        *lines, asked = row["context"].split("\n")
        pairs = dict(line.split(" = ") for line in lines)
        assert len(pairs) == len(set(row["choices"])) == 8
        assert row["choices"] == list(pairs.values())
        assert row["choices"][row["answer"]] == pairs[asked.removesuffix(" =")]
    assert len({row["answer"] for row in rows}) == 8


def test_induction_text_documents_hold_the_answer_after_the_trigger():
    rows = tasks.induction_text_documents(num_examples=40, seq_len=32, seed=4)["test"].to_list()
    for row in rows:
        symbols = row["context"].split(" ")
        assert len(symbols) == 32
        assert symbols.count("#") == 2
        assert symbols[-1] == "#"
        assert row["choices"][row["answer"]] == symbols[symbols.index("#") + 1]


@pytest.mark.parametrize("window", [4, 5, 7, 100])
def test_cutting_loses_nothing_and_splits_no_character(window):
    text = "aé漢🙂" * 30 + "z"
    pieces = cut(text, window)
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= window
    # a window is left unfilled only where the next character does not fit
    following = [piece[0] for piece in pieces[1:]]
    for piece, character in zip(pieces, following, strict=False):
        assert len((piece + character).encode()) > window


def test_text_documents_hold_the_whole_text_in_an_order_from_the_seed(tmp_path):
    (tmp_path / "b.txt").write_text("second " * 40)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "first"}) + "\n\n")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text(" \n")

    def pieces(seed):
        made = text_documents(text=str(tmp_path), window=20, seed=seed)
        return made["test"]["text"][:]

    assert sorted(pieces(0)) == sorted(["first", *cut("second " * 40, 20)])
    assert pieces(0) == pieces(0) != pieces(1)


def test_a_folder_leaves_out_what_is_not_text_with_a_warning(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    with caplog.at_level(logging.WARNING, "ssmzoo"):
        assert read_documents(tmp_path) == ["good"]
    assert "b.bin" in caplog.text


def test_unusable_text_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="there is none at"):
        read_documents(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no file"):
        read_documents(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        read_documents(tmp_path)
    binary = tmp_path / "b.bin"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"b\.bin must be UTF-8.* 0xff at 0"):
        read_documents(binary)
    records = tmp_path / "r.jsonl"
    records.write_text('{"text": "x"}\n{"body": "y"}\n')
    with pytest.raises(LookupError, match=r"r\.jsonl:2 has no field 'text', it has body"):
        read_documents(records)
    with pytest.raises(ValueError, match="needs a text"):
        text_documents()


def test_making_rows_imports_nothing_heavy():
    code = (
        "import sys; from ssmzoo.tasks import mqar; mqar(4, seed=0); "
        "assert not {'torch', 'transformers', 'datasets', 'lm_eval'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
