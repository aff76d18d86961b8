"""ListOps of the Long Range Arena: nested operations on digits, and their value.

``[MAX 2 [SM 3 9 ] 1 ]`` has the value 2; operators are minimum, maximum, median (rounded down) and
sum modulo 10. A tree is read in prefix form, without the parentheses of the arena's files, which
its models delete as well. Trees are drawn level by level, many at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.supervised import DIGITS, Ragged, Supervised, size_of, token_rows

LISTOPS_SYMBOLS = (
    *("<pad>", "<unk>", "<eos>"),
    *map(str, range(10)),
    *("[MIN", "[MAX", "[MED", "[SM", "]"),
)
_EOS, _DIGIT, _OPERATOR, _CLOSE = 2, 3, 13, 17
_OPERATOR_SHARE = 0.25
_CANDIDATES = 4096  # trees drawn together; part of what a seed means


def listops_trees(
    num_examples: int,
    *,
    min_length: int = 501,
    max_length: int = 1999,
    max_depth: int = 10,
    max_args: int = 10,
    seed: int,
) -> tuple[Ragged, np.ndarray]:
    """Draw different ListOps trees: the first of an endless sequence that the seed gives.

    A node at ``max_depth`` (the root's depth is 1) is a digit. Any other is a digit with
    probability 3/4, else an operator over 2 to ``max_args`` nodes. Digits, operators and numbers
    of arguments are drawn evenly. Trees shorter or longer than asked are thrown away.

    Args:
        num_examples: Trees.
        min_length: Least number of tokens, ``<eos>`` not counted.
        max_length: Greatest number of tokens, ``<eos>`` not counted.
        max_depth: Levels of a tree.
        max_args: Greatest number of arguments of an operator.
        seed: Same seed, same trees.

    Returns:
        The trees, each in :data:`LISTOPS_SYMBOLS` and closed by ``<eos>``, and their values [n].

    Raises:
        ValueError: An argument is out of range, or there are too few trees of these lengths.
    """
    at_least("num_examples", num_examples, 1)
    at_least("min_length", min_length, 1)
    at_least("max_length", max_length, min_length)
    at_least("max_depth", max_depth, 1)
    at_least("max_args", max_args, 2)
    at_least("seed", seed, 0)
    rows: list[np.ndarray] = []
    labels: list[int] = []
    seen: set[bytes] = set()
    chunk = barren = 0
    while len(rows) < num_examples:
        rng = np.random.default_rng([seed, chunk])
        before = len(rows)
        for row, label in _trees(rng, min_length, max_length, max_depth, max_args):
            key = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
            if key not in seen:
                seen.add(key)
                rows.append(row)
                labels.append(label)
        chunk += 1
        barren = 0 if len(rows) > before else barren + 1
        if barren == 50:
            raise ValueError(
                f"num_examples must be at most about {len(rows)} for trees of {min_length} to "
                f"{max_length} tokens with max_depth={max_depth}, max_args={max_args}: "
                f"{50 * _CANDIDATES} draws gave no other; got {num_examples}"
            )
    return Ragged.of(rows[:num_examples]), np.array(labels[:num_examples])


def load_listops(
    split: str,
    seed: int,
    *,
    num_train: int = 96_000,
    num_validation: int = 2_000,
    num_test: int = 2_000,
    min_length: int = 501,
    max_length: int = 1999,
    max_depth: int = 10,
    max_args: int = 10,
) -> Supervised:
    """Return ListOps; no tree is in two splits. The defaults are the arena's sizes.

    See :func:`listops_trees` for the other arguments and the errors.
    """
    size = size_of(split, num_train, num_validation, num_test)
    first = {"test": 0, "validation": num_test, "train": num_test + num_validation}[split]
    rows, labels = listops_trees(
        first + size,
        min_length=min_length,
        max_length=max_length,
        max_depth=max_depth,
        max_args=max_args,
        seed=seed,
    )
    start = int(rows.ends[first - 1]) if first else 0
    chosen = Ragged(rows.values[start:], rows.ends[first:] - start)
    return token_rows(chosen, labels[first:], vocab_size=len(LISTOPS_SYMBOLS), label_names=DIGITS)


def _trees(
    rng: np.random.Generator, min_length: int, max_length: int, max_depth: int, max_args: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Draw ``_CANDIDATES`` trees and yield tokens and value of those of the right length."""
    root = np.arange(_CANDIDATES)  # of each node of a level, its tree
    length = np.zeros(_CANDIDATES, dtype=np.int64)
    levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for depth in range(1, max_depth + 1):
        share = _OPERATOR_SHARE if depth < max_depth else 0.0
        operator = rng.random(len(root)) < share
        arity = rng.integers(2, max_args + 1, size=int(operator.sum()))
        levels.append((root, operator, arity))
        length += np.bincount(root, minlength=_CANDIDATES)
        length += np.bincount(root[operator], minlength=_CANDIDATES)
        root = np.repeat(root[operator], arity)
        if not len(root):
            break
    kept = (length >= min_length) & (length <= max_length)
    # whole trees are dropped, so a level's other nodes stay in the order of their parents
    shapes = [(o[kept[r]], a[kept[r[o]]]) for r, o, a in levels]
    digits = [rng.integers(0, 10, size=int((~o).sum())) for o, _ in shapes]
    operators = [rng.integers(0, 4, size=len(a)) for _, a in shapes]
    if not kept.any():
        return

    # from the leaves up: the value of each node and the tokens below it
    value = size = np.empty(0, dtype=np.int64)
    sizes = []
    for (operator, arity), level_digits, level_operators in zip(
        reversed(shapes), reversed(digits), reversed(operators), strict=True
    ):
        above, tokens = np.empty(len(operator), np.int64), np.ones(len(operator), np.int64)
        above[~operator] = level_digits
        if len(arity):
            above[operator] = _apply(level_operators, value, arity)
            tokens[operator] = 2 + np.add.reduceat(size, np.cumsum(arity) - arity)
        value, size = above, tokens
        sizes.append(size)
    sizes.reverse()

    # from the root down: where each node's first token stands
    place = np.cumsum(sizes[0] + 1) - sizes[0] - 1
    starts, ends = place, place + sizes[0] + 1
    text = np.empty(int(ends[-1]), dtype=np.uint8)
    text[ends - 1] = _EOS
    for depth, (operator, arity) in enumerate(shapes):
        text[place[~operator]] = _DIGIT + digits[depth]
        text[place[operator]] = _OPERATOR + operators[depth]
        text[place[operator] + sizes[depth][operator] - 1] = _CLOSE
        if not len(arity):
            break
        before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]
        offset = place[operator] + 1 - before[np.cumsum(arity) - arity]
        place = before + np.repeat(offset, arity)
    for start, end, label in zip(starts, ends, value, strict=True):
        yield text[start:end], int(label)


def _apply(operators: np.ndarray, arguments: np.ndarray, arity: np.ndarray) -> np.ndarray:
    """Return the value of every operator over its run of arguments."""
    column = np.arange(arity.max())
    inside = column < arity[:, None]
    table = np.full(inside.shape, 10, dtype=np.int8)  # 10 sorts behind all digits
    table[inside] = arguments
    total = np.where(inside, table, 0).sum(axis=1, dtype=np.int64) % 10
    table.sort(axis=1)
    row = np.arange(len(arity))
    middle = (table[row, (arity - 1) // 2].astype(np.int64) + table[row, arity // 2]) // 2
    return np.choose(operators, [table[:, 0], table[row, arity - 1], middle, total])
