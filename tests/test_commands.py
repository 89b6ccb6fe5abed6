"""The verbs that start from a run directory, config explain, and doctor."""

import io
import json
import math
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file, save_file

from anyqlora.__main__ import main
from anyqlora.commands import doctor
from anyqlora.config import SETTINGS
from anyqlora.errors import UsageError
from anyqlora.finished import Finished, find, read
from anyqlora.layouts import DEMO_BASE
from anyqlora.machine import Machine
from anyqlora.outcome import next_commands

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = ROOT / "anyqlora" / "demo" / "task" / "heldout.jsonl"
SMALL = {"model_name": "demo", "dataset": "demo", "context_length": 128, "batch_size": 4, "precision": "fp32", "max_steps": 3, "lr": 3e-3,
         "samples": 3, "lora_rank": 4, "max_new_tokens": 24, "exact_match": True}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Eight held-out rows, so that answers take no time."""
    path = tmp_path_factory.mktemp("rows") / "few.jsonl"
    path.write_text("".join(HELD_OUT.read_text().splitlines(keepends=True)[:8]))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, rows):
    """A run that the train verb made."""
    output = tmp_path_factory.mktemp("commands")
    flags = {**SMALL, "eval_dataset": rows, "output_dir": output, "run_name": "small", "log_to": "none", "backend": "cpu"}
    assert main(["train", *(word for name, value in flags.items() for word in (f"--{name}", str(value).lower()))]) == 0
    return output / "small"


# -------------------------------------------------------------------------------------------------------------- eval


@pytest.mark.parametrize("settings", [
    {},
    {"quantizer": "nf4", "adapter": "pissa", "precision": "bf16_autocast", "eval_fraction": 0.02},
    {"quantizer": "int8", "adapter": "rslora", "precision": "bf16"},
    {"quantizer": "fp4", "adapter": "dora", "use_gradient_checkpointing": True},
    {"train_type": "full"},
], ids=lambda s: "-".join(map(str, s.values())) or "nf4-lora")
def test_eval_gives_the_numbers_of_the_run_bit_for_bit(settings, finished, rows, tmp_path, capsys):
    """The reference is `after` in result.json, measured by the model that was trained."""
    if settings:
        held_out = {} if "eval_fraction" in settings else {"eval_dataset": str(rows)}
        finished = runs.run(tmp_path, **{**SMALL, "samples": 0, **held_out, **settings})
    from anyqlora.on_torch.tuned import load

    run = read(finished)
    tuned = load(run, {"samples": 0})
    found = tuned.evaluate(run.held_out(tuned.tokenizer))
    after = runs.result(finished)["eval"]["after"]
    if settings.get("train_type") == "full":  # the file has the base's own bf16
        assert found["loss"] == pytest.approx(after["loss"], rel=2e-2)
    else:
        assert {name: found[name] for name in ("loss", "perplexity", "exact_match", "tokens")} == after
        assert after["loss"] != runs.result(finished)["eval"]["before"]["loss"]


def test_eval_prints_them(finished, capsys):
    assert main(["eval", str(finished)]) == 0
    out = capsys.readouterr().out
    assert "8 held-out rows" in out and f"{runs.result(finished)['eval']['after']['loss']:.6f}" in out
    assert out.count("as at the end of the run") == 3


def test_eval_on_other_rows_agrees_with_peft(tmp_path, capsys):
    """The reference is PEFT and transformers alone, on unquantized weights: the mean loss of each row's completion."""
    import peft
    import transformers

    directory = runs.run(tmp_path, **{**SMALL, "train_type": "lora", "samples": 0})
    other = tmp_path / "other.jsonl"
    some = HELD_OUT.read_text().splitlines()[20:26]
    other.write_text("\n".join(some) + "\n")
    assert main(["eval", str(directory), "--dataset", str(other), "--exact_match", "false"]) == 0
    printed = float(capsys.readouterr().out.splitlines()[1].split()[1])

    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, directory / "adapter").eval()
    words = transformers.AutoTokenizer.from_pretrained(directory / "adapter")
    total, count = 0.0, 0
    for row in map(json.loads, some):
        prompt = words(row["prompt"], add_special_tokens=False).input_ids
        ids = words(row["prompt"] + row["completion"], add_special_tokens=False).input_ids + [words.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1:-1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[len(prompt):]), reduction="sum"))
        count += len(ids) - len(prompt)
    assert printed == pytest.approx(total / count, abs=2e-6)


