"""Tiny real tokenizers and chat templates for the tests of the data layer."""

import functools
import json

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from anyqlora.config import resolve

SPECIALS = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n\nThen it sleeps.\n",
    "### Instruction:\nWrite a response that appropriately completes the request.\n\n### Response:\n",
    "system\nuser\nassistant\nWhat is two plus two? It is four.\n\n\nHello there, how are you?\n",
    "Below is an instruction that describes a task, paired with an input that provides further context.\n",
] * 4

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim "
    "}}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As Qwen3's: the last assistant turn has its reasoning, or an empty one; earlier turns have none.
THINK = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 "
    "%}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% "
    "endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen2.5's: tools in a system turn, calls as JSON behind the words.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Asks with an opened <think> and writes the answered turn without one: nothing can be trained as it is asked.
NO_PREFIX = CHATML.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
)
DATED = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML


def wrapped(tokenizer: Tokenizer, template: str | dict | None):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=SPECIALS[3:],
        chat_template=template,
    )


@functools.cache
def byte_level(template: str | None = CHATML):
    """A byte-level BPE of a few hundred tokens, as GPT-2's and Llama 3's; no BOS of its own accord."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    return wrapped(tokenizer, template)


@functools.cache
def metaspace(template: str | None = None):
    """A BPE with SentencePiece's prefix space and byte fallback, and a BOS before every text, as Llama 2's."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = space = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False, max_token_length=8)
    )
    model = json.loads(trained.to_str())["model"]
    vocab = list(model["vocab"]) + [f"<0x{i:02X}>" for i in range(256)]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocab)}, [tuple(pair) for pair in model["merges"]], byte_fallback=True
        )
    )
    tokenizer.pre_tokenizer = space
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return wrapped(tokenizer, template)


@functools.cache
def composing():
    """A byte-level BPE that composes characters (NFC): prompt and answer can share one."""
    tokenizer = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    tokenizer.normalizer = normalizers.NFC()
    return wrapped(tokenizer, None)


def settings(dataset, **more) -> resolve.TrainConfig:
    """A configuration of this dataset, as the command line makes it; rows are plain text, which `auto` makes of them
    where the tokenizer has no chat template (these have one).
    """
    return resolve.resolve({"model_name": "none", "dataset": str(dataset), "prompt_format": "text", **more}, environ={})


def write(path, *rows):
    """A JSONL file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
