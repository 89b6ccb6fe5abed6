"""What a run reads cannot run code, write elsewhere, or steer a terminal; what it knows does not leak.

Row 13 of docs/reliability.md.
"""

import ast
import json
import os
import pickle
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import UsageError
from tests.support import counts, faults, trials
from tests.support.counts import quick_and_full
from tests.support.paths import ROOT

SHORT = {"max_steps": 2, "eval_dataset": "", "eval_steps": 0, "num_samples": 0, "save_steps": 1}
PRODUCT = [ROOT / "train.py", ROOT / "backend_manager.py", *sorted((ROOT / "anyqlora").rglob("*.py"))]


# ----------------------------------------------------------------------------------------------------------- the source


def forbidden(tree: ast.AST):
    """(line, what) of everything that runs what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (
                (node.lineno, name)
                for name in names
                if name.split(".")[0] in ("pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle")
            )
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in (
            "eval",
            "exec",
            "compile",
            "os.system",
            "os.popen",
            "torch.load",
            "torch.save",
            "yaml.load",
            "yaml.unsafe_load",
            "yaml.full_load",
            "np.load",
            "numpy.load",
            "subprocess.getoutput",
            "commands.getoutput",
            "builtins.eval",
            "__import__",
            "torch.hub.load",
        ):
            yield node.lineno, called
        for keyword in node.keywords:
            text = ast.unparse(keyword.value)
            if keyword.arg in ("shell", "allow_pickle") and text != "False":
                yield node.lineno, f"{keyword.arg}={text}"
            if keyword.arg == "trust_remote_code" and text == "True":
                yield node.lineno, "trust_remote_code=True"
            if keyword.arg == "Loader" and text != "yaml.SafeLoader":
                yield node.lineno, f"Loader={text}"


# Runtime.save is torch.save on the first process, for loops of people's own; nothing of the product reads what it wrote
ASKED_FOR = {("anyqlora/on_torch/runtime/state.py", "torch.save")}


def test_the_source_runs_nothing_that_it_reads():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in PRODUCT
        for line, what in forbidden(ast.parse(path.read_text(encoding="utf-8")))
        if (str(path.relative_to(ROOT)), what) not in ASKED_FOR
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path, weights_only=True)",
        "eval(text)",
        "yaml.load(text)",
        "exec(code)",
        "os.system(x)",
        "subprocess.run(x, shell=True)",
        "np.load(p, allow_pickle=True)",
        "f(trust_remote_code=True)",
    ],
)
def test_the_check_of_the_source_finds(line):
    assert list(forbidden(ast.parse(line)))


def test_remote_code_is_off_and_on_the_command_line_only(tmp_path):
    assert resolve({}, environ={}).trust_remote_code is False
    (tmp_path / "run.yaml").write_text("trust_remote_code: true\n")
    with pytest.raises(UsageError, match="only be given on the command line"):
        resolve({"config": str(tmp_path / "run.yaml")}, environ={})
    with pytest.raises(UsageError, match="only be given on the command line"):
        resolve({}, environ={"ANYQLORA_TRUST_REMOTE_CODE": "1"})


# ------------------------------------------------------------------------------------------------------------- canaries


class Bomb:
    """A pickle that makes a file when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


CODE = "from pathlib import Path\nPath({mark!r}).touch()\nclass Evil:\n    pass\n"
TEMPLATES = (
    "{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}",
    "{{{{ lipsum.__globals__['os'].popen('touch {mark}').read() }}}}",
    "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
    "{{{{ messages.__class__.__base__.__subclasses__() }}}}",
    "{{% for c in ().__class__.__base__.__subclasses__() %}}{{{{ c }}}}{{% endfor %}}",
    "{{% include '/etc/passwd' %}}",
    "{{{{ self._TemplateReference__context }}}}",
)


