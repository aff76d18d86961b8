"""Files appear complete or not at all."""

import os

import pytest

from ssmzoo.files import appears_whole, write_folder, write_json, write_text


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


def test_a_file_gets_the_permissions_of_any_other(tmp_path):
    write_text(tmp_path / "ours", "x")
    (tmp_path / "any").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_nothing_of_a_new_file_is_seen_before_it_is_whole(tmp_path, monkeypatch):
    seen = []
    replace = os.replace

    def look(source, target):
        seen.append((target.exists(), source.read_text()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    write_text(tmp_path / "a", "whole")
    assert seen == [(False, "whole")]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "folder"
    write_folder(target, lambda folder: write_text(folder / "old", "x"))

    def fail(folder):
        write_text(folder / "new", "x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_folder(target, fail)
    assert [p.name for p in target.iterdir()] == ["old"]
    (tmp_path / ".folder.unfinished").mkdir()  # left by a process that was killed
    write_folder(target, lambda folder: write_text(folder / "new", "x"))
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
