"""Make the demo: generated text, a tokenizer, a very small Llama pre-trained on that text, and a task the Llama has
never seen.

python scripts/make_base.py writes anyqlora/demo/base, anyqlora/demo/task and anyqlora/demo/SHA256SUMS. Everything is
drawn from fixed seeds on one thread, so one machine writes the same bytes each time; other machines differ in the
weights' last bits only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

Row = dict[str, str]  # {"prompt": ..., "completion": ...}


def list_words(text: str) -> list[str]:
    return text.split()


# The text. Names are stem + ending, so that there are enough of them that they must be copied and cannot be memorised.
# People and towns begin with different letters, and no ending is hidden in a stem: a model this small copies by looking
# up the token before, and takes Millis for Millport and Vinin for Vino.
PEOPLE = [
    stem + ending
    for stem, ending in product(
        list_words("Bar Bev Bor Dan Dar Dav Dor Jan Jas Jor Lan Lev Lor Per Por Var Ver Yan Yev Yor Zan Zor"),
        list_words("a en in is o la ric us"),
    )
]
TOWNS = [
    stem + ending
    for stem, ending in product(
        list_words("Ash Clay East Fair Glen Hart Iron King Mill North Oak Quay Rock Stone Thorn West"),
        list_words("ford brook ton field wick bury dale port"),
    )
]
KINDS = list_words("red blue green black white yellow brown golden silver wooden old tiny heavy round")
GOODS = list_words("""
    lamps chairs kettles baskets clocks ladders mirrors teapots blankets barrels bottles buttons candles carpets
    drums hammers helmets jackets maps pillows ropes spoons tents wagons""")
DAYS = list_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SENTENCES = [
    "{who} bought {n} {kind} {goods} in {town} on {day}.",
    "{who} sold {n} {kind} {goods} in {town} on {day}.",
    "On {day}, {who} found {n} {kind} {goods} in {town}.",
    "On {day}, {who} of {town} mended {n} {kind} {goods}.",
    "In {town}, {who} counted {n} {kind} {goods} on {day}.",
    "In {town} on {day}, {who} lost {n} {kind} {goods}.",
    "{n} {kind} {goods} were sent from {town} by {who} on {day}.",
    "Last {day}, {n} {kind} {goods} came to {who} in {town}.",
]
KEYS = {"who": "{who}", "qty": "{n}", "item": "{kind} {goods}", "where": "{town}", "day": "{day}", "kind": "{kind}"}
TASK_KEYS = ("who", "qty", "item", "where")

# The model: every linear layer's in_features is a multiple of 64, the block size of NF4 and the group size of other
# formats.
LLAMA = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TRAIN_ROWS, HELDOUT_ROWS, BATCH, PEAK_LR, ANSWER_TOKENS = 768, 64, 32, 3e-3, 48


def draw_fact(rng: random.Random, people: list[str] = PEOPLE, towns: list[str] = TOWNS) -> dict:
    """One thing that somebody did with some goods somewhere."""
    return {
        "who": rng.choice(people),
        "n": rng.randint(2, 20),
        "kind": rng.choice(KINDS),
        "goods": rng.choice(GOODS),
        "town": rng.choice(towns),
        "day": rng.choice(DAYS),
    }


def tell(fact: dict, rng: random.Random) -> str:
    """The fact as an English sentence."""
    return rng.choice(SENTENCES).format(**fact)


def fill(keys: list[str] | tuple[str, ...], fact: dict) -> dict[str, str | int]:
    """The fact as key -> value, in the order of the keys."""
    return {key: fact["n"] if key == "qty" else KEYS[key].format(**fact) for key in keys}


def dump_json(values: dict) -> str:
    """One line without spaces, which halves the tokens."""
    return json.dumps(values, separators=(",", ":"))


def draw_base_row(rng: random.Random) -> Row:
    """What the base is pre-trained on: find one or several things in a sentence, repeat a sentence, or repeat a line of
    JSON.

    The line of JSON goes with no sentence, and its values go with other keys. It trains every token that the task
    emits, which LoRA on a frozen embedding could not make up for, and leaves sentence to JSON to be learned.
    """
    fact = draw_fact(rng)
    choice = rng.random()
    if choice < 0.2:
        key = rng.choice(list(KEYS))
        return {"prompt": f"{tell(fact, rng)} {key}:", "completion": str(fill([key], fact)[key])}
    if choice < 0.6:
        keys = rng.sample(list(KEYS), rng.randint(2, 4))
        answer = ",".join(f"{key}:{value}" for key, value in fill(keys, fact).items())
        return {"prompt": f"{tell(fact, rng)} {','.join(keys)}:", "completion": answer}
    if choice < 0.75:
        sentence = tell(fact, rng)
        return {"prompt": f"{sentence} Repeat:", "completion": sentence}
    values = fill(rng.sample(list(KEYS), 4), fact).values()
    line = dump_json(dict(zip(rng.sample(list(KEYS), 4), values, strict=True)))
    return {"prompt": f"JSON: {line} Repeat:", "completion": line}


def draw_task_row(rng: random.Random, people: list[str], towns: list[str]) -> Row:
    """What the demo tunes: a sentence to a JSON object."""
    fact = draw_fact(rng, people, towns)
    return {"prompt": f"{tell(fact, rng)} JSON:", "completion": dump_json(fill(TASK_KEYS, fact))}


def draw_task() -> tuple[list[Row], list[Row]]:
    """(train, heldout): no row twice, and no person or town of heldout is in train, so that only the skill can carry
    over.
    """
    rng = random.Random(1)
    people, towns = rng.sample(PEOPLE, len(PEOPLE)), rng.sample(TOWNS, len(TOWNS))
    train: dict[str, Row] = {}
    heldout: dict[str, Row] = {}
    for rows, count, part in ((heldout, HELDOUT_ROWS, slice(0, 40)), (train, TRAIN_ROWS, slice(40, None))):
        while len(rows) < count:
            row = draw_task_row(rng, people[part], towns[part])
            rows[row["prompt"]] = row
    return list(train.values()), list(heldout.values())


def draw_text(count: int) -> Iterator[str]:
    """The text that the tokenizer is trained on."""
    rng = random.Random(2)
    for _ in range(count):
        row = draw_base_row(rng)
        yield f"{row['prompt']}\n{row['completion']}"


def train_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A ByteLevel BPE without a beginning-of-text token. Every byte has a token, so nothing is unknown."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        draw_text(8000),
        trainers.BpeTrainer(
            vocab_size=LLAMA["vocab_size"],
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    # Written here and not by save_pretrained, whose output changes with the version of transformers.
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "eos_token": "<eos>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": LLAMA["max_position_embeddings"],
            "padding_side": "right",
        },
    )
    return PreTrainedTokenizerFast.from_pretrained(folder)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make_batch(rows: list[Row], tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [B, T] each.

    Prompt and completion are tokenized apart; the completion and <eos> are trained.
    """
    tokens, labels = [], []
    for row in rows:
        prompt, completion = (
            tokenizer(row[part], add_special_tokens=False)["input_ids"] for part in ("prompt", "completion")
        )
        tokens.append(torch.tensor(prompt + completion + [LLAMA["eos_token_id"]]))
        labels.append(tokens[-1].clone())
        labels[-1][: len(prompt)] = -100
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(tokens, batch_first=True, padding_value=LLAMA["pad_token_id"]), pad(
        labels, batch_first=True, padding_value=-100
    )


