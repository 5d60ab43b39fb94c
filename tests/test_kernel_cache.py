"""The kernel cache is executed as Python code: who may own it and write to it, and what happens otherwise."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("numba")

from mezzo.pytorch.kernels import jit


@pytest.fixture(autouse=True)
def ordinary_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def folder_of(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEZZO_CACHE_DIR", str(cache))
    return jit._folder.__wrapped__()


def owned_by_another(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another user had made it: only root could really give a file away."""
    lstat = Path.lstat

    def pretended(path: Path) -> os.stat_result:
        found = lstat(path)
        if path == place.resolve():
            found = os.stat_result((*found[:4], os.getuid() + 4711, *found[5:]))
        return found

    monkeypatch.setattr(Path, "lstat", pretended)


# What is wrong -> makes it so, given the cache, the folder in it and a file in that; the path to be named.
Change = Callable[[Path, Path, Path, pytest.MonkeyPatch], Path]


def _mode(which: int, mode: int) -> Change:
    def change(*places: object) -> Path:
        place = places[which]
        assert isinstance(place, Path)
        place.chmod(mode)
        if which == 2:
            place.parents[1].chmod(0o755)
        return place

    return change


def _owner(which: int) -> Change:
    def change(*places: object) -> Path:
        place, monkeypatch = places[which], places[3]
        assert isinstance(place, Path)
        assert isinstance(monkeypatch, pytest.MonkeyPatch)
        owned_by_another(place, monkeypatch)
        return place

    return change


REFUSED: dict[str, Change] = {
    "cache writable by group": _mode(0, 0o770),
    "cache writable by all": _mode(0, 0o777),
    "folder writable by group": _mode(1, 0o770),
    "folder writable by all": _mode(1, 0o707),
    "folder sticky and writable by all": _mode(1, 0o1777),
    "file writable by group": _mode(2, 0o664),
    "file writable by all": _mode(2, 0o606),
    "cache of another user": _owner(0),
    "folder of another user": _owner(1),
    "file of another user": _owner(2),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("linked", [False, True])
def test_a_cache_that_others_can_change_is_not_used(
    tmp_path: Path, what: str, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real"
    cache = tmp_path / "link" if linked else real
    folder = folder_of(real, monkeypatch)
    (folder / "__pycache__").mkdir()
    file = folder / "__pycache__" / "kernel.1.nbc"
    file.write_bytes(b"")
    if linked:
        cache.symlink_to(real)
    named = REFUSED[what](real, folder, file, monkeypatch)
    with pytest.warns(UserWarning, match="kernel cache") as told:
        found = folder_of(cache, monkeypatch)
    assert real not in found.parents
    assert found.stat().st_mode & 0o777 == 0o700
    assert len(told) == 1
    for word in (str(named), "chmod 700", "MEZZO_CACHE_DIR"):
        assert word in str(told[0].message)


USED: dict[str, Callable[[Path], Path]] = {
    "fresh": lambda place: place / "new" / "cache",
    "private": lambda place: place,
    "readable by all": lambda place: place / "readable",
    "in a sticky folder, as /tmp": lambda place: place / "tmp" / "mine",
    "a sticky folder itself": lambda place: place / "tmp",
    "a link of one's own": lambda place: place / "link",
}


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
@pytest.mark.parametrize("what", USED)
def test_a_cache_of_ones_own_is_used(
    tmp_path: Path, what: str, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "readable").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "readable")
    os.umask(umask)
    cache = USED[what](tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = folder_of(cache, monkeypatch)
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "kernel.py").write_text("")
        assert folder_of(cache, monkeypatch) == folder
    assert cache.resolve() in folder.parents
    assert folder.stat().st_mode & 0o777 == 0o700
