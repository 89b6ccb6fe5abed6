"""--init_adapter: a run that starts from what another one has learned, or PEFT."""

import json
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.runs.checkpoints import read_adapter
from tests.support import runs
from tests.training.test_session import fail

SMALL = {
    "model_name": "demo",
    "dataset": "demo",
    "train_type": "lora",
    "precision": "fp32",
    "context_length": 96,
    "batch_size": 2,
    "max_steps": 3,
    "lr": 3e-3,
    "eval_fraction": 0.02,
    "exact_match": False,
    "save_steps": 1,
}
OWN = {"lora_rank": 4, "lora_alpha": 12, "lora_dropout": 0.05, "lora_target_modules": "q_proj,down_proj"}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A finished run: where the others start."""
    return runs.run(tmp_path_factory.mktemp("first"), **SMALL, **OWN)


@pytest.fixture
def copied(first, tmp_path):
    return shutil.copytree(first / "adapter", tmp_path / "copied")


def edited(directory, **changes):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def asked(directory, **settings):
    return resolve(
        {"model_name": "demo", "dataset": "demo", "init_adapter": str(directory), **settings}, environ={}, origin="test"
    )


def same(directory, reference):
    one, other = runs.adapter(directory), load_file(reference / "adapter_model.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("where", ["", "adapter", "checkpoints/step-000003"])
def test_it_starts_where_the_other_ended(where, first, tmp_path):
    """With a rate of nothing the adapter stays what it was; the rank, alpha, targets and dropout are the other's."""
    second = runs.run(tmp_path, **{**SMALL, "lr": 0, "max_steps": 1, "init_adapter": str(first / where)})
    same(second, first / "adapter")
    about = json.loads((second / "adapter" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["lora_dropout"], about["target_modules"]) == (
        4,
        12,
        0.05,
        ["down_proj", "q_proj"],
    )
    assert (
        runs.evaluations(second)[0]["loss"] == runs.evaluations(first)[-1]["loss"] < runs.evaluations(first)[0]["loss"]
    )
    assert "started from" in (second / "adapter" / "README.md").read_text()


@pytest.mark.parametrize("variant", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_an_adapter_of_pefts_in_bf16_is_where_it_starts(variant, tmp_path):
    """The reference is PEFT's own forward pass of what PEFT has saved; every number of the adapter is random."""
    torch.manual_seed(1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    model = peft.get_peft_model(
        plain,
        peft.LoraConfig(
            r=3,
            lora_alpha=5,
            target_modules=r".*\.(q_proj|up_proj)",
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            **variant,
        ),
    )
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "adapter_model.safetensors"
    save_file(
        {name: (value * 10 if "lora_B" in name else value).bfloat16() for name, value in load_file(file).items()}, file
    )
    row = tmp_path / "row.jsonl"
    row.write_text(json.dumps({"text": "Rosa sold 59 green carpets in Thornbrook on Saturday."}) + "\n")
    settings = {
        **SMALL,
        "dataset": str(row),
        "eval_dataset": str(row),
        "max_steps": 1,
        "lr": 0,
        "init_adapter": str(tmp_path / "theirs"),
    }
    del settings["eval_fraction"]
    directory = runs.run(tmp_path, **settings)
    words = transformers.AutoTokenizer.from_pretrained(DEMO_BASE)
    ids = torch.tensor([words(json.loads(row.read_text())["text"])["input_ids"] + [words.eos_token_id]])
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32), tmp_path / "theirs"
    )
    with torch.no_grad():
        expected = theirs(input_ids=ids, labels=ids).loss.item()
        with theirs.disable_adapter():
            without = theirs(input_ids=ids, labels=ids).loss.item()
    found = runs.evaluations(directory)[0]["loss"]
    assert found == pytest.approx(expected, rel=1e-5) != pytest.approx(without, rel=1e-3)
    assert runs.adapter(directory).keys() == load_file(file).keys()


def test_a_run_that_was_cut_goes_on_and_does_not_start_again(first, tmp_path):
    settings = {**SMALL, "init_adapter": str(first)}
    whole = runs.run(tmp_path, "whole", **settings)
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path, "cut", **settings, during=lambda step: step == 2 and fail(ZeroDivisionError()))
    cut = runs.run(tmp_path, "cut", **settings)
    same(cut, whole / "adapter")
    assert [line["step"] for line in runs.metrics(cut)] == [1, 2, 3]


