"""Small problems after MAD (arXiv 2403.17844), each for one ability of a sequence model.

Every problem returns ``input_ids`` and ``labels``, int64 [num_examples, length of a row]; the same
seed gives the same rows. ``labels[:, t]`` is what position ``t - 1`` must predict. The
paper scores an encoder on compression; here a language model is asked for symbols by place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ssmzoo.environment.messages import suggestion
from ssmzoo.tasks.common import IGNORED, at_least, distinct, lm_eval_split, symbols

if TYPE_CHECKING:
    from datasets import Dataset

Rows = tuple[np.ndarray, np.ndarray]


def noisy_recall(
    num_examples: int,
    *,
    seq_len: int = 128,
    vocab_size: int = 32,
    num_noise: int = 15,
    noise: float = 0.2,
    seed: int,
) -> Rows:
    """Make recall among noise: pairs of a key and its value, single symbols of noise between them.

    Every row has a dictionary of its own. Where a key repeats, its value, the next symbol, is to be
    predicted.

    Args:
        vocab_size: Ids; half of those that are neither filler nor noise are keys, half values.
        num_noise: How many ids are noise: the last ones.
        noise: Share of noise among the places where a pair may begin; 0 is plain recall.

    Raises:
        ValueError: An argument is out of range, or no ids are left for keys and values.
    """
    _check_sizes(num_examples, seq_len, seed)
    if not 0 <= noise < 1:
        raise ValueError(f"noise must be at least 0 and below 1, got {noise}")
    keys = (vocab_size - 1 - num_noise) // 2
    if keys < 1 or num_noise < (noise > 0):
        raise ValueError(
            "vocab_size must leave a key and a value besides filler and num_noise = "
            f"{num_noise} symbols of noise, got {vocab_size}"
        )
    rng = np.random.default_rng(seed)
    rows = np.arange(num_examples)
    values = rng.integers(keys + 1, 2 * keys + 1, size=(num_examples, keys + 1))
    seen = np.zeros((num_examples, keys + 1), bool)
    input_ids = np.zeros((num_examples, seq_len), np.int64)
    labels = np.full_like(input_ids, IGNORED)
    pending = np.zeros(num_examples, np.int64)  # the key whose value comes next
    for t in range(seq_len):
        answers = pending > 0
        value = values[rows, pending]
        labels[answers & seen[rows, pending], t] = value[answers & seen[rows, pending]]
        seen[rows[answers], pending[answers]] = True
        drawn = rng.integers(1, keys + 1, size=num_examples)
        noisy = rng.random(num_examples) < noise
        if num_noise:
            filler = rng.integers(2 * keys + 1, 2 * keys + 1 + num_noise, size=num_examples)
            begins = np.where(noisy, filler, drawn)
        else:
            begins = drawn
        input_ids[:, t] = np.where(answers, value, begins)
        pending = np.where(answers | noisy, 0, drawn)
    return input_ids, labels


def fuzzy_recall(
    num_examples: int,
    *,
    seq_len: int = 128,
    vocab_size: int = 16,
    num_pairs: int = 6,
    longest: int = 3,
    seed: int,
) -> Rows:
    """Make recall of motifs: keys and values of one to ``longest`` symbols, drawn for every row.

    No key begins another one. If a key comes again, every symbol of its value is to be predicted.

    Args:
        vocab_size: Ids; half of those that are no filler make up keys, half values.
        num_pairs: Pairs in a row's dictionary.
        longest: Symbols of the longest motif.

    Raises:
        ValueError: An argument is out of range, or too few symbols for so many keys.
    """
    _check_sizes(num_examples, seq_len, seed)
    at_least("num_pairs", num_pairs, 1)
    at_least("longest", longest, 1)
    half = (vocab_size - 1) // 2
    if half < num_pairs:
        raise ValueError(
            f"vocab_size must be at least {2 * num_pairs + 1} for {num_pairs} keys that begin "
            f"differently, got {vocab_size}"
        )
    rng = np.random.default_rng(seed)
    input_ids = np.zeros((num_examples, seq_len), np.int64)
    labels = np.full_like(input_ids, IGNORED)
    # keys begin with different symbols, so that none begins another one
    firsts = distinct(rng, num_examples, num_pairs, 1, half + 1)
    lengths = rng.integers(1, longest + 1, size=(num_examples, num_pairs, 2))
    key_tails = rng.integers(1, half + 1, size=(num_examples, num_pairs, longest - 1))
    value_motifs = rng.integers(half + 1, 2 * half + 1, size=(num_examples, num_pairs, longest))
    order = rng.integers(num_pairs, size=(num_examples, seq_len))
    for row in range(num_examples):
        at, seen = 0, [False] * num_pairs
        for pair in order[row]:
            key_length, value_length = lengths[row, pair]
            key = [firsts[row, pair], *key_tails[row, pair, : key_length - 1]]
            value = value_motifs[row, pair, :value_length]
            end = at + key_length + value_length
            if end > seq_len:
                break
            input_ids[row, at:end] = [*key, *value]
            if seen[pair]:
                labels[row, at + key_length : end] = value
            seen[pair] = True
            at = end
    return input_ids, labels


def selective_copying(
    num_examples: int,
    *,
    seq_len: int = 256,
    vocab_size: int = 16,
    num_tokens: int = 16,
    seed: int,
) -> Rows:
    """Make selective copying: symbols scattered among filler, to be predicted in order at the end.

    The last ``num_tokens + 1`` places ask: the symbol ``vocab_size - 1``, once for each answer.

    Args:
        vocab_size: Ids; 1 .. vocab_size - 2 are copied.
        num_tokens: Symbols to copy.

    Raises:
        ValueError: An argument is out of range, or the symbols do not fit.
    """
    _check_sizes(num_examples, seq_len, seed)
    at_least("vocab_size", vocab_size, 3)
    at_least("num_tokens", num_tokens, 1)
    context = seq_len - num_tokens - 1
    if context < num_tokens:
        raise ValueError(
            f"seq_len must be at least {2 * num_tokens + 1} to hold and ask for {num_tokens} "
            f"symbols, got {seq_len}"
        )
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocab_size - 1, size=(num_examples, num_tokens))
    places = np.sort(distinct(rng, num_examples, num_tokens, 0, context), axis=1)
    input_ids = np.zeros((num_examples, seq_len), np.int64)
    np.put_along_axis(input_ids, places, tokens, axis=1)
    input_ids[:, context:-1] = vocab_size - 1
    labels = np.full_like(input_ids, IGNORED)
    labels[:, context + 1 :] = tokens
    return input_ids, labels


def compression(
    num_examples: int, *, num_tokens: int = 31, vocab_size: int = 48, seed: int
) -> Rows:
    """Make compression: symbols, a mark, then every place once, in any order, to be answered.

    Ids 1 .. vocab_size - 2 - num_tokens are symbols, the next one the mark, the last ``num_tokens``
    the places. All answers must have gone through the state at the mark.

    Args:
        num_tokens: Symbols a row.
        vocab_size: Ids.

    Returns:
        ``input_ids`` and ``labels``, int64 [num_examples, 3 num_tokens + 1]: a place is followed by
        its answer.

    Raises:
        ValueError: An argument is out of range, or no ids are left for symbols.
    """
    _check_sizes(num_examples, 1, seed)
    at_least("num_tokens", num_tokens, 1)
    kinds = vocab_size - 2 - num_tokens
    if kinds < 2:
        raise ValueError(
            f"vocab_size must be at least {num_tokens + 4} for {num_tokens} places, a mark and two "
            f"symbols, got {vocab_size}"
        )
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, kinds + 1, size=(num_examples, num_tokens))
    order = rng.permuted(np.tile(np.arange(num_tokens), (num_examples, 1)), axis=1)
    answers = np.take_along_axis(tokens, order, axis=1)
    input_ids = np.zeros((num_examples, 3 * num_tokens + 1), np.int64)
    input_ids[:, :num_tokens] = tokens
    input_ids[:, num_tokens] = kinds + 1
    input_ids[:, num_tokens + 1 :: 2] = order + kinds + 2
    input_ids[:, num_tokens + 2 :: 2] = answers
    labels = np.full_like(input_ids, IGNORED)
    labels[:, num_tokens + 2 :: 2] = answers
    return input_ids, labels


def memorization(
    num_examples: int,
    *,
    seq_len: int = 32,
    vocab_size: int = 256,
    dictionary: int = 0,
    seed: int,
) -> Rows:
    """Make memorization: keys, each followed by a query for the value it has in all rows.

    A key is followed by filler, so nothing in the row helps: the dictionary must be learnt.

    Args:
        vocab_size: Ids; half of those that are no filler are keys, half values.
        dictionary: Seed of the dictionary.

    Raises:
        ValueError: An argument is out of range.
    """
    _check_sizes(num_examples, seq_len, seed)
    at_least("seq_len", seq_len, 2)
    at_least("vocab_size", vocab_size, 3)
    at_least("dictionary", dictionary, 0)
    half = (vocab_size - 1) // 2
    values = np.random.default_rng(dictionary).integers(half + 1, 2 * half + 1, size=half + 1)
    keys = np.random.default_rng(seed).integers(1, half + 1, size=(num_examples, seq_len // 2))
    input_ids = np.zeros((num_examples, seq_len), np.int64)
    labels = np.full_like(input_ids, IGNORED)
    input_ids[:, : 2 * keys.shape[1] : 2] = keys
    labels[:, 1 : 2 * keys.shape[1] : 2] = values[keys]
    return input_ids, labels


MAD_PROBLEMS = {
    "noisy_recall": noisy_recall,
    "fuzzy_recall": fuzzy_recall,
    "selective_copying": selective_copying,
    "compression": compression,
    "memorization": memorization,
}


def mad_documents(
    *,
    problem: str,
    num_examples: int,
    vocab_size: int,
    seed: int,
    arguments: dict[str, Any] | None = None,
    **_: Any,
) -> dict[str, Dataset]:
    """Return a problem for lm-eval, in symbols: one document a row, asking one of its answers.

    Args:
        problem: One of :data:`MAD_PROBLEMS`.
        num_examples: Documents; a row that asks nothing makes none.
        vocab_size: The problem's.
        seed: Of rows and of which answer is asked.
        arguments: The problem's other arguments.
        **_: lm-eval passes all of a task's metadata.

    Raises:
        LookupError: No such problem.
    """
    if problem not in MAD_PROBLEMS:
        raise LookupError(
            f"no problem {problem!r}{suggestion(problem, MAD_PROBLEMS)}; there are "
            f"{', '.join(MAD_PROBLEMS)}"
        )
    make: Any = MAD_PROBLEMS[problem]
    input_ids, labels = make(num_examples, vocab_size=vocab_size, seed=seed, **(arguments or {}))
    rng = np.random.default_rng([seed, 1])
    contexts, answers = [], []
    for row, label in zip(input_ids, labels, strict=True):
        asked = np.flatnonzero(label != IGNORED)
        if len(asked):
            place = rng.choice(asked)
            contexts.append(symbols(row[:place]))
            answers.append(f" t{label[place]}")
    return lm_eval_split(context=contexts, answer=answers)


def _check_sizes(num_examples: int, seq_len: int, seed: int) -> None:
    at_least("num_examples", num_examples, 1)
    at_least("seq_len", seq_len, 1)
    at_least("seed", seed, 0)
