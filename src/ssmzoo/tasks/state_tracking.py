"""State tracking: read elements of a finite group, and predict their product so far at every place.

Z2 is parity, Z3 the sum modulo 3, S3 and A5 are the word problems of permutations (arXiv
2404.08819, 2411.12537). A model that has learned the state goes on at lengths it has not seen; one
that has learned the rows of one length does not. Rows of any length have the same symbols.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import permutations

import numpy as np

from ssmzoo.tasks.common import IGNORED, at_least

_LARGEST = {"Z": 1000, "S": 5, "A": 6}  # whose tables of products stay small


def state_tracking(
    num_examples: int, *, group: str = "S3", seq_len: int = 40, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Make the word problem of a group: ``state[t] = state[t-1] * symbol[t]``, from the identity.

    Id ``1 + i`` is the i-th element, as a symbol and as a state. Elements of ``Zn`` are 0 .. n-1
    under addition, those of ``Sn`` and ``An`` permutations in lexical order, of which ``f * g``
    does g first. Symbols are drawn evenly.

    Args:
        num_examples: Rows.
        group: ``Zn``, the cyclic group of n; ``Sn``, all permutations of n; ``An``, the even ones.
        seq_len: Symbols a row.
        seed: Same seed, same rows.

    Returns:
        ``input_ids`` and ``labels``, int64 [num_examples, seq_len + 1]. The last place is filler:
        a symbol's label is one place later.

    Raises:
        LookupError: No such group.
        ValueError: A size below 1, or a negative ``seed``.
    """
    at_least("num_examples", num_examples, 1)
    at_least("seq_len", seq_len, 1)
    at_least("seed", seed, 0)
    products = _products(group)
    drawn = np.random.default_rng(seed).integers(len(products), size=(num_examples, seq_len))
    input_ids = np.zeros((num_examples, seq_len + 1), np.int64)
    input_ids[:, :-1] = drawn + 1
    labels = np.full_like(input_ids, IGNORED)
    state = np.zeros(num_examples, np.int64)
    for t in range(seq_len):
        state = products[state, drawn[:, t]]
        labels[:, t + 1] = state + 1
    return input_ids, labels


def group_vocab_size(group: str) -> int:
    """Return how many ids :func:`state_tracking` uses: the filler and the group's elements."""
    return 1 + len(_products(group))


@lru_cache(maxsize=8)
def _products(group: str) -> np.ndarray:
    """Return the table of products [n, n] of a group's elements; the first is the identity."""
    found = re.fullmatch(r"([ZSA])([1-9]\d*)", group)
    degree = int(found[2]) if found else 0
    if not found or not 2 <= degree <= _LARGEST[found[1]] or group == "A2":
        raise LookupError(
            f"group must be one of Z2 .. Z{_LARGEST['Z']}, S2 .. S{_LARGEST['S']}, "
            f"A3 .. A{_LARGEST['A']}, got {group!r}"
        )
    if found[1] == "Z":
        return np.add.outer(np.arange(degree), np.arange(degree)) % degree
    elements = np.array(list(permutations(range(degree))))
    if found[1] == "A":
        pairs = np.triu_indices(degree, 1)
        inversions = (elements[:, pairs[0]] > elements[:, pairs[1]]).sum(axis=1)
        elements = elements[inversions % 2 == 0]
    # (f * g)(i) = f(g(i)); a permutation's digits in base n give its number
    composed = elements[np.arange(len(elements))[:, None, None], elements[None]]
    base = degree ** np.arange(degree)[::-1]
    return np.searchsorted(elements @ base, composed @ base)
