"""Tokenizers for training: bytes by default, or any Hugging Face one.

The byte tokenizer is an ordinary ``tokenizers`` file: AutoTokenizer loads it without our code. A
byte's id is its value, and special tokens written out in a text are text, never special.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ssmzoo.checkpoints.load import (
    ask_again,
    check_holds_tokenizer,
    is_local,
    vocabulary_size,
)
from ssmzoo.checkpoints.trust import refuse_requests
from ssmzoo.environment.messages import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
Encoder: TypeAlias = Callable[[Sequence[str]], list[np.ndarray]]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer: 256 bytes, then ``<|pad|>``, ``<|bos|>``, ``<|eos|>``.

    Any text comes back from a round trip unchanged. No special token is added when encoding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        padding_side="left",
        **SPECIAL,
    )


def named_tokenizer(name: str, argument: str = "data.tokenizer") -> PreTrainedTokenizerBase:
    """Return the byte tokenizer for ``"bytes"``, else the one that AutoTokenizer finds.

    Args:
        name: ``"bytes"``, a folder or a Hub id.
        argument: Where the name was given, for errors.

    Raises:
        LookupError: Nothing is found under that name, or the Hub does not answer.
        ValueError: It is a folder that holds none.
    """
    from transformers import AutoTokenizer

    if name == "bytes":
        return byte_tokenizer()

    import ssmzoo.auto  # noqa: F401  # a model's folder names its family

    local = is_local(name, argument)
    try:
        refuse_requests(name)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=local)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            check_holds_tokenizer(name, name, "; or name another one as data.tokenizer")
        ask_again()
        raise LookupError(
            f"{argument}: no tokenizer loads from {name!r}: {first_line(error)}"
        ) from error


@contextmanager
def tokenizer_errors(failure: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Turn errors of a tokenizer, such as a missing unknown token, into a ValueError."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        from ssmzoo.tasks import symbol_count

        count = symbol_count(tokenizer)
        reads = f"; it reads symbols with blanks between, t0 .. t{count - 1}" if count else ""
        raise ValueError(f"{failure}: {error}{reads}") from error


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Return a function from texts to token arrays, one each, as documents.

    A document begins with the tokenizer's BOS token and ends with its EOS token where it has them:
    a state that starts from zero needs a token to predict the first one from.
    """
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    dtype = token_dtype(vocabulary_size(tokenizer))

    def encode_bytes(texts: Sequence[str]) -> list[np.ndarray]:
        documents = []
        for text in texts:
            content = np.frombuffer(text.encode("utf-8"), np.uint8)
            tokens = np.empty(len(content) + 2, dtype)
            tokens[0], tokens[1:-1], tokens[-1] = bos[0], content, eos[0]
            documents.append(tokens)
        return documents

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        with tokenizer_errors("the tokenizer cannot read the text", tokenizer):
            ids = tokenizer(
                list(texts),
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
        return [np.array([*bos, *document, *eos], dtype) for document in ids]

    return encode_bytes if is_byte_tokenizer(tokenizer) else encode


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether this is :func:`byte_tokenizer`'s, wherever it was loaded from."""
    expected = {c: byte for byte, c in enumerate(_byte_characters())}
    expected |= {token: 256 + i for i, token in enumerate(SPECIAL.values())}
    return len(tokenizer) == len(expected) and tokenizer.get_vocab() == expected


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the smallest type that tokens of such a vocabulary are stored in."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest that changes when the tokenizer encodes differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab()))
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(f"{text}{special}".encode()).hexdigest()


def _byte_characters() -> list[str]:
    """Return the character by which a ByteLevel vocabulary writes each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]