def test_another_start_is_another_run(first, copied, tmp_path):
    runs.run(tmp_path, **{**SMALL, "init_adapter": str(copied)})
    tensors = load_file(copied / "adapter_model.safetensors")
    save_file({name: value * 2 for name, value in tensors.items()}, copied / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="holds another run:\n  init_adapter"):
        runs.run(tmp_path, **{**SMALL, "init_adapter": str(copied)})


def test_a_forced_run_does_not_start_again(first, tmp_path):
    settings = {**SMALL, **OWN, "max_steps": 1}
    runs.run(tmp_path, **settings)
    with pytest.raises(UsageError, match="did not start from .*, and --resume force goes on from its own state"):
        runs.run(tmp_path, **{**settings, "max_steps": 2, "init_adapter": str(first), "resume": "force"})
    assert "init_adapter" not in json.loads((tmp_path / "run" / "identity.json").read_text())


def test_a_run_is_found_again_from_anywhere(first, tmp_path, monkeypatch):
    """Names of directories that were given from where the run was made."""
    shutil.copytree(first / "adapter", tmp_path / "theirs")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.chdir(tmp_path)
    settings = {
        **SMALL,
        "max_steps": 1,
        "init_adapter": "theirs",
        "chat_template": "mine.jinja",
        "prompt_format": "text",
    }
    directory = runs.run("out", **settings).absolute()
    monkeypatch.chdir(first)
    again = resolve({"config": str(directory / "config.resolved.yaml")}, environ={}, origin="test")
    assert (again.init_adapter, again.chat_template) == (str(tmp_path / "theirs"), str(tmp_path / "mine.jinja"))


def test_the_template_of_the_adapter_is_taken(copied):
    (copied / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert asked(copied).chat_template == str(copied / "chat_template.jinja")
    assert asked(copied, chat_template="zephyr").chat_template == "zephyr"


@pytest.mark.mlx
def test_mlx_starts_from_it_too(first, tmp_path):
    pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")
    second = runs.run(tmp_path, **{**SMALL, "backend": "mlx", "lr": 0, "max_steps": 1, "init_adapter": str(first)})
    same(second, first / "adapter")
    assert runs.evaluations(second)[0]["loss"] == pytest.approx(runs.evaluations(first)[-1]["loss"], rel=1e-5)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora_rank": 8}, "lora_rank: 8 was asked for, and the adapter that the run starts from has 4"),
        ({"adapter": "pissa"}, "adapter: pissa was asked for"),
        ({"lora_alpha": 8}, "lora_alpha: 8.0 was asked for"),
        ({"train_type": "bnb_dora"}, "train_type: bnb_dora means adapter dora"),
        ({"train_type": "full"}, "train_type: full means adapter full"),
    ],
)
def test_what_contradicts_it(settings, told, first):
    with pytest.raises(UsageError, match=told):
        asked(first, **settings)


