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
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anyqlora.__main__ import main
from anyqlora.cli import doctor
from anyqlora.config.schema import SETTINGS
from anyqlora.core.errors import UsageError
from anyqlora.data import dataset
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.planning.machine import Machine
from anyqlora.reporting.summary import next_commands
from anyqlora.runs.finished import FinishedRun, find_run, read_run
from tests.support import data_fixtures, runs
from tests.support.paths import MACHINES, ROOT

HELD_OUT = ROOT / "anyqlora" / "demo" / "task" / "heldout.jsonl"
SMALL = {
    "model_name": "demo",
    "dataset": "demo",
    "context_length": 128,
    "batch_size": 4,
    "precision": "fp32",
    "max_steps": 3,
    "lr": 3e-3,
    "num_samples": 3,
    "lora_rank": 4,
    "max_new_tokens": 24,
    "exact_match": True,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Eight evaluation rows, so that answers take no time."""
    path = tmp_path_factory.mktemp("rows") / "few.jsonl"
    path.write_text("".join(HELD_OUT.read_text().splitlines(keepends=True)[:8]))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, rows):
    """A run that the train verb made."""
    output = tmp_path_factory.mktemp("commands")
    flags = {
        **SMALL,
        "eval_dataset": rows,
        "output_dir": output,
        "run_name": "small",
        "log_to": "none",
        "backend": "cpu",
    }
    assert main(["train", *(word for name, value in flags.items() for word in (f"--{name}", str(value).lower()))]) == 0
    return output / "small"


# -------------------------------------------------------------------------------------------------------------- eval


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantizer": "nf4", "adapter": "pissa", "precision": "bf16_autocast", "eval_fraction": 0.02},
        pytest.param({"quantizer": "int8", "adapter": "rslora", "precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(
            {"quantizer": "fp4", "adapter": "dora", "use_gradient_checkpointing": True}, marks=pytest.mark.slow
        ),
        {"train_type": "full"},
        {"quantizer": "none"},  # against the preset, which is a default here
    ],
    ids=lambda s: "-".join(map(str, s.values())) or "nf4-lora",
)
def test_eval_gives_the_numbers_of_the_run_bit_for_bit(settings, finished, rows, tmp_path, capsys):
    """The reference is `after` in result.json, measured by the model that was trained."""
    if settings:
        held_out = {} if "eval_fraction" in settings else {"eval_dataset": str(rows)}
        small = {
            name: value for name, value in SMALL.items() if settings.get("train_type") != "full" or name != "lora_rank"
        }
        finished = runs.run(tmp_path, **{**small, "num_samples": 0, **held_out, **settings})
    from anyqlora.on_torch.memory.malloc import MallocTuner
    from anyqlora.runs.opened import load_finetuned

    run, keeping = read_run(finished), MallocTuner.keeping
    tuned = load_finetuned(run, {"num_samples": 0})
    assert MallocTuner.keeping == keeping, "pages are kept for steps, of which there are none"
    found = tuned.evaluate()
    after = runs.result(finished)["eval"]["after"]
    if settings.get("train_type") == "full":  # the file has the base's own bf16
        assert found["loss"] == pytest.approx(after["loss"], rel=2e-2)
    else:
        assert {
            "step": runs.result(finished)["steps"],
            **{name: found[name] for name in ("loss", "perplexity", "exact_match", "tokens")},
        } == after
        assert after["loss"] != runs.result(finished)["eval"]["before"]["loss"]


def test_eval_prints_them(finished, capsys):
    assert main(["eval", str(finished)]) == 0
    out = capsys.readouterr().out
    assert "8 evaluation rows" in out and f"{runs.result(finished)['eval']['after']['loss']:.6f}" in out
    assert out.count("as at the end of the run") == 3


def test_eval_on_other_rows_agrees_with_peft(tmp_path, capsys):
    """The reference is PEFT and transformers alone, on unquantized weights: the mean loss of each row's completion."""
    import peft
    import transformers

    directory = runs.run(tmp_path, **{**SMALL, "train_type": "lora", "num_samples": 0})
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
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[len(prompt) :]), reduction="sum"))
        count += len(ids) - len(prompt)
    assert printed == pytest.approx(total / count, abs=2e-6)


