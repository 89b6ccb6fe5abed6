"""Compressed files, text files and patterns of files."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pytest
from pyarrow import parquet

from anyqlora.core.errors import UsageError
from anyqlora.data import dataset
from anyqlora.data.readers import sources
from tests.support.data_fixtures import byte_level, settings

ROWS = [{"prompt": f"What is {i}?", "completion": f"It is {i}."} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS)


COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def zst_file(path, content):
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(content)


def parquet_bytes(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "plain")
    return (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("compressed", sources.COMPRESSED)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".parquet", ".JSONL"])
def test_a_compressed_file_has_the_rows_of_the_plain_one(kind, compressed, tmp_path):
    content = {
        ".jsonl": lambda: LINES,
        ".json": lambda: json.dumps(ROWS).encode(),
        ".csv": CSV.encode,
        ".parquet": lambda: parquet_bytes(tmp_path),
    }[kind.lower()]()
    path = tmp_path / f"rows{kind}{compressed}"
    if compressed == ".zst":
        zst_file(path, content)
    else:
        path.write_bytes(COMPRESS[compressed](content))
    source = sources.file(path)
    assert [row.value for row in source.rows] == ROWS and not source.bad
    assert all(row.where.startswith(f"{path}:") for row in source.rows)


@pytest.mark.parametrize("compressed", sources.COMPRESSED)
def test_a_compressed_file_that_breaks_off_is_refused_by_name(compressed, tmp_path):
    path = tmp_path / f"rows.jsonl{compressed}"
    zst_file(path, LINES * 100) if compressed == ".zst" else path.write_bytes(COMPRESS[compressed](LINES * 100))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], LINES):  # cut off, and not compressed at all
        path.write_bytes(content)
        with pytest.raises(UsageError, match=f"rows.jsonl{compressed}: not whole as {sources.COMPRESSED[compressed]}"):
            dataset.load_data(settings(path), byte_level())


def test_an_unknown_kind_is_named_whole(tmp_path):
    (tmp_path / "rows.xlsx.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(UsageError, match="unknown kind of file '.xlsx.gz'"):
        dataset.load_data(settings(tmp_path / "rows.xlsx.gz"), byte_level())


def test_documents_of_a_text_file_lie_between_blank_lines(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\n\nOne\r\ntwo\n\n   \nThree\nfour\n\nFive")
    source = sources.file(path)
    assert [(row.value["text"], row.where) for row in source.rows] == [
        ("One\ntwo", f"{path}:3"),
        ("Three\nfour", f"{path}:7"),
        ("Five", f"{path}:10"),
    ]
    path.write_bytes(b"fine\n\ncaf\xe9\n\nfine")
    with pytest.raises(UsageError, match="book.txt:3:4: byte 0xe9 is not UTF-8"):
        dataset.load_data(settings(path), byte_level())
    assert len(dataset.load_data(settings(path, on_bad_row="skip"), byte_level()).train) == 2


def test_text_beside_rows_is_no_row(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    (tmp_path / "LICENSE.txt").write_text("You may.\n\nYou may not.")
    assert [path.name for path in sources.files(str(tmp_path))] == ["rows.jsonl"]
    (tmp_path / "rows.jsonl").unlink()
    assert [path.name for path in sources.files(str(tmp_path))] == ["LICENSE.txt"]


def test_a_pattern_names_its_files_in_order(tmp_path):
    for name in ("b/2.jsonl", "a/1.jsonl.gz", "a/deep/3.jsonl", "other.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(LINES) if name.endswith("gz") else LINES)
    for pattern, expected in (
        ("**/*.jsonl*", ["a/1.jsonl.gz", "a/deep/3.jsonl", "b/2.jsonl"]),
        ("?/[12].jsonl*", ["a/1.jsonl.gz", "b/2.jsonl"]),
    ):
        assert [str(p.relative_to(tmp_path)) for p in sources.files(f"{tmp_path}/{pattern}")] == expected
        data = dataset.load_data(settings(f"{tmp_path}/{pattern}"), byte_level())
        assert len(data.train) == 5 * len(expected)
    twice = dataset.load_data(settings(f"{tmp_path}/b/*.jsonl=2"), byte_level())
    assert len(twice.train) == 10
    with pytest.raises(UsageError, match="no file has such a name"):
        dataset.load_data(settings(f"{tmp_path}/*.parquet"), byte_level())
    assert sources.placed(f"{tmp_path}/b/*.jsonl", lambda name: "nowhere") == f"{tmp_path}/b/*.jsonl"
