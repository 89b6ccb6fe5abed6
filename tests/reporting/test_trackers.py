"""Trackers are fed from metrics.jsonl; secrets do not reach them; wandb, tensorboard and trackio for real where they
are installed.
"""

import importlib.util
import json
import math
import sqlite3
import sys

import pytest

from anyqlora.config.resolve import resolve
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.redaction import redacted
from anyqlora.reporting import trackers
from tests.support import runs

SMALL = {
    "model_name": "demo",
    "dataset": "demo",
    "eval_dataset": "demo",
    "context_length": 128,
    "batch_size": 4,
    "precision": "fp32",
    "max_steps": 3,
    "lr": 3e-3,
    "exact_match": False,
    "eval_batch_size": 64,
}
INSTALLED = [name for name in registry.TRACKERS if importlib.util.find_spec(name)]
WITH_TRACKERS = pytest.mark.skipif(not INSTALLED, reason="no tracker is installed: pip install '.[trackers]'")


# ------------------------------------------------------------------------------------------------------------ secrets


@pytest.mark.parametrize(
    "secret",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
        "sk-proj-abc123DEF456ghi789",
        "sk-ant-api03-0123456789abcdef",
        "ghp_" + "a1" * 18,
        "0123456789abcdef" * 2 + "01234567",
        "wandb_v1_abcdefghij0123456789",
        "github_pat_" + "a1b2" * 6,
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-123456789012-abc",
        "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM",
    ],
)
def test_tokens_are_known_by_their_shape(secret):
    for text in (secret, f"runs of {secret}.", f"https://host/path?x={secret}", f"'{secret}'"):
        assert secret not in redacted(text, {}) and "***" in redacted(text, {})


def test_secrets_are_known_by_the_environment_that_holds_them():
    environ = {
        "MY_TOKEN": "hunter22",
        "DB_PASSWORD": "pass,word",
        "AWS_SECRET_ACCESS_KEY": "short1",
        "HOME": "/home/me",
        "EMPTY_KEY": "",
        "SMALL_KEY": "12",
    }
    config = {
        "dataset": "s3://hunter22/rows.jsonl",
        "name": "pass,word",
        "lr": 2e-4,
        "tags": ["short1", "/home/me", "12"],
        "strict": False,
    }
    assert redacted(config, environ) == {
        "dataset": "s3://***/rows.jsonl",
        "name": "***",
        "lr": 2e-4,
        "tags": ["***", "/home/me", "12"],
        "strict": False,
    }


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://me:pw@host/a.jsonl", "https://***@host/a.jsonl"),
        ("https://host/a?X-Amz-Signature=0a1b&part=2", "https://host/a?X-Amz-Signature=***&part=2"),
        ("https://host/a?access_token=q&api_key=r#frag", "https://host/a?access_token=***&api_key=***#frag"),
        ("https://host/a?sig=q", "https://host/a?sig=***"),
    ],
)
def test_secrets_in_urls(url, kept):
    assert redacted(url, {}) == kept


@pytest.mark.parametrize(
    "text",
    [
        "meta-llama/Llama-3.2-1B-Instruct",
        "rows/task-1.jsonl=2,b.jsonl=0.5",
        "hf_internal",
        "sk-learn",
        "q_proj,v_proj",
        "https://host/a.jsonl?part=2",
        "2026-11-20",
    ],
)
def test_ordinary_words_stay(text):
    assert redacted(text, {}) == text


def test_a_commit_stays_where_a_commit_belongs():
    commit = "0123456789abcdef" * 2 + "01234567"
    assert redacted({"revision": commit, "name": commit}, {}) == {"revision": commit, "name": "***"}
    assert redacted({"revision": "hf_AbCdEfGhIjKlMn"}, {}) == {"revision": "***"}


# ------------------------------------------------------------------------------------------------- asked and not there


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.TRACKERS, "no_such_tracker", "nothing:Nothing")
    with pytest.raises(UsageError, match="no_such_tracker is not installed") as error:
        runs.run(tmp_path, **{**SMALL, "log_to": "stdout,no_such_tracker"})
    assert error.value.cure == "pip install no_such_tracker" and error.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_nothing_is_imported_that_was_not_asked_for():
    assert not {"wandb", "trackio", "tensorboard"} & set(sys.modules) or INSTALLED
    trackers.check_trackers(resolve({**SMALL, "log_to": "stdout"}, environ={}))
    assert trackers.tracker_names(resolve({**SMALL, "log_to": "trackio, wandb,none,trackio"}, environ={})) == [
        "trackio",
        "wandb",
    ]


def test_names_that_no_tracker_reads_are_warned_of(tmp_path):
    said = []
    trackers.Trackers(
        resolve({**SMALL, "tracker_group": "g", "tracker_entity": "e"}, environ={}), tmp_path, False, said.append
    )
    assert said == [
        "tracker_group does nothing here: it is for log_to wandb or trackio",
        "tracker_entity does nothing here: it is for log_to wandb",
    ]


def test_offline_refuses_a_server(monkeypatch):
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UsageError, match="makes trackio send to a server"):
        trackers.check_trackers(resolve({**SMALL, "log_to": "trackio", "offline": True}, environ={}))


# --------------------------------------------------------------------------------------------- fed from metrics.jsonl