def test_what_is_stated_and_does_not_contradict_it(first):
    config = asked(first, lora_rank=4, lora_dropout=0.3, train_type="custom_qlora")
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout, config.adapter, config.quantizer) == (
        4,
        12,
        0.3,
        "lora",
        "nf4",
    )
    assert asked(first, adapter="auto").adapter == "lora"
    assert config.sources["lora_alpha"].endswith("adapter_config.json") and config.sources["lora_rank"] == "test"


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"peft_type": "IA3"}, NotSupported, "to start from a IA3 adapter"),
        ({"rank_pattern": {"q_proj": 8}}, NotSupported, 'rank_pattern {"q_proj": 8}'),
        ({"bias": "all"}, NotSupported, 'bias "all"'),
        ({"modules_to_save": ["lm_head"]}, NotSupported, "modules_to_save"),
        ({"r": "many"}, UsageError, "lora_rank: 'many' is not a whole number"),
        ({"init_lora_weights": "pissa_niter_4"}, NotSupported, 'init_lora_weights "pissa_niter_4"'),
        ({"init_lora_weights": "olora"}, NotSupported, "init_lora_weights"),
        ({"use_dora": True, "use_rslora": True}, NotSupported, "use_dora true, use_rslora true"),
        ({"target_modules": None}, UsageError, "lora_target_modules: None is not a value"),
    ],
)
def test_an_adapter_that_is_not_as_ours(changes, error, told, copied):
    with pytest.raises(error, match=told):
        asked(edited(copied, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["c_attn", "q_proj", "query_key_value", "layers.0.mlp.down_proj", "down_proj"]},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "gaussian"},
    ],
)
def test_what_peft_passes_by_is_passed_by(changes, first, copied, tmp_path):
    second = runs.run(tmp_path, **{**SMALL, "lr": 0, "max_steps": 1, "init_adapter": str(edited(copied, **changes))})
    same(second, first / "adapter")


def test_a_checkpoint_whose_adapter_acts_on_another_base(tmp_path):
    directory = runs.run(tmp_path, **{**SMALL, "adapter": "pissa", "lora_rank": 2, "max_steps": 1})
    with pytest.raises(UsageError, match="is a checkpoint of a run with adapter pissa"):
        asked(directory / "checkpoints" / "step-000001")
    again = runs.run(tmp_path, "again", **{**SMALL, "lr": 0, "max_steps": 1, "init_adapter": str(directory)})
    same(again, directory / "adapter")
    assert runs.evaluations(again)[0]["loss"] == pytest.approx(runs.evaluations(directory)[-1]["loss"], rel=1e-4)


def test_a_directory_that_is_no_adapter(first, copied, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(copied, tmp_path / "list")
    (tmp_path / "list" / "adapter_config.json").write_text("[]")
    for directory, told in (
        (tmp_path / "empty", "no adapter_config.json in"),
        (tmp_path / "none", "no such directory"),
        ("some/adapter", "hf download some/adapter"),
        (DEMO_BASE, "--model_name"),
        (tmp_path / "list", "not the description of a PEFT adapter"),
    ):
        with pytest.raises(UsageError) as found:
            asked(directory)
        assert told in f"{found.value} {found.value.cure}"
    (copied / "adapter_model.safetensors").rename(copied / "adapters.safetensors")
    with pytest.raises(UsageError) as found:
        asked(copied)
    assert f"export {copied} --to peft" in found.value.cure
    (copied / "adapters.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no adapter_model.safetensors in"):
        asked(copied)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda tensors: {name: value[..., :-1].contiguous() for name, value in tensors.items()},
            r"its tensors are not those of this run: 12 differ\n.*is \(4, 255\) there, \(4, 256\) here",
        ),
        (lambda tensors: dict(list(tensors.items())[1:]), r"1 differ\n.*is not there, \(4, \d+\) here"),
        (lambda tensors: {name: value.double() for name, value in tensors.items()}, "is of type F64"),
        (lambda tensors: {name: value / 0 for name, value in tensors.items()}, "numbers that are not finite"),
    ],
)
def test_tensors_that_do_not_fit_leave_no_run(change, told, copied, tmp_path):
    file = copied / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(UsageError, match=told):
        runs.run(tmp_path, **{**SMALL, "init_adapter": str(copied)})
    assert not (tmp_path / "run").exists()


def test_a_damaged_file(copied):
    file = copied / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UsageError, match="adapter_model.safetensors: not a safetensors file"):
        read_adapter(file)
