"""Files are written atomically, and links are never followed."""

import os
from pathlib import Path

import pytest
from disks import full
from refusals import code_of

from flwr_frl.common.files import (
    NO_FOLLOW,
    PRIVATE,
    open_no_follow,
    refuse_links,
    unfinished,
    write_atomically,
)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_keeps_the_old_content_and_leaves_no_files(
    tmp_path, monkeypatch, step
):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_link_is_replaced_and_its_target_is_unchanged(tmp_path):
    target, path = tmp_path / "target", tmp_path / "file"
    target.write_bytes(b"theirs")
    path.symlink_to(target)
    write_atomically(path, b"ours")
    assert target.read_bytes() == b"theirs"
    assert not path.is_symlink()
    assert path.read_bytes() == b"ours"


def test_temporary_files_are_random_and_exclusive_and_recognised(tmp_path, monkeypatch):
    target, path = tmp_path / "target", tmp_path / "file"
    replace, names = os.replace, []

    def noted(partial: Path, to: Path) -> None:
        names.append(partial.name)
        replace(partial, to)

    monkeypatch.setattr(os, "replace", noted)
    write_atomically(path, b"1")
    write_atomically(path, b"2")
    assert len(set(names)) == 2
    assert [unfinished(name) for name in names] == ["file", "file"]
    # Names used by other programs
    assert unfinished(".file.swp") == unfinished("file.17") == ""
    # A link is not followed even if its name was guessed.
    monkeypatch.setattr("secrets.token_hex", lambda _: "0" * 16)
    (tmp_path / f".file.{'0' * 16}.partial").symlink_to(target)
    with pytest.raises(FileExistsError):
        write_atomically(path, b"3")
    assert not target.exists()
    assert path.read_bytes() == b"2"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_private_files_are_private_under_any_umask(tmp_path):
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "public", b"")
        write_atomically(tmp_path / "private", b"", mode=PRIVATE)
    finally:
        os.umask(before)
    modes = [(tmp_path / n).stat().st_mode & 0o777 for n in ("public", "private")]
    assert modes == [0o644, 0o600]


@pytest.mark.skipif(not NO_FOLLOW, reason="the system follows links")
def test_a_link_is_not_opened(tmp_path):
    target, path = tmp_path / "target", tmp_path / "file"
    path.symlink_to(target)
    with (
        pytest.raises(OSError, match="symbolic links"),
        open(path, "a", opener=open_no_follow),
    ):
        pass
    assert not target.exists()


def test_folder_that_is_a_link_is_rejected(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    refuse_links("output", tmp_path)
    assert code_of(refuse_links, "output", tmp_path, link) == "output"