class Notebook:
    """A tracker that writes down what it is told. It stands under the name of a package that is always there."""

    name = "json"
    fails_at = math.inf

    def __init__(self, run):
        self.broadcast = Notebook.told = [run]
        if run.config.tracker_group == "broken":
            raise RuntimeError("cannot start with hf_AbCdEfGhIjKlMnOp")

    def record(self, step, values):
        if len(self.broadcast) > self.fails_at:
            raise RuntimeError("the server went away")
        self.broadcast.append((step, values))

    def close(self):
        self.broadcast.append("closed")


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setitem(registry.TRACKERS, "json", f"{__name__}:Notebook")
    monkeypatch.setattr(Notebook, "fails_at", math.inf)
    return {**SMALL, "log_to": "none,json"}


def recorded(directory) -> list[tuple[int, dict]]:
    """What metrics.jsonl says, by hand."""
    told = []
    for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        prefix = "eval/" if line.get("event") else ""
        told.append((line["step"], {prefix + k: v for k, v in line.items() if k != "step" and not isinstance(v, str)}))
    return told


def test_a_tracker_is_told_what_metrics_has(notebook, tmp_path):
    directory = runs.run(tmp_path, **notebook, project_name="p hf_AbCdEfGhIjKlMnOp", tracker_group="g")
    run, *told, closed = Notebook.told
    assert told == recorded(directory) and closed == "closed"
    assert [step for step, _ in told] == [0, 1, 2, 3, 3]
    assert run.about["project"] == "p ***" and run.about["group"] == "g" and run.about["name"] == "run"
    assert run.settings["lr"] == 3e-3 and not run.resumed


def test_what_is_not_finite_is_told_as_it_is():
    assert math.isnan(trackers.numeric_values({"step": 1, "loss": "nan"})["loss"])
    assert trackers.numeric_values({"step": 1, "loss": "-inf", "rows": "a:1", "skipped": True}) == {
        "loss": -math.inf,
        "skipped": True,
    }


def test_a_tracker_that_fails_on_the_way_does_not_end_the_run(notebook, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Notebook, "fails_at", 2)
    directory = runs.run(tmp_path, **notebook)
    assert runs.result(directory)["steps"] == 3 and len(recorded(directory)) == 5
    assert len(Notebook.told) == 3
    assert capsys.readouterr().err == "warning: json is given up: the server went away\n"


def test_a_tracker_that_does_not_start_ends_it(notebook, tmp_path):
    with pytest.raises(UsageError, match=r"json: it does not start: cannot start with \*\*\*"):
        runs.run(tmp_path, **notebook, tracker_group="broken")


# ---------------------------------------------------------------------------------------------------------- for real


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """One run with every tracker that is installed, with secrets in its settings and in the environment."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        patch.setenv("SOME_SECRET", "dont-tell-anyone")
        for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
            patch.delenv(name, raising=False)
        directory = runs.run(
            tmp_path_factory.mktemp("tracked"),
            **SMALL,
            log_to=",".join(["none", *INSTALLED]),
            tracker_group="g-dont-tell-anyone",
            tracker_entity="hf_AbCdEfGhIjKlMnOpQrSt",
            project_name="p",
        )
    return directory, home


@WITH_TRACKERS
def test_no_secret_reaches_a_tracker(tracked):
    directory, home = tracked
    places = [home, *(directory / name for name in ("wandb", "tensorboard") if (directory / name).exists())]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        assert b"dont-tell-anyone" not in content and b"hf_AbCdEf" not in content, path


@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")
def test_wandb_is_offline_without_a_key(tracked):
    """Its file is not compressed: settings and each loss stand in it as text."""
    directory, _ = tracked
    (file,) = (directory / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"lora_rank" in content and b"g-***" in content
    for _step, values in recorded(directory):
        for name in ("loss", "eval/loss"):
            assert name not in values or json.dumps(values[name]).encode() in content


@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_written(tracked):
    """The reference is tensorboard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory, _ = tracked
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    for name in ("loss", "lr", "grad_norm", "eval/loss"):
        expected = [(step, values[name]) for step, values in recorded(directory) if name in values]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6)
    assert "| lora_rank | 16 |" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="tensorboard is not installed")
def test_tensorboard_has_each_step_once_after_a_crash(tmp_path):
    """Before the first checkpoint, and after it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Crash(Exception):
        pass

    def crash_at(last):
        def during(step):
            if step == last:
                raise Crash

        return during

    settings = {
        **SMALL,
        "max_steps": 6,
        "save_steps": 3,
        "log_to": "tensorboard",
        "num_samples": 0,
        "eval_dataset": "",
        "eval_fraction": 0.01,
    }
    for last in (2, 5):
        with pytest.raises(Crash):
            runs.run(tmp_path, during=crash_at(last), **settings)
    directory = runs.run(tmp_path, **settings)
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 6]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [line["loss"] for line in runs.metrics(directory)], rel=1e-6
    )


@pytest.mark.skipif("trackio" not in INSTALLED, reason="trackio is not installed")
def test_trackio_keeps_it_in_its_own_database(tracked):
    directory, home = tracked
    with sqlite3.connect(home / "trackio" / "p.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    told = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [(step, metrics["loss"]) for step, metrics in told if "loss" in metrics] == [
        (step, values["loss"]) for step, values in recorded(directory) if "loss" in values
    ]
