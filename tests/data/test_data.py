import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tests.data.test_tokenizer import word_tokenizer

from ssmzoo.data.readers import read_files
from ssmzoo.data.sources import data_source
from ssmzoo.data.tokenizer import byte_tokenizer, encoder
from ssmzoo.data.tokens import TokenStore
from ssmzoo.recipe import Recipe
from ssmzoo.tasks.common import IGNORED

BOS, EOS = 257, 258


def documents(count, seed=0):
    rng = np.random.default_rng(seed)
    words = ["ant", "bee", "cat", "dodo", "elk", "fox", "gnu"]
    return [f"{i}: " + " ".join(rng.choice(words, size=rng.integers(3, 40))) for i in range(count)]


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(documents(40)):
        (folder / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def make_recipe(seq_len=16, batch_size=4, batches=3, seed=0, **data):
    return Recipe.model_validate(
        {
            "model": {"config_of": "llama"},
            "data": data,
            "train": {
                "steps": 1,
                "batch_size": batch_size,
                "seq_len": seq_len,
                "lr": 1.0,
                "seed": seed,
            },
            "eval": {"batches": batches},
        }
    )


def opened(recipe, cache, rank=0, world=1, before=None):
    source = data_source(recipe)
    return source.open(cache, source.prepare(cache, before), rank=rank, world=world)


def segments(rows):
    """Every run of tokens between two seams."""
    found = []
    for ids, starts in zip(rows.input_ids, rows.starts, strict=True):
        bounds = [*np.flatnonzero(starts), len(ids)]
        found += [tuple(ids[a:b]) for a, b in pairwise(bounds)]
    return found


def test_an_epoch_holds_every_token_once_but_for_the_last_row(texts, tmp_path):
    recipe = make_recipe(text=[str(texts)])
    data = opened(recipe, tmp_path / "cache")
    whole = Counter()
    for document in encoder(byte_tokenizer())(documents(40)):
        whole.update(document.tolist())
    rows = data.train.next_batch(data.epoch_rows)
    got = Counter(rows.input_ids.ravel().tolist())
    assert not got - whole
    assert (whole - got).total() == whole.total() % 16


def test_documents_in_a_row_are_marked_and_no_loss_crosses_from_one_to_the_next(texts, tmp_path):
    data = opened(make_recipe(text=[str(texts)]), tmp_path / "cache")
    joined = ["".join(map(chr, d)) for d in encoder(byte_tokenizer())(documents(40))]
    rows = data.train.next_batch(data.epoch_rows)
    for segment in segments(rows):
        text = "".join(map(chr, segment))
        assert any(text in document for document in joined)
    assert rows.starts[:, 0].all()
    assert (rows.input_ids[:, 1:] == BOS).sum() == rows.starts[:, 1:].sum() > 10
    assert (rows.labels[rows.starts] == IGNORED).all()
    assert (rows.labels[~rows.starts] == rows.input_ids[~rows.starts]).all()
    assert rows.targets == (~rows.starts).sum()


def test_the_order_is_the_seeds_and_differs_between_epochs(texts, tmp_path):
    def epochs(seed):
        data = opened(make_recipe(text=[str(texts)], seed=seed), tmp_path / "cache")
        return [data.train.next_batch(data.epoch_rows).input_ids for _ in range(2)]

    one, same, other = epochs(0), epochs(0), epochs(1)
    assert (one[0] == same[0]).all()
    assert (one[1] == same[1]).all()
    assert (one[0] != one[1]).any()
    assert (one[0] != other[0]).any()


def test_a_position_continues_exactly_across_the_border_of_epochs(texts, tmp_path):
    recipe = make_recipe(text=[str(texts)])
    whole = opened(recipe, tmp_path / "cache").train
    count = len(whole) // 5 + 1
    expected = [whole.next_batch(5).input_ids for _ in range(2 * count)]
    for stop in (1, count - 1, count):
        first = opened(recipe, tmp_path / "cache").train
        for _ in range(stop):
            first.next_batch(5)
        second = opened(recipe, tmp_path / "cache").train
        second.seek(json.loads(json.dumps(first.position())))
        assert (second.next_batch(5).input_ids == expected[stop]).all()


def test_processes_share_the_rows_of_one_without_overlap(texts, tmp_path):
    recipe = make_recipe(text=[str(texts)], batch_size=8, validation=0.2)
    alone = opened(recipe, tmp_path / "cache")
    ranks = [opened(recipe, tmp_path / "cache", rank, 4) for rank in range(4)]
    for _ in range(5):
        together = np.concatenate([data.train.next_batch(2).input_ids for data in ranks])
        assert (together == alone.train.next_batch(8).input_ids).all()
    held_out = [np.concatenate([r.input_ids for r in data.validation]) for data in ranks]
    assert len({len(part) for part in held_out}) == 1
    one = np.concatenate([r.input_ids for r in alone.validation])
    assert (np.concatenate(held_out) == one[: len(held_out[0]) * 4]).all()


def test_held_out_documents_are_never_trained_on_whatever_the_seed(texts, tmp_path):
    chosen = []
    for seed in (0, 1):
        recipe = make_recipe(text=[str(texts)], validation=0.2, seed=seed, batches=1000)
        source = data_source(recipe)
        manifest = source.prepare(tmp_path / "cache")
        data = source.open(tmp_path / "cache", manifest)
        chosen.append(manifest["held_out"])
        # only document starts are sure to be told apart: their number stands there
        starts = [segment[:5] for segment in segments(data.train.next_batch(data.epoch_rows))]
        for name in manifest["held_out"]:
            head = (BOS, *Path(name).read_bytes()[:4])
            assert head not in starts
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 8


def test_a_copy_of_a_held_out_document_is_held_out_too(texts, tmp_path):
    for path in list(texts.iterdir()):
        (texts / f"copy-{path.name}").write_bytes(path.read_bytes())
    recipe = make_recipe(text=[str(texts)], validation=8)
    manifest = data_source(recipe).prepare(tmp_path / "cache")
    contents = Counter(Path(name).read_text() for name in manifest["held_out"])
    assert set(contents.values()) == {2}


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_files_are_not_trained_on_where_the_text_covers_them(streaming, tmp_path):
    for name, text in (("a", "ant " * 30), ("b", "bee " * 30)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    held_out = str(tmp_path / "b.jsonl")
    recipe = make_recipe(
        jsonl=[str(tmp_path / "*.jsonl")], validation=held_out, streaming=streaming
    )
    data = opened(recipe, tmp_path / "cache")
    trained = {i for ids in data.train.next_batch(6).input_ids for i in ids.tolist()}
    assert {chr(i) for i in trained if i < 128} == set("ant ")
    judged = {i for rows in data.validation for i in rows.input_ids.ravel().tolist()}
    assert {chr(i) for i in judged if i < 128} == set("be ")
    recipe = make_recipe(jsonl=[held_out], validation=held_out, streaming=streaming)
    with pytest.raises(ValueError, match=r"data\.(validation must leave documents|jsonl)"):
        opened(recipe, tmp_path / "other").train.next_batch(1)


def test_the_end_of_a_single_document_is_held_out(tmp_path):
    (tmp_path / "book.txt").write_text("a" * 900 + "b" * 100, encoding="utf-8")
    recipe = make_recipe(text=[str(tmp_path / "book.txt")], validation=0.1)
    data = opened(recipe, tmp_path / "cache")
    trained = set(data.train.next_batch(data.epoch_rows).input_ids.ravel().tolist())
    assert trained <= {BOS, ord("a"), ord("b")}
    held_out = {i for rows in data.validation for i in rows.input_ids.ravel().tolist()}
    assert held_out <= {ord("b"), EOS}


def split(store, validation):
    return store.split(validation, ends=store.holds_out_ends(validation))


@pytest.mark.parametrize("share", [0.001, 0.02])
def test_a_small_share_of_several_documents_is_whole_documents(share, texts, tmp_path):
    source = data_source(make_recipe(text=[str(texts)], validation=share))
    manifest = source.prepare(tmp_path / "cache")
    assert len(manifest["held_out"]) == 1
    data = source.open(tmp_path / "cache", manifest)
    rows = data.train.next_batch(data.epoch_rows)
    assert (rows.input_ids == EOS).sum() > 30  # of 39 documents, but for the last row


def test_the_ends_of_copies_and_of_a_few_long_documents_are_held_out():
    copies = TokenStore(np.arange(20), np.array([10, 10, 20]), np.array([5, 7, 5], np.uint64), [])
    kept, _, held_out = split(copies, 0.2)
    assert (kept.tolist(), held_out.tolist()) == ([[0, 8], [10, 18]], [[8, 10], [18, 20]])
    hashes = np.array([5, 7], np.uint64)
    kept, _, held_out = split(TokenStore(np.arange(2000), np.array([800, 2000]), hashes, []), 0.1)
    assert kept.tolist() == [[0, 720], [800, 1880]]
    assert held_out.tolist() == [[720, 800], [1880, 2000]]
    short = TokenStore(np.arange(1000), np.array([450, 1000]), hashes, [])
    assert split(short, 0.1)[1].tolist() == [0]  # whole, where ends would be of 45 and 55 tokens
    uneven = TokenStore(np.arange(9_010), np.array([9_000, 9_010]), hashes, [])
    assert uneven.holds_out_ends(0.3)
    assert not uneven.holds_out_ends(0.5)  # of as many documents as there are


def test_documents_stay_held_out_on_resume(tmp_path, texts):
    source = data_source(make_recipe(text=[str(texts)], validation=0.02))
    manifest = source.prepare(tmp_path / "cache")
    assert (manifest["ends"], len(manifest["held_out"])) == (False, 1)
    manifest["ends"] = True  # had they been held out
    again = source.prepare(tmp_path / "cache", manifest)
    assert (again["ends"], again["held_out"]) == (True, [])


@pytest.mark.parametrize("validation", [0.5, 1])
def test_documents_without_tokens_are_not_held_out(validation):
    hashes = np.array([9, 1, 8], np.uint64)
    store = TokenStore(np.arange(9), np.array([5, 5, 9]), hashes, [])
    kept, chosen, held_out = split(store, validation)
    assert chosen.tolist() == [2]
    assert held_out.tolist() == [[5, 9]]
    assert kept.tolist() == [[0, 5], [5, 5]]


def test_held_out_rows_without_anything_to_predict_are_refused(tmp_path):
    word_tokenizer().save_pretrained(tmp_path / "words")
    for name, text in (("a", "one two " * 40), ("b", "one")):
        lines = json.dumps({"text": text}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(lines * 20, encoding="utf-8")
    recipe = make_recipe(
        jsonl=[str(tmp_path / "a.jsonl")],
        validation=[str(tmp_path / "b.jsonl")],
        tokenizer=str(tmp_path / "words"),
    )
    with pytest.raises(ValueError, match=r"data\.validation must hold out .* to predict, got none"):
        opened(recipe, tmp_path / "cache")


def test_records_in_a_folder_of_text_are_not_read_as_text(tmp_path):
    (tmp_path / "a.txt").write_text("abc" * 400, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "abc"}\n' * 40, encoding="utf-8")
    recipe = make_recipe(text=[str(tmp_path)])
    with pytest.raises(ValueError, match=r"data\.text reads plain text, and .*b\.jsonl is jsonl"):
        data_source(recipe).prepare(tmp_path / "cache")
    opened(make_recipe(text=[str(tmp_path / "**" / "*.txt")]), tmp_path / "cache")


def write_records(folder):
    folder.mkdir()  # of files that were put together, with the mark that Windows begins one with
    records = [{"body": text, "id": i} for i, text in enumerate(documents(40))]
    lines = [json.dumps(record) + "\n" for record in records]
    for name, opener, part in (
        ("a.jsonl", open, lines[:15]),
        ("b.jsonl.gz", gzip.open, lines[15:]),
    ):
        with opener(folder / name, "wt", encoding="utf-8") as file:
            file.writelines(["\ufeff\n", *part[:5], "\ufeff", *part[5:], "\n"])
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table.slice(0, 15), folder / "a.parquet")
    pyarrow.parquet.write_table(table.slice(15), folder / "b.parquet", row_group_size=7)
    return folder


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


def streamed(recipe, cache, rank=0, world=1):
    return opened(recipe, cache, rank, world).train


def test_a_stream_continues_exactly_wherever_it_was_left(tmp_path, offline):
    folder = write_records(tmp_path / "records")
    fields = {"text_field": "body", "streaming": True, "shuffle_buffer": 6}
    recipe = make_recipe(parquet=[str(folder / "*.parquet")], seq_len=64, **fields)
    whole = streamed(recipe, tmp_path / "cache")
    taken = [whole.next_batch(7) for _ in range(30)]
    assert whole.position()["lanes"]["0"]["turn"] >= whole.position()["shards"]
    position = streamed(recipe, tmp_path / "cache").position()
    for rows in taken:  # documents are told apart where they begin, and no loss crosses there
        assert (rows.starts[:, 1:] == (rows.input_ids[:, 1:] == BOS)).all()
        assert (rows.labels == np.where(rows.starts, IGNORED, rows.input_ids)).all()
    for rows in taken:  # killed and resumed after every step
        resumed = streamed(recipe, tmp_path / "cache")
        resumed.seek(json.loads(json.dumps(position)))
        again = resumed.next_batch(7)
        assert (again.input_ids == rows.input_ids).all()
        assert (again.starts == rows.starts).all()
        position = resumed.position()


def test_documents_of_a_single_shard_come_in_the_seeds_order(tmp_path, offline):
    fields = {"parquet": [str(write_records(tmp_path / "records") / "a.parquet")]}
    fields |= {"text_field": "body", "streaming": True, "shuffle_buffer": 15}
    first, again, other = (
        streamed(make_recipe(seed=seed, **fields), tmp_path / "cache").next_batch(8)
        for seed in (0, 0, 1)
    )
    assert (first.input_ids == again.input_ids).all()
    assert (first.input_ids != other.input_ids).any()


def test_the_first_documents_of_a_stream_can_be_held_out(tmp_path, offline):
    folder = write_records(tmp_path / "records")
    recipe = make_recipe(
        parquet=[str(folder / "*.parquet")],
        text_field="body",
        streaming=True,
        validation=5,
        seq_len=4,
        batches=1000,
    )
    data = opened(recipe, tmp_path / "cache")
    heads = {s for s in segments(data.train.next_batch(1500)) if s[0] == BOS and len(s) == 4}
    held_out = {(BOS, *f"{i}: ".encode()[:3]) for i in range(5)}
    assert heads
    assert not heads & held_out
    seen = {s[:4] for rows in data.validation for s in segments(rows) if s[0] == BOS}
    assert held_out & seen


def test_validation_paths_and_splits_are_read(texts, tmp_path, offline):
    (tmp_path / "held.txt").write_text("z" * 100, encoding="utf-8")
    recipe = make_recipe(text=[str(texts)], validation=str(tmp_path / "held.txt"))
    data = opened(recipe, tmp_path / "cache")
    ids = {i for rows in data.validation for i in rows.input_ids.ravel().tolist()}
    assert ids <= {ord("z"), BOS, EOS}

    folder, hub = write_records(tmp_path / "records"), tmp_path / "hub"
    hub.mkdir()
    (hub / "train-0.parquet").write_bytes((folder / "a.parquet").read_bytes())
    (hub / "test-0.parquet").write_bytes((folder / "b.parquet").read_bytes())
    for streaming in (False, True):
        recipe = make_recipe(
            dataset=str(hub), text_field="body", validation="test", streaming=streaming
        )
        assert opened(recipe, tmp_path / f"cache-{streaming}").validation


def test_a_tasks_rows_are_fresh_seeded_and_resumable(tmp_path):
    recipe = make_recipe(
        seq_len=32, task="mqar", task_args={"num_pairs": 2, "vocab_size": 64}, validation=10
    )
    data = opened(recipe, tmp_path / "cache")
    one, two = data.train.next_batch(1500), data.train.next_batch(1500)
    again = opened(recipe, tmp_path / "cache").train
    again.seek(json.loads(json.dumps({"row": 1500})))
    assert (again.next_batch(1500).input_ids == two.input_ids).all()
    rows = {row.tobytes() for part in (one, two) for row in part.input_ids}
    assert len(rows) == 3000
    held_out = {row.tobytes() for part in data.validation for row in part.input_ids}
    assert len(held_out) == 10
    assert not held_out & rows
    assert one.targets == 2 * 1500


def prepared(cache, before=None, **data):
    return data_source(make_recipe(**data)).prepare(cache, before)


def gz_with_damage():
    packed = bytearray(gzip.compress(b'{"text": "a"}\n' * 999, mtime=0))
    packed[12:20] = bytes(8 * [255])
    return bytes(packed)


GOOD = b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("field", "name", "content", "message"),
    [
        ("text", "nothing", None, r"data\.text: .*nothing.* does not exist"),
        ("text", "*.md", None, r"data\.text: .*/\*\.md' does not exist"),
        ("text", "", None, "data.text: .* holds no file"),
        ("text", "empty.txt", b"", r"data\.text must hold text, got none"),
        ("text", "latin.txt", b"caf\xe9", r"latin\.txt must be UTF-8.* 0xe9 at 3"),
        ("jsonl", "a.jsonl", GOOD + b'{"text": \n', r"a\.jsonl:2 must be JSON"),
        ("jsonl", "a.jsonl", GOOD + b'{"n": %s}\n' % (b"1" * 5000), r"a\.jsonl:2 must be JSON"),
        ("jsonl", "a.jsonl", GOOD + b"[" * 100_000 + b"]" * 100_000, r"a\.jsonl:2 must be JSON"),
        ("jsonl", "a.jsonl", b"caf\xe9", r"a\.jsonl:1 must be UTF-8 text"),
        ("jsonl", "a.jsonl", b'{"txt": "a"}\n', r"no field 'text'.* txt; set data\.text_field"),
        ("jsonl", "a.jsonl", b'{"text": 5}\n', "'text' must be text, got int"),
        (
            "jsonl",
            "a.jsonl",
            GOOD + b'{"text": "half \\ud83d"}\n',
            r"a\.jsonl:2: 'text' must be whole .* \\ud83d of one",
        ),
        ("jsonl", "a.jsonl.gz", gz_with_damage(), r"a\.jsonl\.gz: cannot be read after byte 0: "),
        ("parquet", "a.parquet", b"PAR1 not really", r"a\.parquet must be a parquet file"),
    ],
)
def test_missing_empty_and_unreadable_data_is_named(field, name, content, message, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    if content is not None:
        (folder / name).write_bytes(content)
    for streaming in (False,) if field == "text" else (False, True):
        recipe = make_recipe(**{field: [str(folder / name)], "streaming": streaming})
        with pytest.raises((ValueError, LookupError), match=message) as caught:
            opened(recipe, tmp_path / "cache").train.next_batch(100)
        assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]


def test_a_share_that_holds_out_everything_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("one", encoding="utf-8")
    with pytest.raises(ValueError, match="holds out all of the 1"):
        prepared(tmp_path / "cache", text=[str(tmp_path / "one.txt")], validation=3)


def test_a_folders_binary_files_are_left_out_with_a_warning(texts, tmp_path, caplog):
    (texts / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    manifest = prepared(tmp_path / "cache", text=[str(texts)])
    assert manifest["documents"] == 40
    assert "left out 1 files that are not UTF-8 text" in caplog.text


def test_text_shorter_than_a_row_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    recipe = make_recipe(text=[str(tmp_path / "short.txt")])
    with pytest.raises(ValueError, match=r"train\.seq_len = 16 tokens, got 7"):
        opened(recipe, tmp_path / "cache")


def test_another_split_of_a_folder_is_other_data(tmp_path, offline):
    folder, cache = tmp_path / "folder", tmp_path / "cache"
    folder.mkdir()
    for split, count in (("train", 12), ("test", 3)):
        lines = [json.dumps({"text": text}) + "\n" for text in documents(count)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    test = prepared(cache, dataset=str(folder), split="test")
    train = prepared(cache, dataset=str(folder))
    assert (test["documents"], train["documents"]) == (3, 12)
    assert test["digest"] != train["digest"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dataset": "./missing"}, ValueError, r"data\.dataset must be a folder or a Hub id.*mis"),
        ({"revision": "v1"}, ValueError, r"data\.revision needs a data set on the Hub"),
        ({"split": "validation"}, LookupError, r"data\.dataset: .*validation"),
    ],
)
def test_a_data_set_revision_or_split_that_is_not_there_is_named(
    given, error, message, tmp_path, offline
):
    (tmp_path / "train.jsonl").write_text('{"text": "ant"}\n', encoding="utf-8")
    with pytest.raises(error, match=message):
        prepared(tmp_path / "cache", **{"dataset": str(tmp_path), **given})


@pytest.mark.parametrize("streaming", [False, True])
def test_damaged_parquet_names_file_and_row(streaming, tmp_path):
    file = tmp_path / "bad.parquet"
    table = pyarrow.table({"text": documents(2000)})
    pyarrow.parquet.write_table(table, file, compression="none", use_dictionary=False)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 3000] = b"\xff" * 3000
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.parquet: cannot be read after row \d+: "):
        opened(
            make_recipe(parquet=[str(file)], streaming=streaming), tmp_path / "cache"
        ).train.next_batch(4000)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_an_error_of_reading_is_no_error_of_writing(kind, tmp_path, monkeypatch):
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["ant"]}), file)
    else:
        file.write_text('{"text": "ant"}\n', encoding="utf-8")
    read = Path.read_bytes

    def fail(path, *given, **named):
        if path == file:
            raise OSError(5, "Input/output error")
        return read(path, *given, **named)

    monkeypatch.setattr(Path, "read_bytes", fail)
    monkeypatch.setattr("builtins.open", fail)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", lambda *_, **__: fail(file))
    with pytest.raises(ValueError, match=rf"a\.{kind}: cannot be read.*Input/output"):
        list(read_files(kind, [file], "text", skip_binary=False))


