"""Induction heads: predict the symbol that followed the first trigger.

A sequence is noise, trigger, gap, target, noise, trigger. The gap is noise of a fixed length, other
noise fills the sequence up, and the first trigger is equally likely at every place that leaves room
for the rest. Noise may hold the target but never the trigger, which occurs exactly twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmzoo.tasks.common import IGNORED, LETTERS, at_least, lm_eval_split, own_arguments, symbols

if TYPE_CHECKING:
    from datasets import Dataset

_DRAWS = 100_000  # draws in a row without a row that fits, before the trigger is refused


def induction_heads(
    num_examples: int,
    *,
    seq_len: int,
    vocab_size: int,
    num_symbols: int | None = None,
    trigger: Sequence[int] | None = None,
    target_length: int = 1,
    noise_length: int = 0,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Make the induction problem: noise, trigger, gap, target, noise, trigger; predict the target.

    With a trigger of one symbol, guessing scores ``1 / (num_symbols - 1)`` a symbol. The COFFEE
    paper's problem is ``seq_len=16, vocab_size=9, num_symbols=7``.

    Args:
        num_examples: Rows.
        seq_len: Symbols from the first noise to the second trigger.
        vocab_size: Ids a model has; 0 is filler.
        num_symbols: The symbols are 1 .. ``num_symbols``, all ids but the filler if None.
        trigger: The trigger's symbols; the last symbol if None.
        target_length: Symbols to predict. A model predicts the first one at the end of the second
            trigger and the others at as many places of filler behind it.
        noise_length: Symbols between trigger and target.
        seed: Same seed, same rows.

    Returns:
        ``input_ids`` and ``labels``, int64 [num_examples, seq_len + target_length]. The last
        ``target_length`` columns are the only labels; the inputs there are filler, and at the last
        place, from which nothing is predicted, the last symbol of the target.

    Raises:
        ValueError: The parts do not fit into ``seq_len``, a symbol is outside of the vocabulary, a
            number is out of range, or there is no room for noise without the trigger.
        TypeError: The trigger is no list of whole numbers, or a number is not whole.
    """
    at_least("num_examples", num_examples, 1)
    at_least("target_length", target_length, 1)
    at_least("noise_length", noise_length, 0)
    at_least("vocab_size", vocab_size, 3)
    at_least("seed", seed, 0)
    known = _known_symbols(vocab_size, num_symbols)
    triggers = _trigger(trigger, known)
    parts = 2 * len(triggers) + noise_length + target_length
    at_least("seq_len", seq_len, 1)
    if seq_len < parts:
        raise ValueError(
            f"seq_len must be at least {parts} to hold two triggers of {len(triggers)}, "
            f"{noise_length} symbols between trigger and target and a target of {target_length}, "
            f"got {seq_len}; raise it, or shorten them"
        )
    rng = np.random.default_rng(seed)
    input_ids = _noise(rng, (num_examples, seq_len + target_length), known, triggers)
    first = rng.integers(0, seq_len - parts + 1, size=num_examples)
    last = seq_len - len(triggers)
    rows, barren = np.arange(num_examples), 0
    while len(rows):
        places = first[rows, None] + np.arange(len(triggers))
        input_ids[rows[:, None], places] = triggers
        input_ids[rows, last:seq_len] = triggers
        if len(triggers) == 1:  # the noise holds none
            break
        found = _occurrences(input_ids[rows, :seq_len], triggers)
        np.put_along_axis(found, first[rows, None], False, axis=1)
        found[:, last] = False
        wrong = found.any(axis=1)
        barren = 0 if not wrong.all() else barren + len(rows)
        if barren >= _DRAWS:
            raise ValueError(
                f"trigger must be easy to avoid in {seq_len} symbols, and {barren} draws from "
                f"1 .. {known} gave no sequence that holds {triggers.tolist()} exactly twice; give "
                "more symbols, a longer trigger or a shorter seq_len"
            )
        rows, found = rows[wrong], found[wrong]
        drawn = _noise(rng, (len(rows), input_ids.shape[1]), known, triggers)
        input_ids[rows] = np.where(_to_redraw(found, triggers, drawn), drawn, input_ids[rows])
    begin = first + len(triggers) + noise_length
    target = np.take_along_axis(input_ids, begin[:, None] + np.arange(target_length), axis=1)
    input_ids[:, seq_len:-1] = 0
    input_ids[:, -1] = target[:, -1]
    labels = np.full_like(input_ids, IGNORED)
    labels[:, seq_len:] = target
    return input_ids, labels


