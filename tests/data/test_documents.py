"""What is a document, however it comes: stored or streamed, by folder, glob or link."""

import errno
import gzip
import json
import os
from itertools import chain, product

import pyarrow
import pyarrow.parquet
import pytest

from ssmzoo.data import documents
from ssmzoo.data.documents import documents_of
from ssmzoo.data.paths import expand
from ssmzoo.data.readers import read_files
from ssmzoo.evaluation.text import read_documents
from ssmzoo.recipe import DataSection

MARK = "\ufeff"
TEXTS = ["ant", f"bee {MARK}", "cät", "dodo\nelk"]  # within a text the character is text


def written(folder, kind, ends):
    """Write the texts as files of a kind; return the recipe's fields that read them."""
    folder.mkdir()
    marked = [*(MARK + text for text in TEXTS), "", MARK]
    if kind == "text":
        for i, text in enumerate(marked):
            (folder / f"{i}.txt").write_text(text, encoding="utf-8", newline="")
        return {"text": [str(folder)]}
    records = [json.dumps({"text": text}, ensure_ascii=False) for text in marked]
    if kind == "parquet":
        table = pyarrow.table({"text": marked})
        pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
        return {"parquet": [str(folder / "a.parquet")]}
    if kind == "dataset":
        (folder / "train.jsonl").write_text("\n".join(records), encoding="utf-8")
        return {"dataset": str(folder)}
    name, opener = ("a.jsonl.gz", gzip.open) if kind == "gz" else ("a.jsonl", open)
    with opener(folder / name, "wt", encoding="utf-8", newline="") as file:
        file.write(MARK + ends.join([*records[:2], "", *records[2:]]))
    return {"jsonl": [str(folder / name)]}


CASES = [
    ("text", "\n", False),
    *((kind, "\n", streamed) for kind in ("parquet", "dataset") for streamed in (False, True)),
    *product(("jsonl", "gz"), ("\n", "\r\n"), (False, True)),
]


@pytest.mark.parametrize(("kind", "ends", "streaming"), CASES)
def test_every_source_gives_the_same_texts(kind, ends, streaming, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(documents, "SHARD_BYTES", 7)
    fields = written(tmp_path / "data", kind, ends)
    found = documents_of(DataSection.model_validate({**fields, "streaming": streaming}))
    manifest = found.find(None)
    if streaming:
        texts = [*chain.from_iterable(open_shard(None) for open_shard in found.shards(manifest))]
    else:
        texts = [text for _, text in found.training(manifest)]
    assert texts == TEXTS


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_stream_goes_on_at_any_line_however_it_is_cut(ends, tmp_path, monkeypatch):
    fields = written(tmp_path / "data", "jsonl", ends)
    for size in range(1, 80):
        monkeypatch.setattr(documents, "SHARD_BYTES", size)
        found = documents_of(DataSection.model_validate({**fields, "streaming": True}))
        shards = found.shards(found.find(None))
        texts = []
        for open_shard in shards:
            shard = open_shard(None)
            for text in shard:
                texts.append(text)
                rest = [*open_shard(json.loads(json.dumps(shard.position())))]
                later = chain.from_iterable(p(None) for p in shards[shards.index(open_shard) + 1 :])
                assert [*texts, *rest, *later] == TEXTS
        assert texts == TEXTS


def test_a_folder_and_its_globs_give_the_same_files_through_links(tmp_path, caplog, monkeypatch):
    corpus, beside = tmp_path / "corpus", tmp_path / "beside"
    for folder in (corpus / "deep" / "er", beside, corpus / ".hidden", corpus / "__pycache__"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("ant")
    (corpus / "linked").symlink_to(beside)
    (corpus / "again").symlink_to(corpus / "deep")  # whose files are there already
    (corpus / "deep" / "loop").symlink_to(corpus)
    (corpus / "copy.txt").symlink_to(corpus / "deep" / "er" / "a.txt")
    expected = [corpus / "copy.txt", corpus / "linked" / "a.txt"]
    for pattern in ("", "/", "/**", "/**/*", "/**/*.txt"):
        assert expand([f"{corpus}{pattern}"], "data.text") == expected
    assert expand([f"{corpus}/**/er/*.txt"], "data.text") == [corpus / "deep" / "er" / "a.txt"]
    assert expand([f"{tmp_path}/*/**/a.txt"], "data.text") == [
        beside / "a.txt",
        expected[0].resolve(),
    ]
    monkeypatch.chdir(corpus)
    assert expand(["**/*.txt"], "TEXT") == [file.relative_to(corpus) for file in expected]
    assert caplog.text == ""
    (corpus / "gone.txt").symlink_to(tmp_path / "nowhere")
    for pattern in ("", "/*.txt"):
        assert expand([f"{corpus}{pattern}"], "data.text")[0] == expected[0]
    assert caplog.text.count("left out links that lead nowhere: 1, the first is") == 2


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "shut").mkdir()
    (tmp_path / "a.txt").write_text("ant")
    scandir = os.scandir

    def refuse(place):
        if str(place).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"data\.text: .*/shut cannot be read: Permission denied"):
        expand([str(tmp_path)], "data.text")


@pytest.mark.parametrize("first", [True, False])
def test_a_column_is_found_by_its_name_beside_a_struct_of_the_same(first, tmp_path):
    columns = {"meta": [{"text": "no", "id": 1}], "meta.text": ["yes"], "meta.text.x": ["no"]}
    if first:
        columns = dict(reversed(columns.items()))
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    read = read_files("parquet", [tmp_path / "a.parquet"], "meta.text", skip_binary=False)
    assert [text for _, text in read] == ["yes"]


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(LookupError, match=r"a\.parquet must have one column 'text', got 2 among"):
        list(read_files("parquet", [tmp_path / "a.parquet"], "text", skip_binary=False))


@pytest.mark.parametrize("kind", ["text", "jsonl", "gz", "parquet"])
def test_scoring_reads_the_same_documents_as_training(kind, tmp_path):
    written(tmp_path / "data", kind, "\n")
    assert read_documents(tmp_path / "data") == TEXTS