def canaries(mark: str):
    """(name, plant(directory of the run's inputs) -> changed settings) of everything that would make the file `mark` if
    it were run.
    """
    bomb = pickle.dumps(Bomb(mark))

    def in_base(name):
        def plant(place, base):
            (base / name).write_bytes(bomb)
            return {}

        return plant

    def as_rows(name):
        def plant(place, base):
            (place / name).write_bytes(bomb)
            return {"dataset": str(place / name)}

        return plant

    def remote(change):
        def plant(place, base):
            (base / "evil.py").write_text(CODE.format(mark=mark))
            change(base)
            return {}

        return plant

    def edit(base, name, **changes):
        path = base / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))

    def template(text):
        def plant(place, base):
            edit(base, "tokenizer_config.json", chat_template=text)
            (place / "talk.jsonl").write_text(
                json.dumps(
                    {"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}, {"role": "assistant", "content": "x"}]}
                )
                + "\n"
            )
            return {"dataset": str(place / "talk.jsonl")}

        return plant

    for name in (
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "pytorch_model.bin",
        "added_tokens.json",
        "training_args.bin",
        "model.safetensors.index.json",
    ):
        yield f"a pickle as the base's {name}", in_base(name)
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.pkl"):
        yield f"a pickle as {name}", as_rows(name)
    maps = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    yield (
        "remote code of an unknown kind of model",
        remote(lambda base: edit(base, "config.json", model_type="evil", auto_map=maps)),
    )
    yield "remote code of a known kind of model", remote(lambda base: edit(base, "config.json", auto_map=maps))
    yield (
        "remote code of the tokenizer",
        remote(lambda base: edit(base, "tokenizer_config.json", auto_map=maps, tokenizer_class="Evil")),
    )
    yield (
        "remote code of the generation",
        remote(lambda base: edit(base, "generation_config.json", auto_map=maps, custom_generate="evil")),
    )
    for text in TEMPLATES:
        yield f"template {text[:30]}", template(text.format(mark=mark))


@quick_and_full
def test_nothing_that_is_read_is_run(job, tmp_path, full):
    mark = tmp_path / "executed"
    planted = list(canaries(str(mark)))[:: 1 if full else 5]

    def try_one(item):
        number, (name, plant) = item
        place = tmp_path / str(number)
        base = Path(shutil.copytree(job["model_name"], place / "base"))
        changes = plant(place, base)
        trial = trials.run(place / "output", {**job, **SHORT, "model_name": str(base), **changes})
        problems = ["executed"] if mark.exists() else []
        problems += ["a traceback: " + trial.said[-1500:]] if "Traceback" in trial.said else []
        problems += [] if trial.code in (0, 1, 2) else [f"exit code {trial.code}"]
        return [f"{name}: {p}" for p in problems]

    failures = trials.each(try_one, enumerate(planted))
    counts.hold(13, full, "canaries executed: pickles, remote code, template injection", len(failures), failures)


@quick_and_full
def test_pickles_in_a_run_directory_and_in_the_cache(job, stopped, tmp_path, full):
    """Each file that a start reads, and that of a finished run."""
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(str(mark)))
    names = [
        "identity.json",
        "metrics.jsonl",
        "samples.jsonl",
        "env.json",
        "plan.json",
        "config.resolved.yaml",
        "data_report.json",
        "result.json",
    ]
    names += [
        f"checkpoints/step-000020/{name}"
        for name in ("adapter_model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
    ]

    def try_one(name):
        output = tmp_path / name.replace("/", "-")
        (trials.copied(stopped(20), output) / name).write_bytes(bomb)
        trial = trials.run(output, job)
        return (
            [f"{name}: code {trial.code}: {trial.said[-800:]}"]
            if mark.exists() or "Traceback" in trial.said or trial.code not in (0, 2, 3)
            else []
        )

    failures = trials.each(try_one, names if full else names[:3])
    trial = trials.run(tmp_path / "cache", {**job, **SHORT}, faults.poison_cache, str(tmp_path / "xdg"), bomb)
    failures.append([] if trial.code == 0 and not mark.exists() else [f"the cache of hashes: {trial.said[-800:]}"])
    counts.hold("13a", full, "canaries executed: pickles in a run directory and in the cache", len(failures), failures)


@pytest.mark.parametrize(
    "text",
    [
        'name: !!python/object/apply:os.system ["touch {mark}"]',
        "name: !!python/name:os.system",
        "!!python/object:os.x {{name: x}}",
        "lr: !!python/object/new:os.system [touch {mark}]",
        "&a [*a]",
        "{bomb}",
    ],
)
def test_yaml_runs_nothing(tmp_path, text):
    mark, path = tmp_path / "executed", tmp_path / "run.yaml"
    path.write_bytes(pickle.dumps(Bomb(str(mark))) if text == "{bomb}" else text.format(mark=mark).encode())
    with pytest.raises(UsageError):
        resolve({"config": str(path)}, environ={})
    assert not mark.exists()


# ---------------------------------------------------------------------------------------------------------- confinement


NAMES = [
    "../out",
    "..",
    ".",
    "/tmp/out",
    "a/../../out",
    "a/b",
    "a\\..\\b",
    "out\0",
    "%2e%2e/x",
    "a\nb",
    "~/x",
    "x\u202ey",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", ["run_name", "profiling_output"])
def test_names_stay_inside_the_output_root(name, setting):
    with pytest.raises(UsageError, match="is not a plain name"):
        resolve({setting: name, "profile": True}, environ={})


@pytest.mark.parametrize("linked", ["", "checkpoints", "adapter", "metrics.jsonl", "checkpoints/step-000003.staged"])
def test_links_do_not_lead_out(job, tmp_path, linked):
    outside, output = tmp_path / "outside", tmp_path / "output"
    outside.mkdir()
    place = output / "run" / linked
    place.parent.mkdir(parents=True)
    place.symlink_to(outside, target_is_directory=True)
    trial = trials.run(output, {**job, **SHORT})
    assert trial.code == 2 and "link" in trial.said + "leads out" and "Traceback" not in trial.said, trial.said
    assert not any(outside.iterdir())


def test_names_in_a_tokenizer_stay_inside_too(job, tmp_path):
    """transformers writes each named chat template as a file of that name."""
    base = Path(shutil.copytree(job["model_name"], tmp_path / "base"))
    path = base / "tokenizer_config.json"
    templates = [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "../../../../../../../../" + str(tmp_path) + "/escaped", "template": "x"},
    ]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    trial = trials.run(tmp_path / "output", {**job, **SHORT, "model_name": str(base)})
    assert not list(tmp_path.glob("escaped*")), trial.said
    assert trial.code == 2 and "Traceback" not in trial.said, trial.said


# ------------------------------------------------------------------------------------------------- secrets and displays


SECRETS = {
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz123456",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MY_SERVICE_PASSWORD": "correct-horse-7",
    "yaml": "sk-proj4bcdefghijklmnop",
    "query": "qtoken5ecret",
    "url": "pa55word-of-url",
}


@quick_and_full
def test_secrets_are_nowhere(job, tmp_path, full):
    """In the environment, in the YAML, in an address; in runs that succeed and in runs that fail."""
    settings = {**job, **SHORT, "log_to": "stdout,tensorboard" if find_spec("tensorboard") else "stdout"}
    address = f"https://user:{SECRETS['url']}@example.invalid/rows.jsonl?token={SECRETS['query']}"
    environment = {name: SECRETS[name] for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_SERVICE_PASSWORD")}
    stated = {
        "tracker_name": f"of {SECRETS['yaml']}",
        "tracker_group": SECRETS["HF_TOKEN"],
        "project_name": SECRETS["WANDB_API_KEY"],
        "tracker_entity": SECRETS["MY_SERVICE_PASSWORD"],
    }
    runs_of = {
        "works": stated,
        "rows": {"dataset": address},
        "model": {"model_name": address},
        "held": {"eval_dataset": address},
    }

    def try_one(item):
        name, changes = item
        trial = trials.run(tmp_path / name, {**settings, **changes}, faults.set_environment, environment)
        return (
            []
            if trial.code == (0 if name == "works" else 2) and "Traceback" not in trial.said
            else [f"{name}: {trial.code}: {trial.said[-800:]}"]
        )

    failures = trials.each(try_one, runs_of.items())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    found = [
        f"{secret} in {path.relative_to(tmp_path)}"
        for path in files
        for secret, text in SECRETS.items()
        if text.encode() in path.read_bytes()
    ]
    counts.hold(
        "13b",
        full,
        "planted secrets found in a file or an output",
        len(SECRETS),
        [*failures, found],
        files_searched=len(files),
    )


def test_a_terminal_is_not_steered_and_a_page_is_not_written(job, tmp_path):
    hostile = "\x1b]0;owned\x07\x1b[2J[red]x[/red]<script>alert(1)</script>"
    rows = [{"prompt": f"{hostile} {n}:", "completion": f" {hostile}"} for n in range(4)]
    place = tmp_path / f"{hostile.replace('/', '|')}.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trial = trials.run(
        tmp_path / "output",
        {
            **job,
            "max_steps": 2,
            "dataset": str(place),
            "eval_dataset": str(place),
            "num_samples": 3,
            "max_new_tokens": 4,
            "lora_target_modules": ".*(q_proj|v_proj|<b>)",
        },
    )
    assert trial.code == 0 and "\x1b" not in trial.said and "\x07" not in trial.said, trial.said
    assert "[red]x[/red]" in trial.said
    card = (trial.directory / "adapter/README.md").read_text()
    assert "\x1b" not in card and "<b>" not in card
    assert all("<script>" not in part for part in card.split("`")[::2])  # between backticks it is text
