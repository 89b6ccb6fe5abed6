"""Names that are more than a path: configurations and splits, an index of sets, addresses, standard input."""

import base64
import functools
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from anyqlora.core.errors import UsageError
from anyqlora.data import dataset
from anyqlora.data.readers import places, sources
from tests.support import local_hub
from tests.support.data_fixtures import TOOLS, byte_level, settings, write
from tests.support.paths import ROOT


def rows(name, count=3):
    return [{"prompt": f"{name} {i}?", "completion": f" {i}."} for i in range(count)]


def loaded(name, tokens=None, **more):
    return dataset.load_data(settings(name, **more), tokens or byte_level())


def prompts(name, **more):
    return [example.prompt for example in loaded(name, **more).train]


def refused(name, **more):
    with pytest.raises(UsageError) as error:
        loaded(name, **more)
    return str(error.value)


def asked(path, *prefixes):
    return [f"{prefix} {i}?" for prefix in prefixes for i in range(3)]


# ------------------------------------------------------------------------------------------ configurations and splits


@pytest.fixture
def configured(tmp_path):
    """A set with two configurations, as its README's front says."""
    directory = tmp_path / "set"
    for name in ("main", "extra"):
        for split in ("train", "test"):
            (directory / name).mkdir(parents=True, exist_ok=True)
            write(directory / name / f"{split}.jsonl", *rows(f"{name} {split}"))
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train*\n"
        f"  - split: test\n    path: {name}/test*\n"
        for name in ("main", "extra")
    )
    (directory / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configs}---\n# A set\n")
    return directory


def test_of_several_configurations_one_is_named(configured):
    error = refused(configured)
    assert "several configurations, and none is named: main, extra" in error
    assert f"--dataset {configured}:main" in error
    assert prompts(f"{configured}:main") == asked(configured, "main train")
    assert prompts(f"{configured}:extra") == asked(configured, "extra train")
    assert "no configuration 'man'; did you mean 'main'?" in refused(f"{configured}:man")


def test_a_split_is_named_or_the_one_to_train_on(configured):
    assert prompts(f"{configured}:main[test]") == asked(configured, "main test")
    held_out = loaded(f"{configured}:main", eval_dataset=f"{configured}:main").held_out
    assert [example.prompt for example in held_out] == asked(configured, "main test")
    assert "no split 'dev'" in refused(f"{configured}:main[dev]")


def test_the_default_configuration_needs_no_name(tmp_path):
    write(tmp_path / "a.jsonl", *rows("a"))
    write(tmp_path / "b.jsonl", *rows("b"))
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: b.jsonl\n"
        "- config_name: other\n  data_files: [a.jsonl, b.jsonl]\n---\n"
    )
    assert prompts(tmp_path) == asked(tmp_path, "b")
    assert prompts(f"{tmp_path}:other") == asked(tmp_path, "a", "b")


def test_splits_and_directories_without_a_readme(tmp_path):
    (tmp_path / "part").mkdir()
    for name in ("train", "validation"):
        write(tmp_path / "part" / f"{name}.jsonl", *rows(name))
    assert prompts(f"{tmp_path}:part") == asked(tmp_path, "train")
    assert prompts(f"{tmp_path}:part[validation]") == asked(tmp_path, "validation")
    assert "no file of split 'test'" in refused(f"{tmp_path}:part[test]")
    assert "no configuration 'parts'; did you mean 'part'?" in refused(f"{tmp_path}:parts")


def test_a_file_has_neither(tmp_path):
    path = write(tmp_path / "a.jsonl", *rows("a"))
    assert "a file has no configurations and no splits" in refused(f"{path}[train]")


def test_a_path_may_look_like_a_name_with_a_split(tmp_path):
    path = write(tmp_path / "a[train].jsonl", *rows("a"))
    (tmp_path / "b:c").mkdir()
    write(tmp_path / "b:c" / "x.jsonl", *rows("b"))
    assert prompts(path) == asked(path, "a")
    assert prompts(tmp_path / "b:c") == asked(path, "b")