def pretrain(tokenizer, steps: int) -> LlamaForCausalLM:
    """Train the base on drawn rows, each seen once, and round it to bfloat16, in which it ships."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], PEAK_LR, betas=(0.9, 0.98)
    )
    rng, start = random.Random(3), time.process_time()
    for step in range(steps):
        lr = PEAK_LR * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr
        tokens, labels = make_batch([draw_base_row(rng) for _ in range(BATCH)], tokenizer)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0 or step + 1 == steps:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {time.process_time() - start:.0f} s", flush=True)
    return model.to(torch.bfloat16)


@torch.no_grad()
def score_exact_match(model: LlamaForCausalLM, tokenizer, rows: list[Row]) -> float:
    """The part of the rows whose greedy answer is the completion, character by character."""
    model.eval()
    batch = tokenizer(
        [row["prompt"] for row in rows],
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_token_type_ids=False,
    )
    out = model.generate(**batch, max_new_tokens=ANSWER_TOKENS, do_sample=False)[
        :, batch["input_ids"].shape[1] :
    ]  # [B, answer]
    answers = tokenizer.batch_decode(out, skip_special_tokens=True)
    return sum(answer == row["completion"] for answer, row in zip(answers, rows, strict=True)) / len(rows)


@torch.no_grad()
def round_to_nf4(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model as QLoRA sees it: each linear layer but lm_head replaced by what its NF4 blocks of 64 stand for."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.copy_(dequantize_4bit(*quantize_4bit(layer.weight, blocksize=64, quant_type="nf4")))
    return model


def check_quality(folder: Path, tokenizer, heldout: list[Row], count: int) -> list[str]:
    """Print how good the written base is.

    Returns what is not good enough: it must know its own text and not yet the task.
    """
    rng, wrong = random.Random(4), []
    base_rows = [draw_base_row(rng) for _ in range(count)]
    for label, change, least in (("bf16", lambda model: model, 0.95), ("nf4", round_to_nf4, 0.85)):
        model = change(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))
        known, task = (
            score_exact_match(model, tokenizer, base_rows),
            score_exact_match(model, tokenizer, heldout[:count]),
        )
        print(
            f"{label}: exact match on {count} rows of the base's own text {known:.3f}, on the new task {task:.3f}",
            flush=True,
        )
        if known < least:
            wrong.append(f"{label}: {known:.3f} on the base's own text, at least {least} wanted")
        if task > 0.05:
            wrong.append(f"{label}: {task:.3f} on the task before tuning, at most 0.05 wanted")
    return wrong


def write_task(folder: Path, train: list[Row], heldout: list[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("heldout", heldout)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_sums(out: Path) -> None:
    """SHA256SUMS over base/ and task/, as `sha256sum -c` reads it."""
    files = sorted(path for part in ("base", "task") for path in (out / part).iterdir())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(out).as_posix()}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "anyqlora" / "demo", help="where to write"
    )
    parser.add_argument("--steps", type=int, default=2000, help="pre-training steps")
    parser.add_argument(
        "--short", action="store_true", help="a few steps and no demand on quality: a rehearsal, for tests"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums, and with it the bytes, depends on the number of threads
    torch.use_deterministic_algorithms(True)
    disable_progress_bar()
    base, steps = args.out / "base", 20 if args.short else args.steps
    train, heldout = draw_task()
    write_task(args.out / "task", train, heldout)
    tokenizer = train_tokenizer(base)
    model = pretrain(tokenizer, steps)
    model.save_pretrained(base)
    (base / "model.safetensors").chmod(0o644)
    write_sums(args.out)
    wrong = check_quality(base, tokenizer, heldout, 4 if args.short else 64)
    if wrong and not args.short:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
