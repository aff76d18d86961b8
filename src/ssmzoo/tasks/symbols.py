"""The tokenizer of models that are trained on token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssmzoo.tasks.common import at_least

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def symbol_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of models trained on token ids: symbol ``t17`` is id 17.

    A text is symbols between blanks; any other raises ValueError. A model's ``vocab_size`` is the
    tokenizer's length; padding and end of text are the filler, ``t0``.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    from ssmzoo.tasks.strict_symbols import StrictSymbols

    at_least("vocab_size", vocab_size, 1)
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab_size)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return StrictSymbols(
        tokenizer_object=tokenizer, padding_side="left", pad_token="t0", eos_token="t0"
    )


def symbol_count(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return how many symbols a :func:`symbol_tokenizer` holds, None for any other tokenizer."""
    vocab = tokenizer.get_vocab()
    return len(vocab) if all(vocab.get(f"t{i}") == i for i in range(len(vocab))) else None
