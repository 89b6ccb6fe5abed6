"""Models that cannot be used are refused before anything is written: where, why, and what to do."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from anyqlora.core.errors import RunError
from anyqlora.models.architectures import DEMO_BASE
from tests.support import local_hub, runs

TINY = {"dataset": "demo", "context_length": 64, "batch_size": 2, "max_steps": 1, "precision": "fp32", "save_steps": 0}


TENSORS = [
    ("model.layers.1.mlp.up_proj.weight", "qlora"),
    ("model.layers.1.mlp.up_proj.weight", "full"),
    ("model.embed_tokens.weight", "qlora"),
    ("model.norm.weight", "lora"),
]


@pytest.fixture
def base(tmp_path):
    """A copy of the embedded base, to be broken."""
    return shutil.copytree(DEMO_BASE, tmp_path / "base")


def refusal(tmp_path, model, **settings) -> str:
    """The message with which this model is refused; nothing may be left in the output directory."""
    output = tmp_path / "runs"
    with pytest.raises(RunError) as refused:
        runs.run(output, **{**TINY, "model_name": str(model), **settings})
    assert refused.value.exit_code == 2, refused.value
    assert refused.value.where and refused.value.cure, refused.value
    assert not output.exists() or not any(output.iterdir())
    return str(refused.value)


def described(base, **changes):
    """The base with these keys of config.json; None takes one out."""
    path = base / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rewritten(base, change):
    """The base with other weights: `change` gets {name: tensor} and may alter it."""
    weights = load_file(base / "model.safetensors")
    change(weights)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        base / "model.safetensors",
        metadata={"format": "pt"},
    )


def sharded(base):
    """The base's weights in three files with an index."""
    weights = load_file(base / "model.safetensors")
    names = sorted(weights)
    where = {name: f"model-0000{i * 3 // len(names) + 1}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file(
            {name: weights[name] for name in names if where[name] == file}, base / file, metadata={"format": "pt"}
        )
    (base / "model.safetensors").unlink()
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


# ---------------------------------------------------------------------------------------------------- the directory


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "~/no-such-model", "models/of/mine"])
def test_a_missing_directory(tmp_path, name):
    assert f"no such model directory: {name}" in refusal(tmp_path, name)


def test_a_name_that_is_neither_a_directory_nor_a_hub_id(tmp_path):
    assert "neither a directory nor a hub id" in refusal(tmp_path, "my model!")


def test_a_directory_without_config_json(tmp_path, base):
    (base / "config.json").unlink()
    assert "no config.json" in refusal(tmp_path, base)


@pytest.mark.parametrize("text", ["{", "", "[1]", "\x00\x01"])
def test_a_config_json_that_is_none(tmp_path, base, text):
    (base / "config.json").write_text(text)
    assert f"{base / 'config.json'}: " in refusal(tmp_path, base)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "model_type"])
def test_a_config_json_that_lacks_a_key(tmp_path, base, key):
    described(base, **{key: None})
    assert key in refusal(tmp_path, base)


def test_an_unknown_model_type(tmp_path, base):
    described(base, model_type="llamma")
    assert "llamma" in refusal(tmp_path, base)


def test_a_model_that_is_no_causal_language_model(tmp_path, base):
    described(base, model_type="t5", architectures=["T5ForConditionalGeneration"])
    assert "t5" in refusal(tmp_path, base)


# ------------------------------------------------------------------------------------------------------- the weights


def test_a_missing_shard(tmp_path, base):
    sharded(base)
    (base / "model-00002-of-00003.safetensors").unlink()
    assert "1 of 3 weight files are missing, model-00002-of-00003.safetensors is the first" in refusal(tmp_path, base)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}"])
def test_an_index_that_is_none(tmp_path, base, text):
    sharded(base)
    (base / "model.safetensors.index.json").write_text(text)
    assert "not an index of weights" in refusal(tmp_path, base)


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda raw: raw[: len(raw) // 2], "cut short"),
        (lambda raw: raw[:4], "not a safetensors file"),
        (lambda raw: b"", "not a safetensors file"),
        (lambda raw: raw + b"\0", "cut short or damaged"),
        (lambda raw: b"\x80" + raw[1:9] + b"[" + raw[10:], "not a safetensors file"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "not a safetensors file"),
    ],
    ids=["half", "four bytes", "empty", "a byte too many", "no header", "a pointer of git-lfs"],
)
def test_weights_that_are_damaged(tmp_path, base, damage, reason):
    path = base / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert reason in refusal(tmp_path, base)


def test_pickled_weights_are_not_read(tmp_path, base):
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    assert "pytorch_model.bin is not read" in refusal(tmp_path, base)


@pytest.mark.parametrize("name, train_type", TENSORS)
def test_a_tensor_that_is_missing_is_never_made_up(tmp_path, base, name, train_type):
    rewritten(base, lambda weights: weights.pop(name))
    assert "weights are not in the files" in refusal(tmp_path, base, train_type=train_type)


@pytest.mark.parametrize("name, train_type", TENSORS)
def test_a_tensor_of_another_shape(tmp_path, base, name, train_type):
    rewritten(base, lambda weights: weights.update({name: weights[name][:-1]}))
    message = refusal(tmp_path, base, train_type=train_type)
    assert name in message and "shape" in message


def test_a_config_json_of_another_size(tmp_path, base):
    described(base, intermediate_size=320)
    assert "shape" in refusal(tmp_path, base)