def test_a_set_of_the_hub_with_two_directories_is_not_read_as_one(tmp_path):
    """As gsm8k's main and socratic, which have the same rows in two forms."""
    files = {
        f"{name}/train-00000-of-00001.jsonl": "".join(json.dumps(row) + "\n" for row in rows(name)).encode()
        for name in ("main", "socratic")
    }
    code = (
        "import sys; from anyqlora.core.errors import UsageError\n"
        "from anyqlora.data.readers import sources\n"
        "try: print([row.value['prompt'] for source in sources.read(sys.argv[1]) for row in source.rows])\n"
        "except UsageError as error: print(error)"
    )
    with local_hub.serving(kind="datasets", name="open/gsm", files=files) as (_, endpoint):
        found = {
            name: local_hub.python("-c", code, name, endpoint=endpoint, home=tmp_path).stdout
            for name in ("open/gsm", "open/gsm:socratic")
        }
    assert "several configurations, and none is named: main, socratic" in found["open/gsm"]
    assert found["open/gsm:socratic"].strip() == str(asked(None, "socratic"))


# ---------------------------------------------------------------------------------------------------------- an index


PAIR = {"prompt": "q", "chosen": "y", "rejected": "n"}
INDEX = {
    "plain": {"file_name": "plain.json"},
    "renamed": {"file_name": "renamed.jsonl", "columns": {"prompt": "q", "response": "a", "system": "s"}},
    "raw": {"file_name": "raw.jsonl", "columns": {"prompt": "body"}},
    "talk": {
        "file_name": "talk.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "tools": "toolbox"},
        "tags": {
            "role_tag": "who",
            "content_tag": "says",
            "user_tag": "customer",
            "assistant_tag": "clerk",
            "observation_tag": "result",
            "function_tag": "call",
        },
    },
    "few": {"file_name": "plain.json", "num_samples": 2},
    "ranked": {
        "file_name": "ranked.jsonl",
        "ranking": True,
        "columns": {"prompt": "q", "chosen": "y", "rejected": "n"},
    },
    "elsewhere": {"ms_hub_url": "owner/name"},
}
ALPACA = {"instruction": "Say o.", "input": "", "output": "o"}
TALK = [
    {"who": "customer", "says": "Hello"},
    {"who": "call", "says": json.dumps({"name": "add", "arguments": {"a": 1}})},
    {"who": "result", "says": "2"},
    {"who": "clerk", "says": "It is two."},
]


@pytest.fixture
def index(tmp_path):
    """A directory as LLaMA-Factory's data."""
    (tmp_path / "dataset_info.json").write_text(json.dumps(INDEX))
    (tmp_path / "plain.json").write_text(json.dumps([ALPACA] * 4))
    write(tmp_path / "renamed.jsonl", {"q": "Who?", "a": "Tam."})
    write(tmp_path / "raw.jsonl", {"body": "Bren bought two lamps."})
    write(tmp_path / "talk.jsonl", {"turns": TALK, "toolbox": json.dumps([{"name": "add"}])})
    write(tmp_path / "ranked.jsonl", {"q": "Who?", "y": "Tam.", "n": "Bren."})
    return tmp_path


def test_sets_of_an_index_are_read_by_name(index):
    assert len(loaded(f"{index}:plain").train) == 4
    assert len(loaded(f"{index}/dataset_info.json:few").train) == 2
    [renamed] = loaded(f"{index}:renamed").train
    assert "### Instruction:\nWho?" in renamed.prompt and renamed.answer == "Tam."
    [raw] = loaded(f"{index}:raw").train
    assert raw.answer is None and raw.trained.all()
    mixed = loaded(f"{index}:plain=2,{index}:renamed")
    assert len(mixed.train) == 9


def test_roles_and_calls_of_an_index_are_those_that_its_tags_name(index):
    tokens = byte_level(TOOLS)
    [found] = loaded(f"{index}:talk", tokens).train
    text = tokens.decode(found.ids)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{call}" in text
    assert "<|im_start|>tool\n2<|im_end|>" in text and text.endswith("assistant\nIt is two.<|im_end|>\n")
    assert tokens.decode(found.ids[found.trained]) == f"{call}It is two.<|im_end|>"


def test_a_ranked_set_of_an_index_says_that_it_is_one(index):
    assert "--preference_data chosen" in refused(f"{index}:ranked")
    [found] = loaded(f"{index}:ranked", preference_data="chosen").train
    assert found.answer.strip() == "Tam."