def test_eval_refuses_rows_that_have_changed(tmp_path, rows):
    mine = tmp_path / "mine.jsonl"
    mine.write_bytes(rows.read_bytes())
    directory = runs.run(
        tmp_path, **{**SMALL, "max_steps": 1, "num_samples": 0, "eval_dataset": str(mine), "exact_match": False}
    )
    mine.write_text(mine.read_text().replace("white", "black", 1))
    assert mine.read_bytes() != rows.read_bytes()
    assert main(["eval", str(directory)]) == 2


@pytest.mark.parametrize("argv", [["export", "--to", "merged"], ["merge"], ["export", "--to", "gguf"]], ids=" ".join)
def test_what_merges_is_refused_by_name_with_lines_that_do_it(argv, finished, tmp_path, capsys):
    """The reference is PEFT's own model with the adapter beside the base."""
    import peft
    import transformers

    assert main([*argv, str(finished), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert ("--to gguf is not built yet" if "gguf" in argv else "--to merged is not built yet") in said
    assert ("convert_hf_to_gguf.py" in said) == ("gguf" in argv)
    if "gguf" in argv:
        return
    exec("\n".join(line.strip() for line in said.splitlines() if line.startswith("    ")), {})
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    beside = peft.AutoPeftModelForCausalLM.from_pretrained(finished / "adapter", dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("Rosa sold 59", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, beside(ids).logits, rtol=0.03, atol=0.03)
        assert not torch.allclose(merged(ids).logits, beside.unload()(ids).logits, atol=0.1)


@pytest.mark.parametrize("part", ["", "adapter"])
def test_an_adapter_or_a_run_in_place_of_a_model_is_refused_with_what_is_possible(part, finished, tmp_path, capsys):
    assert main(["plan", "--model_name", str(finished / part)]) == 2
    said = capsys.readouterr().err
    assert (
        f"--model-name: {finished / part} is {'an adapter' if part else 'a run directory with an adapter'}, not a "
        f"model directory" in said
    )
    assert (
        f"cure: --model_name {DEMO_BASE}, its base, starts a new adapter, and one that starts from this with "
        f"--init_adapter" in said
    )
    assert f"--run_name {finished.name} --resume force and more --max_steps" in said
    shutil.copytree(finished / "adapter", tmp_path / "alone" / "mine")
    assert main(["plan", "--model_name", str(tmp_path / "alone" / "mine")]) == 2
    said = capsys.readouterr().err
    assert f"--model_name {DEMO_BASE}, its base" in said and "--resume" not in said  # no run is there
    (tmp_path / "whole" / "model").mkdir(parents=True)
    shutil.copy(DEMO_BASE / "config.json", tmp_path / "whole" / "model")
    assert main(["plan", "--model_name", str(tmp_path / "whole")]) == 2
    assert f"--model_name {tmp_path / 'whole' / 'model'}, the model that it trained" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- generate and chat


def sampled(directory) -> list[dict]:
    """The answers at the run's end: the reference for generate and chat."""
    return [
        line for line in map(json.loads, (directory / "samples.jsonl").read_text().splitlines()) if line["step"] == 3
    ]


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
        assert (
            main(
                [
                    "generate",
                    str(finished),
                    "--prompt",
                    "Rosa sold 59",
                    "--temperature",
                    temperature,
                    "--max_new_tokens",
                    "4",
                ]
            )
            == 0
        )


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["generate", "--temperature", "1e-300", "--prompt", "a"], "1e-300 is neither 0 nor at least 0.0001"),
        (["chat", "--temperature", "1e-5"], "is neither 0 nor"),
        (["generate", "--seed", "99999999999999999999", "--prompt", "a"], "is not between 0 and 9223372036854775807"),
    ],
)
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
    from anyqlora.runs.opened import FineTunedModel

    base = tmp_path / "base"
    shutil.copytree(DEMO_BASE, base)
    about = json.loads((base / "tokenizer_config.json").read_text())
    about["chat_template"] = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (base / "tokenizer_config.json").write_text(json.dumps(about))
    talk = tmp_path / "talk.jsonl"
    talk.write_text(
        json.dumps({"messages": [{"role": "user", "content": "Rosa"}, {"role": "assistant", "content": "sold"}]}) + "\n"
    )
    directory = runs.run(
        tmp_path, **{**SMALL, "model_name": str(base), "dataset": str(talk), "num_samples": 0, "max_steps": 1}
    )
    asked, generate = [], FineTunedModel.generate
    monkeypatch.setattr(
        FineTunedModel,
        "generate",
        lambda self, prompts, **more: asked.append(prompts) or generate(self, prompts, **more),
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\nthree\n"))
    assert main(["chat", str(directory), "--max_new_tokens", "4"]) == 0
    assert [[m["role"] for m in messages] for messages in asked] == [["user"], ["user", "assistant", "user"], ["user"]]
    assert [messages[-1]["content"] for messages in asked] == ["one", "two", "three"]


def test_a_base_model_learns_and_answers_through_a_stated_template(tmp_path, capsys):
    """The embedded base has no template.

    What was trained with one has it in its directory: the file may be gone by then.
    """
    talk, mine = tmp_path / "talk.jsonl", tmp_path / "mine.jinja"
    talk.write_text(
        json.dumps({"messages": [{"role": "user", "content": "Rosa"}, {"role": "assistant", "content": "sold"}]}) + "\n"
    )
    mine.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt "
        "%}assistant: {% endif %}"
    )
    settings = {**SMALL, "dataset": str(talk), "eval_dataset": str(talk), "num_samples": 1, "max_steps": 1}
    assert main(["data", "--model_name", str(DEMO_BASE), "--dataset", str(talk), "--chat_template", str(mine)]) == 0
    assert "user: Rosa<eos>assistant: [[sold<eos>]]" in capsys.readouterr().out
    directory = runs.run(tmp_path, **settings, chat_template=str(mine))
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in samples] == ["user: Rosa<eos>assistant: "] * 2
    with pytest.raises(UsageError, match="holds another run:\n  chat_template"):
        runs.run(tmp_path, **settings, chat_template="zephyr")
    mine.unlink()
    assert main(["eval", str(directory)]) == 0
    assert main(["generate", str(directory), "--prompt", "Rosa", "--max_new_tokens", "4"]) == 0


