"""Files, directories, the hub and weights; each format as every kind of file."""

import csv
import datetime
import json
import subprocess
import sys
from collections import Counter

import numpy
import pyarrow
import pytest
from pyarrow import parquet

from anyqlora.config import resolve
from anyqlora.core import errors
from anyqlora.data import dataset
from anyqlora.data.readers import sources
from tests.support import local_hub
from tests.support.data_fixtures import byte_level, settings, write

ROWS = [{"prompt": f"What is {i}?", "completion": f' It is {i}, "so".\nYes.'} for i in range(6)]


def as_file(path, rows):
    """These rows in the kind of file that the suffix says, written by somebody else's library."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        write(path, *rows)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.ndjson"])
def test_the_same_rows_from_any_kind_of_file(name, tmp_path):
    reference = dataset.load_data(settings(write(tmp_path / "reference.jsonl", *ROWS)), byte_level())
    read = dataset.load_data(settings(as_file(tmp_path / name, ROWS)), byte_level())
    assert read.identity == reference.identity
    first = {"a.json": 2, "a.csv": 2, "a.tsv": 2}.get(name, 1)
    assert read.train[0].where == f"{tmp_path / name}:{first}"


def not_utf8(*values):
    """A column of text with these bytes, which pyarrow does not look at."""
    ends = numpy.cumsum([0, *map(len, values)], dtype=numpy.int32)
    return pyarrow.Array.from_buffers(
        pyarrow.string(), len(values), [None, pyarrow.py_buffer(ends.tobytes()), pyarrow.py_buffer(b"".join(values))]
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (lambda: not_utf8(b"a", b"caf\xe9", b"c"), "text that is not UTF-8: byte 0xe9"),
        (lambda: pyarrow.array([1, 2**30, 3], pyarrow.int32()).cast(pyarrow.date32()), "a value that cannot be read: "),
    ],
)
def test_a_value_of_parquet_that_cannot_be_read_is_a_bad_row(bad, reason, tmp_path):
    columns = {"prompt": ["What", "is", "it?"], "completion": ["a", "b", "c"], "other": bad()}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(errors.UsageError, match=f"a.parquet:2: {reason}"):
        dataset.load_data(settings(tmp_path / "a.parquet"), byte_level())
    read = dataset.load_data(settings(tmp_path / "a.parquet", on_bad_row="skip"), byte_level())
    assert [example.where.rpartition(":")[2] for example in read.train] == ["1", "3"]


def test_rows_of_parquet_are_counted_over_its_batches(tmp_path):
    """pyarrow reads 65,536 rows at a time."""
    texts = [b"a"] * 65_540
    texts[10] = texts[65_537] = b"\xe9"
    parquet.write_table(pyarrow.table({"text": not_utf8(*texts)}), tmp_path / "a.parquet")
    source = sources.file(tmp_path / "a.parquet")
    numbers = [[int(row.where.rpartition(":")[2]) for row in found] for found in (source.rows, source.bad)]
    assert numbers[1] == [11, 65_538] and sorted(numbers[0] + numbers[1]) == list(range(1, 65_541))


def test_a_column_that_is_twice_in_parquet_is_refused(tmp_path):
    table = pyarrow.Table.from_arrays(
        [pyarrow.array([text]) for text in "abc"], names=["prompt", "completion", "prompt"]
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(errors.UsageError, match="a.parquet: a column is there twice: 'prompt', 'completion', 'prompt'"):
        dataset.load_data(settings(tmp_path / "a.parquet"), byte_level())


def test_lines_are_those_of_an_editor(tmp_path):
    """Rows of two lines each: CSV with a line break in a cell, JSON with an indent."""
    assert [row.where.rpartition(":")[2] for row in sources.file(as_file(tmp_path / "a.csv", ROWS[:3])).rows] == [
        "2",
        "4",
        "6",
    ]
    assert [row.where.rpartition(":")[2] for row in sources.file(as_file(tmp_path / "a.json", ROWS[:3])).rows] == [
        "2",
        "6",
        "10",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"\xef\xbb\xbf" + raw,
        lambda raw: raw.replace(b"\n", b"\r\n"),
        lambda raw: raw.rstrip(b"\n"),
        lambda raw: b"\n" + raw + b"\n \n",
    ],
    ids=["byte order mark", "CRLF", "no last line break", "blank lines"],
)
def test_harmless_bytes_change_no_row(change, tmp_path):
    reference = dataset.load_data(settings(write(tmp_path / "reference.jsonl", *ROWS)), byte_level())
    (tmp_path / "a.jsonl").write_bytes(change((tmp_path / "reference.jsonl").read_bytes()))
    assert dataset.load_data(settings(tmp_path / "a.jsonl"), byte_level()).identity == reference.identity


def test_json_lines_under_the_name_json(tmp_path):
    write(tmp_path / "a.json", *ROWS)
    assert len(dataset.load_data(settings(tmp_path / "a.json"), byte_level()).train) == 6


def test_a_line_separator_of_unicode_is_no_line_break(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\u2028b", "completion": "c\x85d"}\n', encoding="utf-8")
    assert dataset.load_data(settings(tmp_path / "a.jsonl"), byte_level()).train[0].prompt == "a\u2028b"


@pytest.mark.parametrize(
    ("spec", "times"),
    [
        ("a.jsonl=2,b.jsonl=0.5", (2, 0.5)),
        ("a.jsonl,b.jsonl=1.5", (1, 1.5)),
        ("a.jsonl = 3", (3, 0)),
        ("a.jsonl=0.3,b.jsonl=0.3", (0.3, 0.3)),
    ],
)
def test_weights_say_how_often_a_row_is_seen(spec, times, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}", "completion": " x"} for i in range(10)))
    seen = Counter(example.where for example in dataset.load_data(settings(spec), byte_level()).train)
    for name, weight in zip("ab", times, strict=True):
        counts = [seen[f"{name}.jsonl:{i}"] for i in range(1, 11)]
        assert sum(counts) == 10 * weight and max(counts) - min(counts) <= (weight % 1 > 0)
    other = dataset.load_data(settings(spec, seed=43), byte_level())
    assert (Counter(example.where for example in other.train) == seen) == all(weight % 1 == 0 for weight in times)


@pytest.mark.parametrize("spec", ["a.jsonl=0", "a.jsonl=-1", "a.jsonl=nan", ","])
def test_weights_that_say_nothing_are_refused(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", *ROWS)
    with pytest.raises(errors.UsageError):
        dataset.load_data(settings(spec), byte_level())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a.jsonl", "{here}/a.jsonl"),
        ("a.jsonl=2,b.jsonl=0.5", "{here}/a.jsonl=2.0,{here}/b.jsonl=0.5"),
        ("a.jsonl=3", "{here}/a.jsonl=3.0"),
        ("sub", "{here}/sub"),
        ("../{name}/a.jsonl", "{here}/../{name}/a.jsonl"),
        ("demo", "DEMO"),
        ("alpaca", "ALPACA"),
        ("some/data", "SOME/DATA"),
        ("a.jsonl,some/data=2", "{here}/a.jsonl=1.0,SOME/DATA=2.0"),
        ("a=2,b.jsonl", "{here}/a=2,b.jsonl"),
        ("", ""),
    ],
)
def test_a_specification_for_whoever_stands_elsewhere(spec, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", "b.jsonl", "a=2,b.jsonl", "demo"):
        write(tmp_path / name, *ROWS)
    about = {"here": tmp_path, "name": tmp_path.name}
    assert sources.placed(spec.format(**about), str.upper) == expected.format(**about)


def test_a_whole_path_with_a_comma_cannot_stand_among_others(tmp_path, monkeypatch):
    (tmp_path / "a,b").mkdir()
    monkeypatch.chdir(tmp_path / "a,b")
    write(tmp_path / "a,b" / "a.jsonl", *ROWS)
    assert (
        sources.placed("a.jsonl", str) == f"{tmp_path}/a,b/a.jsonl"
        and sources.placed("a.jsonl=2,a.jsonl", str) == "a.jsonl=2,a.jsonl"
    )


def test_a_file_name_with_comma_and_equals_sign_is_one_file(tmp_path):
    assert len(dataset.load_data(settings(write(tmp_path / "a=2,b.jsonl", *ROWS)), byte_level()).train) == 6


def test_a_directory_gives_its_train_split_and_says_what_it_left_out(tmp_path):
    for name in ("train-00000.jsonl", "train-00001.jsonl", "test.jsonl", "README.md", ".hidden.jsonl"):
        write(tmp_path / name, {"prompt": name, "completion": " x"})
    read = dataset.load_data(settings(tmp_path, eval_dataset=str(tmp_path)), byte_level())
    assert [example.prompt for example in read.train] == ["train-00000.jsonl", "train-00001.jsonl"]
    assert [example.prompt for example in read.held_out] == ["test.jsonl"]
    assert "test.jsonl" in read.report["sources"][0]["notes"][0]


@pytest.mark.parametrize(
    "train",
    ["train", "training", "training_set", "trainset", "Train-00000-of-00001", "my_train_v2", "data/train/part1"],
)
@pytest.mark.parametrize(
    "other",
    [
        "test",
        "testing",
        "test_set",
        "testset",
        "tests",
        "valid",
        "validation",
        "val",
        "valset",
        "dev",
        "devset",
        "development",
        "eval",
        "evaluation",
        "evalset",
        "heldout",
        "held_out",
        "held-out",
        "holdout",
        "hold_out",
        "hold-out-2",
        "Testing",
        "data/val/part1",
    ],
)
def test_a_split_is_known_by_its_name(train, other, tmp_path):
    paths = [tmp_path / f"{name}.jsonl" for name in (train, other)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert sources.split(tmp_path) == (paths[:1], paths[1:]) and sources.split(tmp_path, held_out=True) == (
        paths[1:],
        paths[:1],
    )
    paths[0].unlink()
    other_name = tmp_path / "rows.jsonl"
    other_name.touch()
    assert sources.split(tmp_path) == ([other_name], paths[1:])


@pytest.mark.parametrize(
    "name", ["contest", "latest", "trainers", "restraining", "devices", "values", "medieval", "evaluator", "household"]
)
def test_other_words_name_no_split(name, tmp_path):
    paths = [tmp_path / f"{name}.jsonl", tmp_path / "rows.jsonl"]
    for path in paths:
        path.touch()
    assert sources.split(tmp_path) == (sorted(paths), []) == sources.split(tmp_path, held_out=True)


def test_a_directory_of_the_hub_has_descriptions_beside_its_rows(tmp_path):
    """Left out where there are rows beside them; a directory in which nothing else is has rows of such a name."""
    write(tmp_path / "data.jsonl", *ROWS)
    for name in ("dataset_info.json", "dataset_infos.json", "state.json"):
        (tmp_path / name).write_text('{"default": {"features": {}}}')
    read = dataset.load_data(settings(tmp_path), byte_level())
    assert len(read.train) == 6 and "dataset_infos.json" in read.report["sources"][0]["notes"][0]
    (tmp_path / "alone").mkdir()
    write(tmp_path / "alone" / "state.json", *ROWS)
    assert len(dataset.load_data(settings(tmp_path / "alone"), byte_level()).train) == 6


def test_files_of_different_formats_make_one_set(tmp_path):
    write(tmp_path / "a.jsonl", ROWS[0])
    write(tmp_path / "b.jsonl", {"instruction": "Go.", "output": "x", "id": 1})
    read = dataset.load_data(settings(tmp_path), byte_level())
    assert [source["format"] for source in read.report["sources"]] == ["prompt_completion", "alpaca"]


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"question": "2 + 2", "answer": "4"}, "###Question:\n2 + 2\n###Answer:\n", "4"),
        (
            {"context": "CREATE t", "question": "all?", "answer": "SELECT"},
            "###Context:\nCREATE t\n###Question:\nall?\n###Answer:\n",
            "SELECT",
        ),
        ({"text": "### Human: Hi### Assistant: Ho"}, "### Human: Hi### Assistant: ", "Ho"),
        (
            {"text": "### Human: Hi### Assistant: Ho### Human: He### Assistant: Ha"},
            "### Human: Hi### Assistant: Ho### Human: He### Assistant: ",
            "Ha",
        ),
        ({"prompt": "Hi", "completion": "Ho", "text": "not this"}, "Hi", "Ho"),
        ({"text": "### Human: Hi### Assistant: Ho### Human: Bye"}, "### Human: Hi### Assistant: ", "Ho"),
        ({"text": "### Human: only"}, "", None),
    ],
)
def test_each_format_asks_in_its_own_words(row, prompt, answer, tmp_path):
    example = dataset.load_data(settings(write(tmp_path / "a.jsonl", row)), byte_level()).train[0]
    assert (example.prompt, example.answer) == (prompt, answer)


def test_every_assistant_turn_of_guanaco_is_learned(tmp_path):
    tokens = byte_level()
    example = dataset.load_data(
        settings(write(tmp_path / "a.jsonl", {"text": "### Human: Hi### Assistant: Ho### Human: He### Assistant: Ha"})),
        tokens,
    ).train[0]
    assert tokens.decode(example.ids[example.trained]) == "HoHa</s>"


def test_dataset_format_overrides_what_the_keys_say(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "Hi", "completion": "Ho", "text": "this"})
    example = dataset.load_data(settings(path, dataset_format="text"), byte_level()).train[0]
    assert example.answer is None and byte_level().decode(example.ids) == "this</s>"


def test_held_out_rows_are_as_many_as_asked_and_no_duplicate_straddles(tmp_path):
    rows = [{"prompt": f"q{i % 40}", "completion": f" a{i % 40}"} for i in range(100)]
    read = dataset.load_data(settings(write(tmp_path / "a.jsonl", *rows), eval_fraction=0.25), byte_level())
    train, held_out = {e.prompt for e in read.train}, {e.prompt for e in read.held_out}
    assert len(held_out) == 10 and len(train) == 30 and not train & held_out
    assert len(read.train) + len(read.held_out) == 100
    assert read.report["duplicates"]["count"] == len(read.train) - 30 and read.report["overlap"]["count"] == 0
    write(tmp_path / "b.jsonl", *reversed(rows))
    assert {
        e.prompt for e in dataset.load_data(settings(tmp_path / "b.jsonl", eval_fraction=0.25), byte_level()).held_out
    } == held_out
    assert {
        e.prompt
        for e in dataset.load_data(settings(tmp_path / "b.jsonl", eval_fraction=0.25, seed=1), byte_level()).held_out
    } != held_out


def test_held_out_rows_that_are_trained_on_are_found(tmp_path):
    write(tmp_path / "train.jsonl", *ROWS)
    write(tmp_path / "test.jsonl", {"prompt": "new", "completion": " x"}, {**ROWS[4], "id": 3})
    read = dataset.load_data(
        settings(tmp_path / "train.jsonl", eval_dataset=str(tmp_path / "test.jsonl")), byte_level()
    )
    assert read.report["overlap"] == {"count": 1, "first": [f"{tmp_path / 'test.jsonl'}:2"]}


def test_what_messages_carry_beside_their_words_hides_no_duplicate(tmp_path):
    """Ids and times of messages, which chat logs have and Parquet keeps as times."""

    def row(number):
        turns = [{"role": "user", "content": f"q{number % 20}"}, {"role": "assistant", "content": f"a{number % 20}"}]
        return {
            "messages": [
                {**turn, "id": number, "at": datetime.datetime(2026, 1, 1 + number % 28, number // 28)}
                for turn in turns
            ]
        }

    read = dataset.load_data(
        settings(as_file(tmp_path / "a.parquet", [row(i) for i in range(80)]), eval_fraction=0.25), byte_level()
    )
    assert (
        len(read.held_out) == 20
        and len(read.train) == 60
        and not {e.prompt for e in read.train} & {e.prompt for e in read.held_out}
    )
    assert read.report["duplicates"]["count"] == 45 and read.report["overlap"]["count"] == 0


def test_the_same_text_is_a_duplicate_wherever_its_answer_begins(tmp_path):
    write(
        tmp_path / "train.jsonl", {"prompt": "2 + 2", "completion": " = 4"}, {"prompt": "3 + 3", "completion": " = 6"}
    )
    write(tmp_path / "test.jsonl", {"text": "2 + 2 = 4"})
    read = dataset.load_data(
        settings(tmp_path / "train.jsonl", eval_dataset=str(tmp_path / "test.jsonl")), byte_level()
    )
    assert read.report["overlap"]["count"] == 1 and read.report["duplicates"]["count"] == 0


def test_dummy_is_made_here():
    assert len(dataset.load_data(settings("dummy", dataset_samples=17), byte_level()).train) == 17


def test_the_demo_is_here_and_its_parts_do_not_overlap():
    read = dataset.load_data(settings("demo", eval_dataset="demo"), byte_level())
    assert len(read.train) > 500 and len(read.held_out) == 64 and read.report["overlap"]["count"] == 0


def test_importing_the_data_layer_imports_no_framework():
    code = (
        "import sys, anyqlora.data.dataset, anyqlora.data.audit, anyqlora.cli.data; print({'torch', 'transformers', "
        "'mlx', 'datasets'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# ------------------------------------------------------------------------------------------------------------ the hub


@pytest.mark.parametrize(
    ("asked", "name", "path", "rows", "prompt"),
    [
        (
            "sql",
            "knowrohit07/know_sql",
            "know_sql_val3{ign}.json",
            [{"context": "c", "question": "q", "answer": "a"}],
            "###Context:\nc\n###Question:\nq\n###Answer:\n",
        ),
        (
            "alpaca_sample",
            "yahma/alpaca-cleaned",
            "alpaca_data_cleaned.json",
            [{"instruction": f"i{i}", "input": "", "output": "o"} for i in range(9)],
            None,
        ),
        ("some/data", "some/data", "data/train-00000-of-00001.parquet", ROWS, "What is 0?"),
    ],
)
def test_hub_data_sets_through_the_hubs_own_client(asked, name, path, rows, prompt, tmp_path):
    """A local server that speaks the hub's interface; then the same offline, from the cache."""
    files = {path: as_file(tmp_path / f"x.{path.rpartition('.')[2]}", rows).read_bytes(), "README.md": b"-"}
    code = (
        "import sys, json; from anyqlora.data import formats; from anyqlora.data.readers import sources; found = "
        "sources.read(sys.argv[1], samples=5, offline=sys.argv[2] == 'offline'); "
        "row = found[0].rows[0]; name = formats.detect(row.value); "
        "print(json.dumps([row.where, len(found[0].rows), formats.parse_row(row.value, name, 'auto').parts[0][0]]))"
    )
    with local_hub.serving(kind="datasets", name=name, files=files) as (_, endpoint):
        found = [local_hub.python("-c", code, asked, "online", endpoint=endpoint, home=tmp_path)]
    if asked == "sql":
        found.append(local_hub.python("-c", code, asked, "offline", endpoint=endpoint, home=tmp_path))
    for out in found:
        assert out.returncode == 0, out.stderr
        where, count, shown = json.loads(out.stdout)
        assert local_hub.Hub.commit in where and count == min(len(rows), 5 if asked == "alpaca_sample" else 99)
        assert prompt is None or shown == prompt