def test_eval_refuses_rows_that_have_changed(tmp_path, rows):
    mine = tmp_path / "mine.jsonl"
    mine.write_bytes(rows.read_bytes())
    directory = runs.run(tmp_path, **{**SMALL, "max_steps": 1, "samples": 0, "eval_dataset": str(mine), "exact_match": False})
    mine.write_text(mine.read_text().replace("white", "black", 1))
    assert mine.read_bytes() != rows.read_bytes()
    assert main(["eval", str(directory)]) == 2


# --------------------------------------------------------------------------------------------------- generate and chat


def sampled(directory) -> list[dict]:
    """The answers at the run's end: the reference for generate and chat."""
    return [line for line in map(json.loads, (directory / "samples.jsonl").read_text().splitlines()) if line["step"] == 3]


def test_generate_gives_the_answers_of_the_run(finished, tmp_path, capsys):
    expected = sampled(finished)
    assert main(["generate", str(finished), "--prompt", expected[0]["prompt"]]) == 0
    assert capsys.readouterr().out == expected[0]["answer"] + "\n"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n".join(line["prompt"] for line in expected))
    assert main(["generate", str(finished), f"--file={prompts}"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"prompt": line["prompt"], "answer": line["answer"]} for line in expected]


def test_temperature_draws_by_the_seed(finished, capsys):
    def drawn(seed):
        main(["generate", str(finished), "--prompt", "Rosa sold 59", "--temperature", "2.5", "--seed", str(seed)])
        return capsys.readouterr().out

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(2**63 - 1)
    for temperature in ("1e-4", "1e300"):
        assert main(["generate", str(finished), "--prompt", "Rosa sold 59", "--temperature", temperature, "--max_new_tokens", "4"]) == 0


@pytest.mark.parametrize(("argv", "why"), [
    (["generate", "--temperature", "1e-300", "--prompt", "a"], "1e-300 is neither 0 nor at least 0.0001"), (["chat", "--temperature", "1e-5"], "is neither 0 nor"),
    (["generate", "--seed", "99999999999999999999", "--prompt", "a"], "is not between 0 and 9223372036854775807")])
def test_what_cannot_be_drawn_with_is_refused(argv, why, finished, capsys):
    assert main([argv[0], str(finished), *argv[1:]]) == 2
    assert why in capsys.readouterr().err


def test_chat_answers_each_line(finished, capsys, monkeypatch):
    expected = sampled(finished)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line["prompt"] + "\n" for line in expected[:2])))
    assert main(["chat", str(finished), "--max_new_tokens", "24"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in out[1:] if line.strip()] == [line["answer"].strip() for line in expected[:2]]


def test_a_conversation_goes_on_and_an_empty_line_starts_anew(tmp_path, capsys, monkeypatch):
    """What the model is asked is the tokenizer's own template over all turns so far."""
    from anyqlora.on_torch.tuned import Tuned

    base = tmp_path / "base"
    shutil.copytree(DEMO_BASE, base)
    about = json.loads((base / "tokenizer_config.json").read_text())
    about["chat_template"] = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                              "{% if add_generation_prompt %}assistant: {% endif %}")
    (base / "tokenizer_config.json").write_text(json.dumps(about))
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"messages": [{"role": "user", "content": "Rosa"}, {"role": "assistant", "content": "sold"}]}) + "\n")
    directory = runs.run(tmp_path, **{**SMALL, "model_name": str(base), "dataset": str(talk), "samples": 0, "max_steps": 1})
    asked, answer = [], Tuned.answer
    monkeypatch.setattr(Tuned, "answer", lambda self, questions, **more: asked.append(questions[0]) or answer(self, questions, **more))
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\nthree\n"))
    assert main(["chat", str(directory), "--max_new_tokens", "4"]) == 0
    assert [[m["role"] for m in messages] for messages in asked] == [["user"], ["user", "assistant", "user"], ["user"]]
    assert [messages[-1]["content"] for messages in asked] == ["one", "two", "three"]


