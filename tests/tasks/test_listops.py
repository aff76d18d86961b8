"""ListOps against a parser and an evaluator written for a single expression, symbol by symbol."""

import statistics

import numpy as np
import pytest

from ssmzoo.tasks import LISTOPS_SYMBOLS, listops, listops_trees, load_task

SMALL = {"min_length": 20, "max_length": 120}


def rows_of(trees):
    return np.split(trees.values, trees.ends[:-1])


def parsed(symbols):
    """Parse one expression by recursive descent; return it as nested lists, and what is left."""
    head, *rest = symbols
    if head.isdigit():
        return int(head), rest
    assert head in ("[MIN", "[MAX", "[MED", "[SM"), head
    node = [head]
    while rest[0] != "]":
        child, rest = parsed(rest)
        node.append(child)
    return node, rest[1:]


def value(tree):
    if isinstance(tree, int):
        return tree
    operator, *arguments = tree
    arguments = [value(argument) for argument in arguments]
    return {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda a: int(statistics.median(a)),
        "[SM": lambda a: sum(a) % 10,
    }[operator](arguments)


def nodes(tree, depth=1):
    yield depth, tree
    if isinstance(tree, list):
        for child in tree[1:]:
            yield from nodes(child, depth + 1)


def tree_of(row):
    *symbols, end = (LISTOPS_SYMBOLS[i] for i in row)
    assert end == "<eos>"
    tree, rest = parsed(symbols)
    assert not rest
    return tree


@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (40, {}),
        (300, SMALL),
        (300, SMALL | {"max_depth": 4, "max_args": 6}),
        (200, {"min_length": 1, "max_length": 9, "max_args": 2}),
    ],
    ids=["paper", "small", "shallow", "tiny"],
)
def test_every_label_is_the_value_of_its_expression_and_every_bound_holds(count, arguments):
    trees, labels = listops_trees(count, seed=3, **arguments)
    assert len(trees.ends) == len(labels) == count
    bounds = {"min_length": 501, "max_length": 1999, "max_depth": 10, "max_args": 10} | arguments
    depths, arities = set(), set()
    for row, label in zip(rows_of(trees), labels, strict=True):
        assert bounds["min_length"] <= len(row) - 1 <= bounds["max_length"]
        tree = tree_of(row)
        assert value(tree) == label
        for depth, node in nodes(tree):
            depths.add(depth)
            if isinstance(node, list):
                assert depth < bounds["max_depth"]
                arities.add(len(node) - 1)
    assert min(arities) == 2
    assert max(arities) == bounds["max_args"]
    assert max(depths) <= bounds["max_depth"]
    assert len({row.tobytes() for row in rows_of(trees)}) == count


def test_trees_have_the_probabilities_of_the_recursive_draw():
    # with two arguments and three levels a tree of 1, 4, 7, 10 tokens has 0, 1, 2, 3 operators
    lengths = np.zeros(4)
    operators, digits = np.zeros((3, 4)), np.zeros(10)
    for chunk in range(12):
        for row, _ in listops._trees(np.random.default_rng(chunk), 1, 10, 3, 2):
            tree = tree_of(row)
            lengths[(len(row) - 2) // 3] += 1
            if len(row) == 11:
                for place, node in enumerate((tree, tree[1], tree[2])):
                    operators[place, ["[MIN", "[MAX", "[MED", "[SM"].index(node[0])] += 1
                    digits += np.bincount(
                        [leaf for leaf in node[1:] if leaf in range(10)], None, 10
                    )
    total = lengths.sum()
    assert total == 12 * 4096
    exact = np.array([3 / 4, 1 / 4 * 9 / 16, 1 / 4 * 2 * 3 / 16, 1 / 4 * 1 / 16])
    assert np.abs(lengths / total - exact).max() < 4 * np.sqrt(exact.max() / 4 / total)
    assert np.abs(lengths[1:] / total / exact[1:] - 1).max() < 0.15
    assert np.abs(operators / operators.sum(axis=1, keepdims=True) * 4 - 1).max() < 0.3
    assert np.abs(digits / digits.sum() * 10 - 1).max() < 0.3


def test_a_reduced_data_set_is_the_beginning_of_a_larger_one():
    few, few_labels = listops_trees(50, seed=1, **SMALL)
    many, many_labels = listops_trees(400, seed=1, **SMALL)
    other, _ = listops_trees(50, seed=2, **SMALL)
    assert (many.values[: len(few.values)] == few.values).all()
    assert (many_labels[:50] == few_labels).all()
    assert len(other.values) != len(few.values) or (other.values != few.values).any()


def test_splits_of_trees_are_disjoint_and_together_one_draw():
    sizes = {"num_train": 300, "num_validation": 100, "num_test": 50}
    arguments = {"min_length": 4, "max_length": 9, "max_args": 3, **sizes}
    rows = {}
    for split in ("train", "validation", "test"):
        task = load_task("listops", split, 5, **arguments)
        assert len(task) == sizes[f"num_{split}"]
        assert (task.kind, task.objective) == ("tokens", "classification")
        assert (task.vocab_size, task.num_labels, task.input_channels) == (18, 10, None)
        batch = task.batch(range(len(task)))
        for row, length, label in zip(batch.inputs, batch.lengths, batch.labels, strict=True):
            assert (row[length:] == 0).all()
            assert value(tree_of(row[:length])) == label
        rows[split] = {
            row[:length].tobytes() for row, length in zip(batch.inputs, batch.lengths, strict=True)
        }
        assert len(rows[split]) == len(task)
    assert not rows["train"] & (rows["validation"] | rows["test"])
    assert not rows["validation"] & rows["test"]


def test_more_trees_than_there_are_is_an_error_that_says_how_many(monkeypatch):
    monkeypatch.setattr(listops, "_CANDIDATES", 200)
    with pytest.raises(ValueError, match=r"num_examples must be at most .* 10 "):
        listops_trees(11, min_length=1, max_length=3, seed=0)
