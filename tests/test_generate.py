"""Where an answer ends, and that padding does not matter: real generations of the embedded base."""

import json
import shutil

import pytest
import runs
import torch
import transformers
from data_fixtures import write

from anyqlora.layouts import DEMO_BASE
from anyqlora.on_torch.generate import answers, learned_ends, stop_ids

END = "<|im_end|>"
CHAT = ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}: {% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The embedded base with a chat template that ends turns with a token which nothing but the template names."""
    base = shutil.copytree(DEMO_BASE, tmp_path_factory.mktemp("chatty") / "base")
    words = transformers.AutoTokenizer.from_pretrained(base)
    unused = max(words.get_vocab(), key=words.get_vocab().get)  # its row of the embedding becomes the end token's
    text = (base / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = json.loads(text)
    number = tokenizer["model"]["vocab"].pop(unused)
    tokenizer["model"]["vocab"][END] = number
    tokenizer["model"]["merges"] = [merge for merge in tokenizer["model"]["merges"] if "".join(merge) != unused]
    tokenizer["added_tokens"].append({"id": number, "content": END, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True})
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
    rows = [{"messages": [{"role": "user", "content": who}, {"role": "assistant", "content": "Monday"}]} for who in ("Bren", "Tam", "Sam", "Hal")]
    directory = runs.run(place, model_name=str(chatty), dataset=str(write(place / "train.jsonl", *rows)), eval_dataset=str(place / "train.jsonl"),
                         context_length=64, batch_size=4, max_steps=25, lr=0.02, lora_dropout=0, precision="fp32", save_steps=0, samples=2,
                         max_new_tokens=12, lr_scheduler="constant")
    return directory, [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


def test_an_answer_ends_with_the_token_that_the_template_trained(said):
    directory, samples = said
    assert json.loads((directory / "data_report.json").read_text())["train"]["end_tokens"] == {END: 4}
    assert [sample["answer"] for sample in samples if sample["step"] > 0] == ["Monday", "Monday"]
    assert runs.result(directory)["eval"]["after"]["exact_match"] == 1.0


def test_the_verbs_end_answers_there_too(said):
    from anyqlora import finished
    from anyqlora.on_torch import tuned
    model = tuned.load(finished.find(str(said[0])), {})
    assert model.answer([[{"role": "user", "content": "Tam"}]]) == ["Monday"]
    assert model.evaluate(model.run.held_out(model.tokenizer))["exact_match"] == 1.0


def test_ends_that_are_rare_are_chance():
    assert learned_ends({"train": {"end_tokens": {"<|im_end|>": 100, "<|eom|>": 5, "<|fim|>": 4}}}) == ["<|im_end|>", "<|eom|>"]
    assert learned_ends({}) == learned_ends({"train": {"end_tokens": {}}}) == []


def test_neither_padding_nor_the_batch_changes_an_answer():
    """Prompts of several lengths together and each alone; what stands in padding is another token in a tokenizer without a pad token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(DEMO_BASE)
    prompts = [words.encode(text) for text in ("Bren bought two red lamps in Ashford on Monday. Repeat:", "Who?", "Sam sold a kite.")]
    together = answers(model, words, prompts, max_new_tokens=12)
    assert together == [answers(model, words, [prompt], max_new_tokens=12)[0] for prompt in prompts] and len(set(together)) == 3
    words.pad_token = None
    assert answers(model, words, prompts, max_new_tokens=12, batch_size=2) == together
    assert stop_ids(model, words) == [words.eos_token_id]
    assert stop_ids(model, words, ["a"]) == sorted({words.eos_token_id, words.convert_tokens_to_ids("a")})