@pytest.mark.parametrize(("form", "style", "asked"), [
    ("prompt_completion", "auto", "Why?"),
    ("alpaca", "auto", "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
                       "### Instruction:\nWhy?\n\n### Response:\n"),
    ("alpaca", "plain", "Why?\n\n"),
    ("question_answer", "auto", "###Question:\nWhy?\n###Answer:\n"),
    ("text", "auto", "Why?"),
    ("messages", "auto", [{"role": "user", "content": "Why?"}]),
    ("prompt_completion", "chat", [{"role": "user", "content": "Why?"}]),
])
def test_a_question_is_put_as_the_rows_put_theirs(form, style, asked, finished):
    run = read(finished)
    run = Finished(run.directory, run.config.with_(prompt_format=style), run.result, {"sources": [{"format": form}]})
    assert run.asked("Why?") == asked


def test_the_next_commands_of_the_report_work(finished, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Rosa sold 59 green carpets in Thornbrook on Saturday. JSON:\n"))
    for command in next_commands(finished):
        assert main(shlex.split(command.split(" -m anyqlora ")[1])) == 0
    assert sampled(finished)[0]["answer"] in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------- finding the run


def test_a_run_is_found_by_path_by_name_and_as_the_newest(finished, tmp_path, monkeypatch):
    for name in ("old", "new", "going"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    (tmp_path / "runs" / "going" / "result.json").unlink()
    os.utime(tmp_path / "runs" / "old" / "result.json", (1, 1))
    monkeypatch.chdir(tmp_path)
    assert find("").directory == Path("runs/new") and find("old").directory == Path("runs/old")
    assert find(str(finished)).directory == finished
    monkeypatch.setenv("ANYQLORA_OUTPUT_DIR", str(finished.parent))
    assert find("").directory == finished
    monkeypatch.delenv("ANYQLORA_OUTPUT_DIR")
    with pytest.raises(UsageError, match="did you mean 'new'"):
        find("neww")
    with pytest.raises(UsageError, match="not finished"):
        find("going")
    with pytest.raises(UsageError, match="not a run directory"):
        find(str(tmp_path))


def test_damaged_weights_are_refused(finished, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(finished, broken)
    weights = broken / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = min(tensors)
    save_file({**tensors, first: tensors[first] + 1e-3}, weights)
    assert main(["generate", str(broken), "--prompt", "x"]) == 2
    assert "its sha256 is not the one that was written" in capsys.readouterr().err
    weights.unlink()
    assert main(["chat", str(broken)]) == 2
    assert "has no adapter" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- arguments and config


WRONG = [
    ["eval", "--foo"], ["eval", "--lr", "1"], ["eval", "x", "y"], ["eval", "no_such_run"], ["generate"], ["generate", "--prompt"],
    ["generate", "--prompt", "a", "--file", "b"], ["generate", "--temperature", "warm", "--prompt", "a"],
    ["generate", "--max_new_tokens", "0", "--prompt", "a"], ["generate", "--file", "no_such_file"], ["chat", "--temperature", "-1"],
    ["generate", "--temperature", "1e-300", "--prompt", "a"], ["chat", "--temperature", "1e-5"], ["generate", "--seed", "99999999999999999999", "--prompt", "a"],
    ["doctor", "--backend", "cpx"], ["doctor", "all"],
    ["config", "explian"], ["config", "explain", "--lrr", "1"], ["train", "--lrr", "1"], ["train", "--lr", "fast"], ["tain"],
]


def test_usage_errors_import_no_framework():
    code = ("import sys, io, contextlib\nfrom anyqlora.__main__ import main\n"
            f"for argv in {WRONG!r}:\n"
            "    with contextlib.redirect_stderr(io.StringIO()) as err: code = main(argv)\n"
            "    assert code == 2 and 'anyqlora' in err.getvalue(), (argv, code, err.getvalue())\n"
            "    assert not {'torch', 'transformers', 'peft'} & set(sys.modules), argv\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argv", [
    ["eval", "no_such_run"], ["generate", "--prompt"], ["doctor", "--backend", "cpx"], ["chat", "--help"]], ids=" ".join)
def test_usage_errors_answer_at_once(argv):
    """Measured as processor time, which other work on the machine does not stretch."""
    def seconds():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = seconds()
    subprocess.run([sys.executable, "-m", "anyqlora", *argv], cwd=ROOT, capture_output=True)
    assert seconds() - before < 0.5


def test_config_explain_says_where_each_value_comes_from(tmp_path, capsys, monkeypatch):
    file = tmp_path / "run.yaml"
    file.write_text("# mine\n\nmodel_name: demo\ndataset: demo\n\nseed: 7\nlr: 2e-4\nwd: 0.5\n")
    monkeypatch.setenv("ANYQLORA_WD", "0.25")
    monkeypatch.chdir(tmp_path)
    assert main(["config", "explain", "--config", "run.yaml", "--lora-rank", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" = ")[0] for line in lines] == list(SETTINGS)
    for line in ("lr = 0.0002  run.yaml:7", "seed = 7  run.yaml:6", "wd = 0.25  ANYQLORA_WD", "lora_rank = 8  command line: --lora-rank",
                 "quantizer = nf4  preset", "batch_size = auto  default", "run_name = ''  default", "strict = false  default"):
        assert line in lines


# ------------------------------------------------------------------------------------------------------------ doctor


def test_doctor_trains_on_every_backend_that_is_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(["doctor", "--output_dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ACCELERATE_MIXED_PRECISION is not read" in out and "--precision, or ANYQLORA_PRECISION" in out
    (line,) = [line for line in out.splitlines() if line.startswith("ok    cpu: ")]
    before, after = (float(word) for word in line.split("loss ")[1].split(" in ")[0].split(" -> "))
    assert after < before and "the same after loading what was saved" in line
    assert "no    cuda: " in out and list(tmp_path.iterdir()) == []


def test_doctor_finds_a_bitsandbytes_that_does_not_load(tmp_path, monkeypatch):
    """A real process, in which a package of that name without a native library stands first on the path."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    finding = doctor.trained("cpu")
    assert finding.mark == "WRONG" and "has no native library" in finding.what


def test_unquantized_weights_need_no_bitsandbytes():
    """Only quantizers/bnb.py imports it when it is imported, and nothing imports that file but the table, by name."""
    for path in (ROOT / "anyqlora").rglob("*.py"):
        at_once = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        if path.name != "bnb.py":
            assert not [line for line in at_once if "bitsandbytes" in line or "quantizers.bnb" in line], path


def machine(name: str) -> Machine:
    return Machine.from_dict(json.loads((ROOT / "tests" / "machines" / f"{name}.json").read_text())["machine"])


def test_doctor_sees_a_torch_that_is_built_for_something_else():
    """The recorded machines stand for real ones."""
    (built, bits) = doctor.builds(machine("nothing"), {"NVIDIA GPU"})
    assert built.mark == "WRONG" and "NVIDIA GPU, and torch 2.13.0+cpu is not built for it" in built.what and "pip install" in built.mend
    assert bits.mark == "WRONG" and "no 4-bit" in bits.what and "bitsandbytes==" in bits.mend
    assert list(doctor.builds(machine("a100"), {"NVIDIA GPU"})) == []


@pytest.mark.parametrize(("found", "said"), [
    ({"after": 3.1}, "does not learn"), ({"after": math.nan}, "does not learn"), ({"moved": False}, "has not moved"),
    ({"reloaded": 1.5}, "1.5000 after loading"), ({"error": "no nf4", "cure": "buy one"}, "no nf4"),
])
def test_doctor_judges_what_a_run_shows(found, said):
    good = {"before": 3.0, "after": 2.0, "reloaded": 2.0, "moved": True, "steps": 6, "seconds": 1.0, "quantizer": "nf4",
            "precision": "fp32"}
    assert doctor.judged("cpu", good).mark == "ok"
    finding = doctor.judged("cpu", {**good, **found})
    assert finding.mark == "WRONG" and said in finding.what and finding.mend


def test_doctor_looks_at_the_environment_and_the_disk(tmp_path):
    (finding,) = doctor.environment({"ANYQLORA_LRR": "1"})
    assert finding.mark == "WRONG" and "ANYQLORA_LRR" in finding.what
    (finding,) = doctor.environment({"ANYQLORA_LR": "fast"})
    assert finding.mark == "WRONG" and "'fast' is not a number" in finding.what
    assert list(doctor.environment({"ANYQLORA_LR": "1e-4", "PATH": "/bin"})) == []
    (tmp_path / "file").write_text("")
    (finding,) = [f for f in doctor.places(tmp_path / "file" / "runs", tmp_path) if "output_dir" in f.what]
    assert finding.mark == "WRONG" and "cannot be written" in finding.what and "--output_dir" in finding.mend