def induction_heads_zero() -> tuple[np.ndarray, np.ndarray]:
    """Return the COFFEE paper's IH0: all eight sequences of length 4 of 0, 1, 2 with trigger 0.

    The paper's symbols 1, 2, 3, one less each: its model has three embeddings, so that no id is
    left for a filler that is never read.

    Returns:
        ``input_ids`` and ``labels``, int64 [8, 5], as :func:`induction_heads` gives them.
    """
    input_ids = np.array(
        [
            row
            for target in (1, 2)
            for noise in (1, 2)
            for row in ((0, target, noise, 0, target), (noise, 0, target, 0, target))
        ],
        dtype=np.int64,
    )
    labels = np.full_like(input_ids, IGNORED)
    labels[:, -1] = input_ids[:, -1]
    return input_ids, labels


def induction_documents(*, seq_len: int, **metadata: Any) -> dict[str, Dataset]:
    """Return :func:`induction_heads` for lm-eval, in symbols: one document a row.

    :class:`ssmzoo.tasks.answers.SymbolAnswers` asks for an answer's symbols one by one.
    """
    made = own_arguments(induction_heads, metadata)
    input_ids, labels = induction_heads(seq_len=seq_len, **made)
    return lm_eval_split(
        context=[symbols(row[:seq_len]) for row in input_ids],
        answer=[f" {symbols(row[seq_len:])}" for row in labels],
    )


def induction_zero_documents(**_: Any) -> dict[str, Dataset]:
    """Return the eight sequences of IH0 for lm-eval, in symbols."""
    input_ids, labels = induction_heads_zero()
    return lm_eval_split(
        context=[symbols(row[:-1]) for row in input_ids],
        answer=[f" {symbols(row[-1:])}" for row in labels],
    )


def induction_text_documents(
    *, num_examples: int, seq_len: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """Return induction heads in plain characters: ``q w # v z ... #``, to be answered ``v``.

    The choices are the 26 letters, in every document.
    """
    input_ids, _labels = induction_heads(num_examples, seq_len=seq_len, vocab_size=28, seed=seed)
    alphabet = np.array([" ", *LETTERS, "#"])
    return lm_eval_split(
        context=[" ".join(alphabet[row[:-1]]) for row in input_ids],
        choices=[list(LETTERS)] * num_examples,
        answer=(input_ids[:, -1] - 1).tolist(),
    )


def _known_symbols(vocab_size: int, num_symbols: int | None) -> int:
    known = vocab_size - 1 if num_symbols is None else num_symbols
    at_least("num_symbols", known, 2)
    if known >= vocab_size:
        raise ValueError(
            f"num_symbols must be at most vocab_size - 1 = {vocab_size - 1}, got {known}"
        )
    return known


def _trigger(trigger: Sequence[int] | None, known: int) -> np.ndarray:
    if trigger is None:
        return np.array([known])
    found = np.array(trigger, dtype=object)
    if found.ndim != 1 or not all(type(x) is int or isinstance(x, np.integer) for x in found):
        raise TypeError(f"trigger must be a list of symbols, as [7], got {trigger!r}")
    if not len(found) or not all(1 <= x <= known for x in found):
        raise ValueError(
            f"trigger must consist of symbols of 1 .. {known}, got {found.tolist()}; choose among "
            "them, or raise vocab_size and num_symbols"
        )
    return found.astype(np.int64)


def _noise(
    rng: np.random.Generator, shape: tuple[int, int], known: int, trigger: np.ndarray
) -> np.ndarray:
    """Draw symbols; where the trigger is one symbol, all others."""
    if len(trigger) > 1:
        return rng.integers(1, known + 1, size=shape)
    drawn = rng.integers(1, known, size=shape)
    return drawn + (drawn >= trigger[0])


def _occurrences(rows: np.ndarray, trigger: np.ndarray) -> np.ndarray:
    """Return where the trigger begins in each row [n, places]."""
    windows = np.lib.stride_tricks.sliding_window_view(rows, len(trigger), axis=1)
    return (windows == trigger).all(axis=2)


def _to_redraw(found: np.ndarray, trigger: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return which symbols to draw again so that all sequences without the trigger stay alike.

    The whole row; but where no two triggers can overlap, those that are in one are enough (partial
    rejection sampling, Guo, Jerrum and Liu, 2017).
    """
    again = np.zeros(rows.shape, dtype=bool)
    if any((trigger[k:] == trigger[:-k]).all() for k in range(1, len(trigger))):
        again[:] = True
    for k in range(len(trigger)):
        again[:, k : k + found.shape[1]] |= found
    return again
