"""Files appear complete or not at all."""

import errno
import itertools
import os
import pickle
import signal
import subprocess
import sys

import pytest

from ssmzoo import files
from ssmzoo.files import (
    CannotWriteError,
    appears_whole,
    json_of,
    parse_yaml,
    write_folder,
    write_json,
    write_text,
    write_texts,
    writing,
)

REPEATED = "a: &a [1234567]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in itertools.pairwise("abcdefghijkl")
)
# text that would take all memory or time, or end in an error of a library
ENDLESS = {
    "aliases of aliases": (parse_yaml, REPEATED, "aliases must repeat at most 100,000 characters"),
    "an alias of itself": (parse_yaml, "a: &a [*a]", "aliases must repeat at most"),
    "a long text, often": (parse_yaml, f"a: [&x {'y' * 99}{', *x' * 2000}]", "must repeat at most"),
    "lists in lists": (parse_yaml, "a: " + "[" * 9999, "values lie too deep"),
    "mappings in mappings": (parse_yaml, "{a: " * 9999, "values lie too deep"),
    "a long key, twice": (parse_yaml, 2 * f"? {'x' * 9999}\n: 1\n", r"characters left out\] x"),
    "arrays in arrays": (lambda text, _: json_of(text), "[" * 99999, "too deep"),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_yaml_and_json_without_bounds_are_one_short_error(case):
    read, text, message = ENDLESS[case]
    with pytest.raises(ValueError, match=message) as caught:
        read(text, "recipe.yaml")
    assert len(str(caught.value)) < 1200
    assert "\n" not in str(caught.value)


def test_aliases_that_repeat_little_are_read():
    assert parse_yaml("a: &a {x: &x [1, 2]}\nb: *a\nc: *x\n", "") == {
        "a": {"x": [1, 2]},
        "b": {"x": [1, 2]},
        "c": [1, 2],
    }


def test_a_failed_write_leaves_the_earlier_file_and_no_rest(tmp_path):
    target = tmp_path / "a.txt"
    write_text(target, "first")
    with pytest.raises(ValueError, match="nan"):
        write_json(target, {"x": float("nan")})

    def interrupted():
        with appears_whole(target) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    target = tmp_path / "a.txt"
    # of one number, as processes of two containers may be
    with appears_whole(target) as first, appears_whole(target) as second:
        second.write_text("second")
        first.write_text("first")
    assert target.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_gets_the_permissions_of_any_other(tmp_path):
    write_text(tmp_path / "ours", "x")
    (tmp_path / "any").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_file_appears_only_when_complete(tmp_path, monkeypatch):
    seen = []
    replace = os.replace

    def look(source, target):
        seen.append((target.exists(), source.read_text()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    write_text(tmp_path / "a", "whole")
    assert seen == [(False, "whole")]


@pytest.fixture(params=["exchange", "rename"])
def swap(request, monkeypatch):
    """Both ways to replace a folder: in one step, and by renaming it away first."""
    if request.param == "rename":
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    return request.param


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path, swap):
    target = tmp_path / "folder"
    write_folder(target, lambda folder: write_text(folder / "old", "x"))

    def fail(folder):
        write_text(folder / "new", "x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CannotWriteError, match="/folder cannot be written: No space left"):
        write_folder(target, fail)
    assert names(target) == ["old"]
    assert names(tmp_path) == ["folder"]
    write_folder(target, lambda folder: write_text(folder / "new", "x"))
    assert names(target) == ["new"]
    assert names(tmp_path) == ["folder"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_never_missing_where_the_system_can_exchange_folders(tmp_path, monkeypatch):
    target = tmp_path / "folder"
    write_folder(target, lambda folder: write_text(folder / "old", "x"))
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("moved away"))
    if sys.platform == "linux":
        write_folder(target, lambda folder: (folder / "new").touch())
        assert names(target) == ["new"]


def test_two_writers_of_one_folder_do_not_disturb_each_other(tmp_path, swap):
    target = tmp_path / "folder"

    def slow(folder):
        write_text(folder / "slow", "x")
        write_folder(target, lambda other: write_text(other / "quick", "x"))
        assert names(target) == ["quick"]
        write_text(folder / "slower", "x")

    write_folder(target, slow)
    assert names(target) == ["slow", "slower"]
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("there", [True, False], ids=["there", "dangling"])
def test_the_folder_that_a_link_names_is_written_and_the_link_stays(tmp_path, there, swap):
    disk, work = tmp_path / "disk", tmp_path / "work"
    disk.mkdir()
    work.mkdir()
    (work / "folder").symlink_to(os.path.join("..", "disk", "folder"))
    if there:
        (disk / "folder").mkdir()
        (disk / "folder" / "old").touch()
    write_folder(work / "folder", lambda folder: write_text(folder / "new", "x"))
    assert names(disk / "folder") == ["new"]
    assert names(disk) == names(work) == ["folder"]
    assert (work / "folder").is_symlink()


def test_a_file_that_a_link_names_stays_as_it_was(tmp_path):
    """As in the Hub's cache, where several revisions share a file."""
    (tmp_path / "shared").write_text("theirs")
    (tmp_path / "file").symlink_to("shared")
    write_text(tmp_path / "file", "mine")
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "shared").read_text() == "theirs"


KILLED = """
import os, signal, sys
from pathlib import Path
from ssmzoo import files
target, instant = Path(sys.argv[1]), sys.argv[2]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def fill(folder):
    (folder / "new").write_text("x")
    if instant == "writing":
        die()
replace = os.replace
def rename_away(source, destination):
    die() if destination == target else replace(source, destination)
if instant == "removal":
    files.shutil.rmtree = lambda path, **_: die() if path.exists() else None
if instant == "renaming":
    files._exchange = lambda first, second: False
    os.replace = rename_away
files.write_folder(target, fill)
"""


@pytest.mark.parametrize("instant", ["writing", "removal", "renaming"])
def test_a_killed_writer_loses_nothing_and_the_next_one_removes_its_remains(tmp_path, instant):
    target, other = tmp_path / "a", tmp_path / "a.b"
    for folder in (target, other):
        write_folder(folder, lambda folder: write_text(folder / "old", "x"))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target), instant], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert ["old"] in [names(path) for path in tmp_path.iterdir() if path != other]
    left = names(tmp_path)
    write_folder(other, lambda folder: None)
    assert names(tmp_path) == left != ["a", "a.b"]  # they are no remains of the other folder
    seen = []
    write_folder(target, lambda _: seen.extend(names(target)))
    assert seen == (["new"] if instant == "removal" else ["old"])
    assert names(tmp_path) == ["a", "a.b"]


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "No space left on device; what was there is unchanged; free some space, or"),
        (errno.EDQUOT, "Disk quota exceeded; what was there is unchanged; free some space, or"),
        (errno.EROFS, "Read-only file system; what was there is unchanged; choose a place that"),
        (errno.EACCES, "Permission denied; what was there is unchanged; choose a place that may"),
        (errno.EIO, "Input/output error; what was there is unchanged; choose another place"),
    ],
)
def test_errors_of_the_machine_name_the_way_out(number, way_out, tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    for write in (
        lambda target: write_text(target, "x"),
        lambda target: write_texts(target.parent, {"a": "x", target.name: "x"}),
        lambda target: write_folder(target, lambda folder: write_text(folder / "inner", "x")),
    ):
        with pytest.raises(CannotWriteError) as caught:
            write(tmp_path / "a")
        assert str(caught.value).startswith(f"{tmp_path / 'a'} cannot be written: {way_out}")
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_recognised_in_errors_of_rust_libraries(tmp_path):
    with pytest.raises(CannotWriteError, match=r"File too large; .*ulimit -f"):
        fail_within(tmp_path / "a", Exception("I/O error: File too large (os error 27)"))
    with pytest.raises(ValueError, match=r"^27$"):
        fail_within(tmp_path / "a", ValueError("27"))


def fail_within(target, error):
    with writing(target):
        raise error


def test_the_file_that_failed_is_named(tmp_path):
    with pytest.raises(CannotWriteError, match="/b/c cannot be written"):
        write_texts(tmp_path, {"a": "x", "b/c": "x", "d": "x"})
    assert list(tmp_path.iterdir()) == []


def test_the_error_goes_to_other_processes(tmp_path):
    error = CannotWriteError("a", "No space left on device", errno.ENOSPC)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.number) == (str(error), errno.ENOSPC)


def test_a_folder_comes_back_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    target = tmp_path / "folder"
    write_folder(target, lambda folder: write_text(folder / "old", "x"))
    replace = os.replace

    def fail(source, place):
        if str(source).endswith(".unfinished"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, place)

    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CannotWriteError, match="Input/output error"):
        write_folder(target, lambda folder: (folder / "new").touch())
    assert names(target) == ["old"]
    assert names(tmp_path) == ["folder"]