def test_changed_data_is_noticed_and_a_touched_file_is_not_a_change(texts, tmp_path):
    cache, arguments = tmp_path / "cache", {"text": [str(texts)]}
    before = json.loads(json.dumps(prepared(cache, **arguments)))
    (texts / "003.txt").touch()
    assert prepared(cache, before, **arguments)["digest"] == before["digest"]
    (texts / "new.txt").write_text("new", encoding="utf-8")
    with pytest.raises(ValueError, match=r"new\.txt was added since the run began"):
        prepared(cache, before, **arguments)
    (texts / "new.txt").unlink()
    content = (texts / "003.txt").read_text()
    (texts / "003.txt").write_text(content.replace("3", "4", 1), encoding="utf-8")
    with pytest.raises(ValueError, match=r"003\.txt was changed .* start a new run"):
        prepared(cache, before, **arguments)
    (texts / "003.txt").unlink()
    with pytest.raises(ValueError, match=r"003\.txt was removed since the run began"):
        prepared(cache, before, **arguments)


def test_the_digest_is_of_the_content_not_of_the_place(texts, tmp_path):
    one = prepared(tmp_path / "one", text=[str(texts)])
    moved = texts.rename(tmp_path / "moved")
    assert prepared(tmp_path / "two", text=[str(moved)])["digest"] == one["digest"]
    (moved / "003.txt").write_text("other", encoding="utf-8")
    assert prepared(tmp_path / "three", text=[str(moved)])["digest"] != one["digest"]


def test_text_is_tokenised_once(texts, tmp_path, monkeypatch):
    prepared(tmp_path / "cache", text=[str(texts)])
    monkeypatch.setattr(
        "ssmzoo.data.sources.write_store", lambda *_: pytest.fail("tokenised again")
    )
    prepared(tmp_path / "cache", text=[str(texts)])