@pytest.mark.parametrize(
    ("form", "style", "asked"),
    [
        ("prompt_completion", "auto", "Why?"),
        (
            "alpaca",
            "auto",
            "Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n"
            "### Instruction:\nWhy?\n\n### Response:\n",
        ),
        ("alpaca", "plain", "Why?\n\n"),
        ("question_answer", "auto", "###Question:\nWhy?\n###Answer:\n"),
        ("text", "auto", "Why?"),
        ("messages", "auto", [{"role": "user", "content": "Why?"}]),
        ("prompt_completion", "chat", [{"role": "user", "content": "Why?"}]),
    ],
)
def test_a_question_is_put_as_the_rows_put_theirs(form, style, asked, finished):
    run = read_run(finished)
    run = FinishedRun(run.directory, run.config.with_(prompt_format=style), run.result, {"sources": [{"format": form}]})
    assert run.format_prompt("Why?") == asked


@pytest.mark.parametrize(("others", "asked"), [(1, "### Human: say 3### Assistant: "), (2, "say 3")])
def test_guanaco_is_asked_as_its_rows_are(others, asked, finished, tmp_path):
    """Raw text in which the assistant speaks, beside text in which nobody does; where it is not most of them, it is
    chance.
    """
    rows = [{"text": "### Human: Hi### Assistant: Ho"}] * 2 + [{"text": "Once upon a time."}] * others
    report = dataset.load_data(
        data_fixtures.settings(data_fixtures.write(tmp_path / "rows.jsonl", *rows)), data_fixtures.byte_level()
    ).report
    run = read_run(finished)
    assert FinishedRun(run.directory, run.config, run.result, report).format_prompt("say 3") == asked