@pytest.mark.parametrize("name", [None, "alpaca_sample", "guanaco"])
def test_a_built_in_set_that_cannot_be_had_is_named_and_the_default_as_such(name, tmp_path, monkeypatch):
    """The cache is empty and nothing may be fetched."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    stated = {"model_name": "demo", "offline": True, **({"dataset": name} if name else {})}
    with pytest.raises(errors.UsageError, match="it is not on this machine whole, and --offline true") as refused:
        dataset.load_data(resolve.resolve(stated, environ={}), byte_level())
    is_default = "the default data set, which is taken where nobody names one" in refused.value.message
    assert is_default is (name is None) and ("--dataset FILE" in refused.value.cure) is (name is None)
    assert refused.value.message.startswith(f"{name or 'alpaca_sample'} (the hub's ")
    assert "Error" not in refused.value.message and "http" not in str(refused.value)


def test_an_unknown_hub_id_is_refused_with_both_reasons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        errors.UsageError, match="nobody/nothing cannot be read: it is not on this machine whole, and --offline"
    ):
        dataset.load_data(settings("nobody/nothing", offline=True), byte_level())


def test_every_format_says_what_a_question_is():
    """Else generate and chat would ask otherwise than the rows did: those whose rows are turns, or just text, have no
    key.
    """
    from anyqlora.data.formats import FORMATS

    as_it_stands = {"messages", "sharegpt", "text", "segments", "tokens"}
    assert {name for name, info in FORMATS.items() if not info.question} == as_it_stands
    assert all(info.question in info.keys for info in FORMATS.values() if info.question)


def test_config_knows_every_format():
    from anyqlora.data.formats import FORMATS

    assert set(resolve.SETTINGS["dataset_format"].metadata["choices"]) == {"auto", *FORMATS}


@pytest.mark.parametrize(
    ("strategy", "temperature", "weights", "expected"),
    [
        ("concat", 0, [1, 1, 2], [800, 150, 100]),
        ("interleave_under", 0, [1, 1, 1], [50, 50, 50]),
        ("interleave_over", 0, [1, 1, 1], [800, 800, 800]),
        ("interleave_under", 0, [8, 1, 1], [400, 50, 50]),
        ("interleave_under", 1, [1, 1, 1], [800, 150, 50]),
        ("concat", 1, [1, 1, 1], [800, 150, 50]),
        ("concat", 1000, [1, 1, 1], [333, 333, 333]),
        ("interleave_over", 2, [1, 1, 1], [800, 346, 200]),
    ],
)
def test_a_mixture_has_the_shares_that_its_formula_gives(strategy, temperature, weights, expected, tmp_path):
    """Reference: by hand; sizes 800, 150 and 50."""
    names = []
    for number, count in enumerate((800, 150, 50)):
        rows = [{"prompt": f"{number} {i}?", "completion": " yes"} for i in range(count)]
        names.append(f"{write(tmp_path / f'{number}.jsonl', *rows)}={weights[number]}")
    found = dataset.load_data(
        settings(",".join(names), mix_strategy=strategy, mix_temperature=temperature), byte_level()
    ).train
    counts = [sum(row.where.startswith(str(tmp_path / f"{number}.jsonl")) for row in found) for number in range(3)]
    assert all(abs(count - wanted) <= 2 for count, wanted in zip(counts, expected, strict=True)), counts
    seen = Counter(row.where for row in found)
    for number in range(3):  # no row much oftener than another one of its source
        times = [count for where, count in seen.items() if where.startswith(str(tmp_path / f"{number}.jsonl"))]
        assert max(times) - min(times) <= 1
