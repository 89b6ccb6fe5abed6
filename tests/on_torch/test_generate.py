"""Where an answer ends, and that padding does not matter: real generations of the embedded base."""

import io
import json
import shutil
import sys

import peft
import pytest
import torch
import transformers

import anyqlora
from anyqlora import __main__ as program
from anyqlora.data.end_tokens import learned_ends
from anyqlora.models.architectures import COUNTED_FROM_PAD, DEMO_BASE, POSITION_TABLES, position_table
from anyqlora.on_torch.generate import answers, stop_ids
from tests.support import runs, tiny_models
from tests.support.data_fixtures import write

END, CALL = "<|im_end|>", "<|python_tag|>"
CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}: {% else %}{{ m.content }}<|im_end|>{% endif %}{% "
    "endfor %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The embedded base with a chat template that ends turns with a token which nothing but the template names, and a
    special token for calls.
    """
    base = shutil.copytree(DEMO_BASE, tmp_path_factory.mktemp("chatty") / "base")
    words = transformers.AutoTokenizer.from_pretrained(base)
    unused = ("Ġkettles", "Ġblue")  # whose rows of the embedding become these tokens'
    text = (base / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = json.loads(text)
    for word, name in zip(unused, (CALL, END), strict=True):
        number = tokenizer["model"]["vocab"].pop(word)
        tokenizer["model"]["vocab"][name] = number
        tokenizer["added_tokens"].append(
            {
                "id": number,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    tokenizer["model"]["merges"] = [
        merge for merge in tokenizer["model"]["merges"] if not {"".join(merge), *merge} & set(unused)
    ]
    (base / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    words = transformers.AutoTokenizer.from_pretrained(base)
    words.chat_template = CHAT
    words.save_pretrained(base)
    assert words.convert_tokens_to_ids(END) == number and words.eos_token != END
    return base


@pytest.fixture(scope="module")
def said(chatty, tmp_path_factory):
    """The samples after learning to answer everything with one word."""
    place = tmp_path_factory.mktemp("said")
    rows = [
        {"messages": [{"role": "user", "content": who}, {"role": "assistant", "content": f"{CALL}Monday"}]}
        for who in ("Bren", "Tam", "Sam", "Hal")
    ]
    directory = runs.run(
        place,
        model_name=str(chatty),
        dataset=str(write(place / "train.jsonl", *rows)),
        eval_dataset=str(place / "train.jsonl"),
        context_length=64,
        batch_size=4,
        max_steps=25,
        lr=0.01,
        lora_dropout=0,
        precision="fp32",
        save_steps=0,
        num_samples=2,
        max_new_tokens=12,
        lr_scheduler="constant",
    )
    return directory, [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


def test_an_answer_ends_with_the_token_that_the_template_trained(said):
    directory, samples = said
    assert json.loads((directory / "data_report.json").read_text())["train"]["end_tokens"] == {END: 4}
    assert [sample["answer"] for sample in samples if sample["step"] > 0] == [f"{CALL}Monday"] * 2
    assert runs.result(directory)["eval"]["after"]["exact_match"] == 1.0


def test_the_verbs_end_answers_there_too(said):
    model = anyqlora.load_finetuned(said[0])
    assert model.generate([{"role": "user", "content": "Tam"}]) == f"{CALL}Monday"
    assert model.evaluate()["exact_match"] == 1.0


def test_whoever_reads_the_adapter_stops_there_too(said, chatty):
    """PEFT and transformers, by the files of the adapter alone: its generation settings, its tokenizer."""
    adapter = said[0] / "adapter"
    words = transformers.AutoTokenizer.from_pretrained(adapter)
    settings = transformers.GenerationConfig.from_pretrained(adapter)
    base = transformers.AutoModelForCausalLM.from_pretrained(chatty, dtype=torch.float32)
    own = transformers.AutoTokenizer.from_pretrained(chatty)
    end = words.convert_tokens_to_ids(END)
    assert words.eos_token == END != own.eos_token
    assert {*settings.eos_token_id} == {end, own.eos_token_id}
    model = peft.PeftModel.from_pretrained(base, adapter)
    asked = words.apply_chat_template(
        [{"role": "user", "content": "Tam"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    stopped = {}
    for name, config in (("ours", settings), ("the base's", base.generation_config)):
        out = model.generate(**asked, generation_config=config, do_sample=False, max_new_tokens=12)
        stopped[name] = out[0, asked["input_ids"].shape[1] :].tolist()
    assert stopped["ours"][-1] == end and end not in stopped["ours"][:-1]
    assert len(stopped["ours"]) < len(stopped["the base's"])  # which says more, behind its end
    card = (adapter / "README.md").read_text()
    assert f"| an answer ends with | `{END}` |" in card and "GenerationConfig.from_pretrained(adapter)" in card


def test_a_run_that_is_opened_reads_its_rows_as_it_did(tmp_path, chatty):
    """Texts among its rows end with the tokenizer's end token, answers with the template's, which is saved as both."""
    talks = [{"messages": [{"role": "user", "content": "Tam"}, {"role": "assistant", "content": "Monday"}]}] * 3
    path, texts = write(tmp_path / "talks.jsonl", *talks), write(tmp_path / "texts.jsonl", {"text": "Bren bought."})
    directory = runs.run(
        tmp_path,
        model_name=str(chatty),
        dataset=f"{path}=1,{texts}=1",
        eval_fraction=0.5,
        context_length=64,
        max_steps=1,
    )
    assert transformers.AutoTokenizer.from_pretrained(directory / "adapter").eos_token == END
    anyqlora.load_finetuned(directory).evaluate()  # it raises where the rows are others


def test_a_chat_shows_what_the_model_says_without_its_end(said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tam\n"))
    assert program.main(["chat", str(said[0])]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{CALL}Monday"


def test_ends_that_are_rare_are_chance():
    assert learned_ends({"train": {"end_tokens": {"<|im_end|>": 100, "<|eom|>": 5, "<|fim|>": 4}}}) == [
        "<|im_end|>",
        "<|eom|>",
    ]
    assert learned_ends({}) == learned_ends({"train": {"end_tokens": {}}}) == []


def test_neither_padding_nor_the_batch_changes_an_answer():
    """Prompts of several lengths together and each alone; what stands in padding is another token in a tokenizer
    without a pad token.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(DEMO_BASE)
    prompts = [
        words.encode(text)
        for text in ("Bren bought two red lamps in Ashford on Monday. Repeat:", "Who?", "Sam sold a kite.")
    ]
    together = answers(model, words, prompts, max_new_tokens=12)
    assert (
        together == [answers(model, words, [prompt], max_new_tokens=12)[0] for prompt in prompts]
        and len(set(together)) == 3
    )
    words.pad_token = None
    assert answers(model, words, prompts, max_new_tokens=12, batch_size=2) == together
    assert stop_ids(model, words) == [words.eos_token_id]
    assert stop_ids(model, words, ["a"]) == sorted({words.eos_token_id, words.convert_tokens_to_ids("a")})


# ------------------------------------------------------------------------------------ what a model says of generating


def greedy(model, prompt: list[int], steps: int, ends=(1,)) -> list[int]:
    """The likeliest token each time, by whole forward passes, up to an end token."""
    ids = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ends:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "stated",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 3},
        {"suppress_tokens": list(range(2, 300))},
        {"min_new_tokens": 12},
        {"do_sample": True, "temperature": 9.0, "top_k": 300},
        {"forced_eos_token_id": 1},
        {"max_time": 1e-9},
    ],
    ids=lambda stated: next(iter(stated)),
)
def test_greedy_is_greedy_whatever_the_model_says(stated):
    """The reference is argmax over plain forward passes; only the tokens that end an answer are the model's own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(DEMO_BASE)
    prompts = [words.encode(text) for text in ("Bren bought two red lamps in Ashford on Monday. Repeat:", "Who?")]
    end = greedy(model, prompts[0], 8)[-1]
    own = model.generation_config = transformers.GenerationConfig(eos_token_id=[1, end], **stated)
    expected = [words.decode(greedy(model, prompt, 10, (1, end))) for prompt in prompts]
    assert answers(model, words, prompts, max_new_tokens=10) == expected
    assert model.generation_config is own and stop_ids(model, words) == sorted([1, end])


def test_a_temperature_draws_from_all_tokens():
    """At a high one the likeliest fifty are no likelier than others."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(DEMO_BASE)
    model.generation_config = transformers.GenerationConfig(top_k=1)
    torch.manual_seed(0)
    prompt = words.encode("Who?")
    drawn = answers(
        model, words, [prompt] * 200, max_new_tokens=1, batch_size=200, do_sample=True, temperature=1e4, top_k=0
    )
    assert len(set(drawn)) > 100