def test_tensors_that_the_model_does_not_have_are_named(tmp_path, base, capfd):
    rewritten(base, lambda weights: weights.update({"model.layers.7.self_attn.q_proj.weight": torch.zeros(2, 2)}))
    runs.run(tmp_path, **{**TINY, "model_name": str(base)})
    assert "model.layers.7.self_attn.q_proj.weight" in capfd.readouterr().err


# ----------------------------------------------------------------------------------------------------- the tokenizer


def test_a_missing_tokenizer(tmp_path, base):
    for path in base.glob("tokenizer*"):
        path.unlink()
    assert "no tokenizer" in refusal(tmp_path, base)


def test_a_broken_tokenizer(tmp_path, base):
    (base / "tokenizer.json").write_text("{")
    assert "no tokenizer" in refusal(tmp_path, base)


def test_tokens_beyond_the_embedding(tmp_path, base):
    """The tokenizer has got a token more than the embedding has rows, and a row uses it."""
    import transformers

    words = transformers.AutoTokenizer.from_pretrained(base)
    words.add_tokens(["<extra>"], special_tokens=True)
    words.save_pretrained(base)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a <extra>", "completion": "c"}\n')
    message = refusal(tmp_path, base, dataset=str(file))
    assert f"{file}:2" in message and "<extra>" in message and "512" in message
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    runs.run(tmp_path, **{**TINY, "model_name": str(base), "dataset": str(file)})  # nothing uses it


def test_a_chat_set_without_a_chat_template(tmp_path, base):
    file = tmp_path / "chat.jsonl"
    file.write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    )
    assert "no chat template" in refusal(tmp_path, base, dataset=str(file))


# ---------------------------------------------------------------------------------- the hub, through its own client

NAME, TOKEN = "some/model", "hf_aTokenThatNobodyMaySee"


def asked_of_hub(tmp_path, *flags, **about):
    """(what came of `train.py --model_name some/model`, the requests) with a hub that is `about` so; a token is set."""
    files = {path.name: path.read_bytes() for path in DEMO_BASE.iterdir()}
    with local_hub.serving(**{"kind": "models", "name": NAME, "files": files, **about}) as (hub, endpoint):
        given = [
            f"--{name}={value}"
            for name, value in {**TINY, "model_name": NAME, "output_dir": tmp_path / "runs", "run_name": "run"}.items()
        ]
        out = local_hub.python("train.py", *given, *flags, endpoint=endpoint, home=tmp_path / "home", HF_TOKEN=TOKEN)
    written = [path for place in ("runs", "home") for path in (tmp_path / place).rglob("*") if path.is_file()]
    assert not any(
        TOKEN.encode() in text
        for text in (out.stdout.encode(), out.stderr.encode(), *(path.read_bytes() for path in written))
    )
    return out, [(method, path.rpartition("/")[2], headers) for method, path, headers in hub.asked if NAME in path]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "about, flags, message",
    [
        ({"refused": (404, "RepoNotFound")}, (), "neither a directory here nor a model on the hub"),
        ({"refused": (403, "GatedRepo")}, (), f"{NAME} is gated"),
        ({}, ("--revision", "nowhere"), "has no revision 'nowhere'"),
        ({"files": {"README.md": b"-"}}, (), "has no config.json on the hub"),
        ({}, ("--offline", "true"), "not on this machine whole, and --offline true"),
    ],
    ids=["absent", "gated", "revision", "another kind of model", "offline"],
)
def test_what_the_hub_does_not_give(tmp_path, about, flags, message):
    out, requests = asked_of_hub(tmp_path, *flags, **about)
    assert (
        out.returncode == 2 and message in out.stderr and "command line: --" in out.stderr and "  cure: " in out.stderr
    )
    assert "Traceback" not in out.stderr and not (tmp_path / "runs").exists()
    assert all(
        headers["authorization"] == f"Bearer {TOKEN}" for _, _, headers in requests
    )  # the token is used, and seen nowhere
    assert bool(requests) == ("--offline" not in flags)


@pytest.mark.distributed
def test_a_download_that_breaks_off_is_continued(tmp_path):
    """The connection breaks in the middle of the weights; the same command then fetches what lacks, trains, and needs
    no hub again.
    """
    out, _ = asked_of_hub(tmp_path, cut="model.safetensors")
    assert (
        out.returncode == 2
        and "could not be downloaded" in out.stderr
        and "cure: run again: files that have arrived are kept" in out.stderr
    )
    assert "Traceback" not in out.stderr and not (tmp_path / "runs").exists()
    out, requests = asked_of_hub(tmp_path)
    assert out.returncode == 0, out.stderr
    assert {name for method, name, _ in requests if method == "GET" and name != "main"} == {"model.safetensors"}
    assert runs.result(tmp_path / "runs" / "run")["steps"] == 1
    code = (
        "from anyqlora.config.resolve import resolve; from anyqlora.models import hub; asked = resolve({'model_name': "
        "'some/model', 'offline': 'true'}); "
        "print(sorted(path.name for path in hub.base_directory(asked).iterdir()))"
    )
    out = local_hub.python("-c", code, endpoint="http://127.0.0.1:9", home=tmp_path / "home")
    assert out.stdout.strip() == str(sorted(path.name for path in DEMO_BASE.iterdir() if path.is_file()))