def test_an_index_without_a_name_lists_its_sets(index):
    error = refused(index)
    assert "several sets, and none is named: plain, renamed, raw" in error
    assert "no set 'plan'; did you mean 'plain'?" in refused(f"{index}:plan")
    assert "names no file_name and no hf_hub_url" in refused(f"{index}:elsewhere")


def test_what_an_entry_says_is_a_part_of_the_run(index):
    """Else a run would go on with other columns, and kept tokens would be those of before."""
    name = f"{index}:renamed"
    before = sources.meaning(name)
    kept = {"token_cache": str(index / "kept")}
    first = loaded(name, **kept).train[0].ids.tolist()
    changed = {**INDEX, "renamed": {"file_name": "renamed.jsonl", "columns": {"prompt": "a", "response": "q"}}}
    (index / "dataset_info.json").write_text(json.dumps(changed))
    assert sources.meaning(name) != before
    assert loaded(name, **kept).train[0].ids.tolist() != first
    assert loaded(name).train[0].answer == "Who?"


# ---------------------------------------------------------------------------------------------------------- addresses


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(the address of a directory, the directory, what was asked for)."""
    asked_for, directory = [], tmp_path / "served"
    directory.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            asked_for.append(self.path)
            super().do_GET()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(directory)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    yield f"http://127.0.0.1:{server.server_port}", directory, asked_for
    server.shutdown()
    server.server_close()


def test_an_address_is_fetched_once(served):
    address, directory, asked_for = served
    path = write(directory / "a.jsonl", *rows("a"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert prompts(f"{address}/a.jsonl") == asked(path, "a")
    assert prompts(f"{address}/a.jsonl#sha256={digest}=2") == 2 * asked(path, "a")
    path.unlink()
    assert prompts(f"{address}/a.jsonl#sha256={digest}") == asked(path, "a")
    assert prompts(f"{address}/a.jsonl", offline=True) == asked(path, "a")
    assert asked_for == ["/a.jsonl"]


def test_a_user_and_a_password_are_sent_and_said_nowhere(served, monkeypatch):
    address, directory, _ = served
    write(directory / "a.jsonl", *rows("a"))
    given = []
    send_head = http.server.SimpleHTTPRequestHandler.send_head

    def watched(handler):
        given.append(handler.headers.get("Authorization"))
        return send_head(handler)

    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "send_head", watched)
    private = address.replace("http://", "http://me:pa55w%40rd@")
    assert prompts(f"{private}/a.jsonl") == asked(None, "a")
    assert given == ["Basic " + base64.b64encode(b"me:pa55w@rd").decode()]
    error = refused(f"{private}/none.jsonl")
    assert "404" in error and "pa55" not in error and "***@" in error


def test_a_file_with_another_checksum_is_refused(served):
    address, directory, _ = served
    write(directory / "a.jsonl", *rows("a"))
    error = refused(f"{address}/a.jsonl#sha256={'0' * 64}")
    assert "not the stated one" in error and f"{address}/a.jsonl" in error
    assert not list((places.cache_directory() / "downloads").glob("*/*"))


def test_what_cannot_be_fetched_is_named_with_the_reason(served):
    address, _, _ = served
    assert "404" in refused(f"{address}/none.jsonl")
    assert "--offline true fetches nothing" in refused(f"{address}/none.jsonl", offline=True)
    assert "an address that names no file" in refused(f"{address}/")
    assert "s3 needs a library that is not here" in refused("s3://bucket/a.jsonl")


# ----------------------------------------------------------------------------------------------------- standard input


def test_rows_from_standard_input_are_kept_under_their_hash(tmp_path):
    text = "".join(json.dumps(row) + "\n" for row in rows("a", 5)).encode()
    byte_level().save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "anyqlora", "data", "--model_name", str(tmp_path / "model"), "--dataset", "-"]
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    out = subprocess.run(command, input=text, cwd=ROOT, env=environ, capture_output=True, check=True)
    name = f"{hashlib.sha256(text).hexdigest()[:16]}.jsonl"
    assert f"standard_input/{name}: 5 rows" in out.stdout.decode()
    assert (tmp_path / "anyqlora" / "standard_input" / name).read_bytes() == text
    empty = subprocess.run(command, input=b"", cwd=ROOT, env=environ, capture_output=True, check=False)
    assert empty.returncode == 2 and b"the file is empty" in empty.stderr