# ------------------------------------------------------------------------------------------------- tables of positions

PLACES = 16
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": PLACES,
    "n_positions": PLACES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
BY_NAME = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
}
SHAPES = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": PLACES},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
}
OF_GPT = ("gpt2", "gpt_bigcode", "gptj", "codegen", "openai-gpt")


def tiny(name):
    """A random model of this architecture with sixteen positions."""
    shape = SHAPES.get(name, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4} if name in OF_GPT else BY_NAME)
    own = {} if name == "mpt" else COMMON
    config = transformers.AutoConfig.for_model(name, vocab_size=len(tiny_models.words()), **{**own, **shape})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", sorted(POSITION_TABLES))
def test_a_position_beyond_the_table_is_an_error(name):
    """By transformers' own model, so that a version which makes more positions is noticed."""
    model = tiny(name)
    places = PLACES - (name in COUNTED_FROM_PAD)
    assert position_table(model.config.to_dict()) == places
    ids = torch.full((1, places + 1), 5)
    with torch.no_grad():
        model(ids[:, :places])
        with pytest.raises((IndexError, RuntimeError)):
            model(ids)


@pytest.mark.parametrize("name", ["llama", "xglm", "phi", "bloom"])
def test_models_that_compute_positions_have_no_table(name):
    assert position_table({"model_type": name, "max_position_embeddings": 16}) is None


@pytest.mark.parametrize("name", ["gpt2", "gptj", "codegen", "opt", "openai-gpt", "ctrl", "mpt", "bart"])
def test_answers_end_where_the_positions_do(name):
    """The reference is argmax over whole forward passes, for as long as there are positions; a prompt that leaves none
    has no answer.
    """
    torch.manual_seed(0)
    model, words = tiny(name), tiny_models.words()
    prompts = [[5 + i % 7 for i in range(n)] for n in (PLACES - 3, 2, PLACES, PLACES + 4, PLACES - 3, PLACES - 6)]
    expected = [words.decode(greedy(model, prompt, min(8, PLACES - len(prompt)))) for prompt in prompts]
    together = name != "bart"  # bart counts positions from the first column, padding or not
    assert answers(model, words, prompts, max_new_tokens=8, batch_size=16 if together else 1) == expected
    assert expected[2] == expected[3] == "" and all(expected[n] for n in (0, 1, 4, 5))
