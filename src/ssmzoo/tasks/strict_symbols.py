"""The class of :func:`ssmzoo.tasks.symbol_tokenizer`; importing it needs transformers."""

from __future__ import annotations

from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerFast


class StrictSymbols(PreTrainedTokenizerFast):
    """A tokenizer of symbols that names the first one it does not hold."""

    def _encode_plus(self, text: Any, *args: Any, **options: Any) -> BatchEncoding:
        try:
            return super()._encode_plus(text, *args, **options)
        except Exception as error:
            vocab = self.get_vocab()
            words = (text if isinstance(text, str) else " ".join(map(str, text))).split()
            unknown = next((word for word in words if word not in vocab), None)
            if unknown is None:
                raise
            raise ValueError(
                f"text must be symbols from t0 to t{len(vocab) - 1} between blanks, got {unknown!r}"
            ) from error


# the name in a saved tokenizer's files: transformers loads it without our code
StrictSymbols.__name__ = PreTrainedTokenizerFast.__name__
