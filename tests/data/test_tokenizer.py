from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ssmzoo.checkpoints.load import vocabulary_size
from ssmzoo.data.tokenizer import (
    byte_tokenizer,
    encoder,
    is_byte_tokenizer,
    named_tokenizer,
    tokenizer_digest,
)
from ssmzoo.data.tokens import read_store, write_store
from ssmzoo.tasks import symbol_tokenizer

TEXTS = [
    "",
    "plain",
    " a  b ,  .\r\n\t\n ",
    "héllo wörld 日本語 🎉 \u202e\ufeff\x00\x7f",
    "a special token spelt out: <|eos|><|bos|><|pad|>",
    "".join(map(chr, range(0x250))),
]


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_any_text_comes_back_unchanged_and_ids_are_bytes(reloaded, text):
    for tokenizer in (byte_tokenizer(), reloaded):
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([257, *ids, 258], skip_special_tokens=True) == text


def test_special_tokens_follow_the_bytes(reloaded):
    for tokenizer in (byte_tokenizer(), reloaded):
        assert len(tokenizer) == 259
        special = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
        assert special == (256, 257, 258)
        assert tokenizer.padding_side == "left"


def test_a_byte_tokenizer_is_known_wherever_it_comes_from(reloaded):
    assert is_byte_tokenizer(reloaded)
    assert tokenizer_digest(reloaded) == tokenizer_digest(byte_tokenizer())
    assert not is_byte_tokenizer(word_tokenizer())


def word_tokenizer(more=(), **special):
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "one", "two"])}
    backend = Tokenizer(models.WordLevel(words | dict(more), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)


@pytest.mark.parametrize("greatest", [5, 300, 65_535, 65_536, 70_000])
def test_ids_beyond_a_gap_are_stored_as_they_are(greatest, tmp_path):
    tokenizer = word_tokenizer({"rare": greatest}, bos_token="<s>", eos_token="</s>")
    assert vocabulary_size(tokenizer) == greatest + 1
    (document,) = encoder(tokenizer)(["one rare"])
    assert document.tolist() == [1, 3, greatest, 2]
    write_store(iter([("", "one rare")]), tokenizer, tmp_path / "cache", "key", "data.text", 0)
    assert read_store(tmp_path / "cache").tokens[0:4].tolist() == [1, 3, greatest, 2]
    assert document.dtype == (np.uint16 if greatest < 1 << 16 else np.uint32)


def test_documents_begin_and_end_with_the_special_tokens_there_are(reloaded):
    fast = encoder(byte_tokenizer())
    assert [list(d) for d in fast(["ab", "é"])] == [[257, 97, 98, 258], [257, 195, 169, 258]]
    both = encoder(word_tokenizer(bos_token="<s>", eos_token="</s>"))
    assert [list(d) for d in both(["one two", "two"])] == [[1, 3, 4, 2], [1, 4, 2]]
    neither = encoder(word_tokenizer())
    assert [list(d) for d in neither(["one two"])] == [[3, 4]]
    assert fast(["a"])[0].dtype == np.uint16


def test_the_fast_path_for_bytes_equals_the_tokenizer(reloaded):
    documents = encoder(reloaded)(TEXTS)
    for text, document in zip(TEXTS, documents, strict=True):
        assert [257, *reloaded(text)["input_ids"], 258] == list(document)


def test_a_missing_tokenizer_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LookupError, match="no tokenizer loads from"):
        named_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"holds none; save it there .* as data\.tokenizer$"):
        named_tokenizer(str(tmp_path))
    # one that needs no file of its own
    (tmp_path / "config.json").write_text('{"model_type": "canine"}')
    assert named_tokenizer(str(tmp_path)).decode([104, 105]) == "hi"


def test_the_tokenizer_of_a_model_of_the_zoo_loads_in_silence(capfd):
    named_tokenizer(str(Path(__file__).parents[2] / "model_cards/small/longhorn-text"))
    assert capfd.readouterr() == ("", "")


def test_a_text_that_a_tokenizer_cannot_read_is_its_error(tmp_path):
    symbol_tokenizer(4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the tokenizer cannot read the text: .*UNK"):
        encoder(AutoTokenizer.from_pretrained(tmp_path))(["no symbols"])
