import hashlib
import json
import os

import pytest

from anyqlora.core import hashing

LARGE = hashing.LARGE


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(path, size, byte=b"a"):
    path.write_bytes(byte * size)
    return path, hashlib.sha256(byte * size).hexdigest()


@pytest.fixture
def reads(monkeypatch):
    """The files that are read."""
    names, plain = [], hashing.hash_file
    monkeypatch.setattr(hashing, "hash_file", lambda path: names.append(path.name) or plain(path))
    return names


def test_a_large_file_is_read_once_and_a_small_one_each_time(tmp_path, reads):
    small, of_small = written(tmp_path / "small", LARGE - 1)
    large, of_large = written(tmp_path / "large", LARGE)
    for _ in range(2):
        assert hashing.hash_files([large, small, large]) == [of_large, of_small, of_large]
    assert sorted(reads) == ["large", "small", "small"]
    assert list(json.loads(hashing.memo_file().read_text())) == [str(large.resolve())]


@pytest.mark.parametrize("change", ["bytes", "date given back", "other file in its place"])
def test_a_large_file_that_is_another_is_read_again(tmp_path, change):
    path, _ = written(tmp_path / "large", LARGE)
    hashing.hash_files([path])
    stat = path.stat()
    if change == "other file in its place":
        other, digest = written(tmp_path / "other", LARGE, b"b")
        os.replace(other, path)
    else:
        _, digest = written(path, LARGE, b"b")
    if change != "bytes":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert hashing.hash_files([path]) == [digest]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b"\xff", b"null"], ids=repr)
def test_a_memo_that_is_none_is_made_again(tmp_path, content, reads):
    path, digest = written(tmp_path / "large", LARGE)
    hashing.memo_file().parent.mkdir(parents=True)
    hashing.memo_file().write_bytes(content)
    for _ in range(2):
        assert hashing.hash_files([path]) == [digest]
    assert reads == ["large"]


def test_the_oldest_are_forgotten(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(hashing, "REMEMBERED", 2)
    paths = [written(tmp_path / name, LARGE)[0] for name in "abc"]
    hashing.hash_files(paths)
    hashing.hash_files(paths)
    assert sorted(reads) == ["a", "a", "b", "c"]