def test_the_next_commands_of_the_report_work(finished, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Rosa sold 59 green carpets in Thornbrook on Saturday. JSON:\n"))
    for command in next_commands(finished):
        assert main(shlex.split(command.split(" -m anyqlora ")[1])) == 0
    assert sampled(finished)[0]["answer"] in capsys.readouterr().out


def test_a_run_without_held_out_rows_is_not_told_to_evaluate_them(unusual, capsys):
    commands = next_commands(unusual)
    assert [command.split(" -m anyqlora ")[1].split()[0] for command in commands] == ["chat", "generate"]
    assert main(shlex.split(commands[1].split(" -m anyqlora ")[1])) == 0
    assert main(["eval", str(unusual)]) == 2


# ------------------------------------------------------------------------------------------------------ an unusual run


@pytest.fixture(scope="module")
def unusual(tmp_path_factory):
    """A run of relative paths and a mixture, whose base has a token beyond its embedding and its own wishes about
    generating.
    """
    import transformers

    place = tmp_path_factory.mktemp("unusual")
    shutil.copytree(DEMO_BASE, place / "base_m")
    words = transformers.AutoTokenizer.from_pretrained(place / "base_m")
    words.add_tokens(["<extra>"], special_tokens=True)
    words.save_pretrained(place / "base_m")
    (place / "base_m" / "generation_config.json").write_text(json.dumps({"num_beams": 3, "eos_token_id": 1}))
    for name in "ab":
        (place / f"{name}.jsonl").write_text(HELD_OUT.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("MY_TOKEN", "base_m")  # a word that stands in a path is no secret there
        runs.run(
            place / "runs",
            **{
                **SMALL,
                "model_name": "base_m",
                "dataset": "a.jsonl=2,b.jsonl=0.5",
                "num_samples": 0,
                "max_steps": 1,
                "exact_match": False,
                "on_bad_row": "skip",
                "project_name": "of base_m",
            },
        )
    return place / "runs" / "run"


def test_a_run_is_read_from_any_directory(unusual, tmp_path, monkeypatch, capsys):
    """Its base and its rows were named from where it was started."""
    monkeypatch.chdir(tmp_path)
    run = read_run(unusual)
    place = unusual.parent.parent
    assert (
        run.config.model_name == str(place / "base_m")
        and run.config.dataset == f"{place}/a.jsonl=2.0,{place}/b.jsonl=0.5"
    )
    assert run.config.project_name == "of ***"
    assert main(["generate", str(unusual), "--prompt", "Rosa sold", "--max_new_tokens", "4"]) == 0
    assert main(["eval", str(unusual), "--dataset", str(HELD_OUT), "--max_new_tokens", "4"]) == 0


def test_held_out_rows_are_found_from_any_directory(unusual, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(unusual.parent.parent)
    directory = runs.run(
        tmp_path,
        **{
            **SMALL,
            "model_name": "./base_m",
            "dataset": "a.jsonl",
            "eval_dataset": "b.jsonl",
            "num_samples": 0,
            "max_steps": 1,
            "exact_match": False,
        },
    )
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(directory), "--exact_match", "false"]) == 0
    assert capsys.readouterr().out.count("as at the end of the run") == 2


def test_a_token_beyond_the_embedding_is_refused_by_name(unusual, tmp_path, capsys, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a <extra>", "completion": "c"}\n')
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Rosa\nRosa <extra>\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("say <extra>\nRosa\n"))
    for argv, where in (
        (["generate", "--prompt", "<extra>"], "the question"),
        (["generate", "--file", str(prompts)], "question 2"),
        (["eval", "--dataset", str(rows)], f"{rows}:2"),
        (["chat", "--max_new_tokens", "4"], "the question"),
    ):
        assert main([argv[0], str(unusual), *argv[1:]]) == 2
        out = capsys.readouterr()
        assert f"{where}: the tokenizer makes '<extra>' token 512, and the model's embedding has 512 rows" in out.err
    assert len(out.out.splitlines()) > 1, "chat answers the next line, and does not ask for the model's three beams"


def test_evaluating_on_rows_of_which_none_or_some_can_be_used(unusual, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": ""}\n' * 3)
    assert main(["eval", str(unusual), "--dataset", str(rows)]) == 2
    refusal = capsys.readouterr().err
    assert (
        f"{rows}: no row can be used" in refusal
        and f"cure: mend them; the first is {rows}:1: 'completion' is empty" in refusal
    )
    rows.write_text('{"prompt": "a", "completion": ""}\n{"prompt": "a", "completion": "b"}\n')
    assert main(["eval", str(unusual), "--dataset", str(rows)]) == 0
    out = capsys.readouterr()
    assert (
        f"warning: rows that cannot be used and are skipped: 1, the first is {rows}:1: 'completion' is empty" in out.err
        and "1 evaluation rows of" in out.out
    )


def test_a_whole_model_needs_no_base(tmp_path, capsys):
    base = tmp_path / "base"
    shutil.copytree(DEMO_BASE, base)
    settings = {name: value for name, value in SMALL.items() if name != "lora_rank"}
    directory = runs.run(
        tmp_path,
        **{
            **settings,
            "train_type": "full",
            "model_name": str(base),
            "num_samples": 0,
            "max_steps": 1,
            "exact_match": False,
        },
    )
    shutil.rmtree(base)
    assert main(["generate", str(directory), "--prompt", "Rosa sold"]) == 0


def test_a_held_out_prompt_that_fills_the_positions_counts_as_wrong_and_is_told(short, tmp_path, capsys):
    """A dialogue that is cut: its first answer is evaluated, and its last question is too long to be asked."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"text": f"### Human: a### Assistant: b### Human: {'lamp ' * n}### Assistant: c"}) + "\n"
            for n in (300, 2, 400)
        )
    )
    assert main(["eval", str(short), "--dataset", str(rows), "--exact_match", "true"]) == 0
    out = capsys.readouterr()
    assert "exact match  0.0%" in out.out
    assert (
        out.err.count(
            f"warning: evaluation prompts that fill the model's positions: 2, the first is {rows}:1; their answers are "
            f"empty"
        )
        == 1
    )
    assert out.err.count(f"warning: evaluation rows cut to 256 tokens: 2, the first is {rows}:1") == 1


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run of a model with a table of 256 positions, on rows that fit with hardly a token to spare."""
    from tests.support import tiny_models

    place = tmp_path_factory.mktemp("short")
    rows = [{"prompt": "lamp " * 80 + "x" * n, "completion": " y"} for n in range(4)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return runs.run(
        place,
        model_name=str(tiny_models.make(place / "base", "gpt2")),
        dataset=str(place / "rows.jsonl"),
        eval_dataset=str(place / "rows.jsonl"),
        max_steps=1,
        batch_size=2,
        num_samples=2,
        exact_match=True,
        max_new_tokens=200,
        precision="fp32",
        save_steps=0,
    )


def test_answers_end_with_the_positions_of_the_model(short, tmp_path, capsys, monkeypatch):
    long = "lamp " * 300
    assert len((short / "samples.jsonl").read_text().splitlines()) == 4
    assert main(["eval", str(short)]) == 0 and "fill the model's positions" not in capsys.readouterr().err
    assert main(["generate", str(short), "--prompt", "lamp " * 80, "--max_new_tokens", "400"]) == 0
    assert main(["generate", str(short), "--prompt", long]) == 2
    assert "the question: its" in (err := capsys.readouterr().err) and "leave no room for an answer" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{long}\nlamp\n"))
    assert main(["chat", str(short), "--max_new_tokens", "400"]) == 2
    out = capsys.readouterr()
    assert "leave no room for an answer" in out.err and len(out.out.splitlines()) > 1


# --------------------------------------------------------------------------------------------------- finding the run


def test_a_run_is_found_by_path_by_name_and_as_the_newest(finished, tmp_path, monkeypatch):
    for name in ("old", "new", "going"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    (tmp_path / "runs" / "going" / "result.json").unlink()
    os.utime(tmp_path / "runs" / "old" / "result.json", (1, 1))
    monkeypatch.chdir(tmp_path)
    assert find_run("").directory == Path("runs/new") and find_run("old").directory == Path("runs/old")
    assert find_run(str(finished)).directory == finished
    monkeypatch.setenv("ANYQLORA_OUTPUT_DIR", str(finished.parent))
    assert find_run("").directory == finished
    monkeypatch.delenv("ANYQLORA_OUTPUT_DIR")
    with pytest.raises(UsageError, match="did you mean 'new'"):
        find_run("neww")
    with pytest.raises(UsageError, match="not finished"):
        find_run("going")
    with pytest.raises(UsageError, match="not a run directory"):
        find_run(str(tmp_path))


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
    ["eval", "--foo"],
    ["eval", "--lr", "1"],
    ["eval", "x", "y"],
    ["eval", "no_such_run"],
    ["generate"],
    ["generate", "--prompt"],
    ["generate", "--prompt", "a", "--file", "b"],
    ["generate", "--temperature", "warm", "--prompt", "a"],
    ["generate", "--max_new_tokens", "0", "--prompt", "a"],
    ["generate", "--file", "no_such_file"],
    ["chat", "--temperature", "-1"],
    ["generate", "--temperature", "1e-300", "--prompt", "a"],
    ["chat", "--temperature", "1e-5"],
    ["generate", "--seed", "99999999999999999999", "--prompt", "a"],
    ["doctor", "--backend", "cpx"],
    ["doctor", "all"],
    ["config", "explian"],
    ["config", "explain", "--lrr", "1"],
    ["train", "--lrr", "1"],
    ["train", "--lr", "fast"],
    ["tain"],
]


def test_usage_errors_import_no_framework():
    code = (
        "import sys, io, contextlib\nfrom anyqlora.__main__ import main\n"
        f"for argv in {WRONG!r}:\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as err: code = main(argv)\n"
        "    assert code == 2 and 'anyqlora' in err.getvalue(), (argv, code, err.getvalue())\n"
        "    assert not {'torch', 'transformers', 'peft'} & set(sys.modules), argv\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "argv",
    [["eval", "no_such_run"], ["generate", "--prompt"], ["doctor", "--backend", "cpx"], ["chat", "--help"]],
    ids=" ".join,
)
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
    for line in (
        "lr = 0.0002  run.yaml:7",
        "seed = 7  run.yaml:6",
        "weight_decay = 0.25  ANYQLORA_WD",
        "lora_rank = 8  command line: --lora-rank",
        "quantizer = nf4  preset",
        "batch_size = auto  default",
        "run_name = ''  default",
        "strict = false  default",
    ):
        assert line in lines


# ------------------------------------------------------------------------------------------------------------ doctor


@pytest.mark.distributed
@pytest.mark.parametrize(
    "only", [["--backend", "cpu"], pytest.param([], marks=pytest.mark.slow)], ids=["cpu", "every one that is here"]
)
def test_doctor_trains(only, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(["doctor", *only, "--output_dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ACCELERATE_MIXED_PRECISION states precision bf16 for every run" in out
    (line,) = [line for line in out.splitlines() if line.startswith("ok    cpu: ")]
    before, after = (float(word) for word in line.split("loss ")[1].split(" in ")[0].split(" -> "))
    assert after < before and "the same after loading what was saved" in line
    assert ("no    cuda: " in out) == (not only) and list(tmp_path.iterdir()) == []


def test_doctor_finds_a_bitsandbytes_that_does_not_load(tmp_path, monkeypatch):
    """A real process, in which a package of that name without a native library stands first on the path."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    finding = doctor.trained("cpu")
    assert finding.mark == "WRONG" and "has no native library" in finding.what


def test_unquantized_weights_need_no_bitsandbytes():
    """Only quantizers/bnb.py and the kernel that it alone uses import it when they are imported, and nothing imports
    that file but the table, by name.
    """
    for path in (ROOT / "anyqlora").rglob("*.py"):
        at_once = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        if path.name not in ("bnb.py", "nf4_quantize.py"):
            assert not [
                line
                for line in at_once
                if any(name in line for name in ("bitsandbytes", "quantizers.bnb", "nf4_quantize"))
            ], path


def machine(name: str) -> Machine:
    return Machine.from_dict(json.loads((MACHINES / f"{name}.json").read_text())["machine"])


def test_doctor_sees_a_torch_that_is_built_for_something_else():
    """The recorded machines stand for real ones."""
    (built, bits) = doctor.builds(machine("nothing"), {"NVIDIA GPU"})
    assert (
        built.mark == "WRONG"
        and "NVIDIA GPU, and torch 2.13.0+cpu is not built for it" in built.what
        and "pip install" in built.mend
    )
    assert bits.mark == "WRONG" and "no 4-bit" in bits.what and "bitsandbytes==" in bits.mend
    assert list(doctor.builds(machine("a100"), {"NVIDIA GPU"})) == []


def test_doctor_misses_a_compiler_where_one_would_be_used():
    here = replace(machine("linux_mlx"), cpu_features=("avx512_bf16",))
    (compiler,) = doctor.builds(here, set())
    assert compiler.mark == "note" and "no C compiler" in compiler.what and "gcc" in compiler.mend
    assert (
        list(doctor.builds(replace(here, compiler="/usr/bin/cc"), set()))
        == list(doctor.builds(replace(here, prebuilt={"level": "avx512_bf16"}), set()))
        == list(doctor.builds(replace(here, cpu_features=()), set()))
        == []
    )
    (damaged,) = doctor.builds(replace(here, compiler="/usr/bin/cc", prebuilt={"error": "x.so is damaged"}), set())
    assert damaged.mark == "WRONG" and "x.so is damaged" in damaged.what and "wheel" in damaged.mend


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"after": 3.1}, "does not learn"),
        ({"after": math.nan}, "does not learn"),
        ({"moved": False}, "has not moved"),
        ({"reloaded": 1.5}, "1.5000 after loading"),
        ({"error": "no nf4", "cure": "buy one"}, "no nf4"),
    ],
)
def test_doctor_judges_what_a_run_shows(found, said):
    good = {
        "before": 3.0,
        "after": 2.0,
        "reloaded": 2.0,
        "moved": True,
        "steps": 6,
        "seconds": 1.0,
        "quantizer": "nf4",
        "precision": "fp32",
        "kernels": "portable",
    }
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
