"""Rows as the documentation of five other tools shows them: read right, or refused with their meaning and a cure that
works when it is followed.
"""

import json
import re

import pytest

from anyqlora.core.errors import UsageError
from anyqlora.data import dataset
from tests.data.test_chat import learned
from tests.support.data_fixtures import TOOLS, byte_level, settings, write

ASK, SAY = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Tam."}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
}
SAID = "Tam."  # what is learned of each, but for its end
READ = {
    "TRL, language modeling": {"text": SAID},
    "TRL, conversational": {"messages": [ASK, SAY]},
    "TRL, prompt-completion": {"prompt": "Who?", "completion": SAID},
    "TRL, conversational prompt-completion": {"prompt": [ASK], "completion": [SAY]},
    "TRL, tool calling": {
        "messages": [ASK, CALL, {"role": "tool", "name": "weather", "content": "warm"}, SAY],
        "tools": [WEATHER],
    },
    "axolotl, chat_template": {"messages": [{"role": "system", "content": "Be kind."}, ASK, SAY]},
    "axolotl, training of a turn": {
        "messages": [ASK, {"role": "assistant", "content": "No.", "training": False}, ASK, {**SAY, "training": True}]
    },
    "axolotl, sharegpt": {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": SAID}]},
    "axolotl, pygmalion": {"conversations": [{"role": "user", "content": "Who?"}, SAY]},
    "axolotl, alpaca": {"instruction": "Who?", "input": "", "output": SAID},
    "axolotl, alpaca with a system": {"instruction": "Who?", "input": "", "output": SAID, "system": "Be kind."},
    "axolotl, gpteacher": {"instruction": "Who?", "input": "", "response": SAID},
    "axolotl, oasst": {"INSTRUCTION": "Who?", "RESPONSE": SAID},
    "axolotl, jeopardy": {"question": "Who?", "category": "names", "answer": SAID},
    "axolotl, summarizetldr": {"article": "Who?", "summary": SAID},
    "axolotl, context_qa.load_v2": {"context": "A talk.", "question": "Who?", "answer": SAID},
    "axolotl, camel_ai": {"message_1": "Who?", "message_2": SAID},
    "axolotl, metharme": {"prompt": "Who?", "generation": SAID},
    "axolotl, completion": {"text": SAID},
    "axolotl, template-free": {"segments": [{"label": False, "text": "Who?"}, {"label": True, "text": f"{SAID}</s>"}]},
    "LLaMA-Factory, alpaca": {
        "instruction": "Who?",
        "input": "",
        "output": SAID,
        "system": "Be kind.",
        "history": [["Hello", SAID]],
    },
    "LLaMA-Factory, sharegpt": {
        "conversations": [
            {"from": "human", "value": "Who?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
            {"from": "observation", "value": "warm"},
            {"from": "gpt", "value": SAID},
        ],
        "system": "Be kind.",
        "tools": json.dumps([WEATHER["function"]]),
    },
    "LLaMA-Factory, pre-training": {"text": SAID},
    "OpenAI, chat": {"messages": [{"role": "system", "content": "Be kind."}, ASK, SAY]},
    "OpenAI, weights": {"messages": [ASK, {**SAY, "weight": 0}, ASK, {**SAY, "weight": 1}]},
    "OpenAI, parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}, SAY],
    },
    "OpenAI, tools": {
        "messages": [ASK, CALL, {"role": "tool", "tool_call_id": "c1", "content": "warm"}, SAY],
        "tools": [WEATHER],
        "parallel_tool_calls": False,
    },
    "OpenAI, functions": {
        "messages": [
            ASK,
            {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
            {"role": "function", "name": "weather", "content": "warm"},
            SAY,
        ],
        "functions": [WEATHER["function"]],
    },
    "mlx-lm, chat": {"messages": [ASK, SAY]},
    "mlx-lm, tools": {"messages": [ASK, CALL], "tools": [WEATHER]},
    "mlx-lm, completions": {"prompt": "Who?", "completion": SAID},
    "mlx-lm, text": {"text": SAID},
    "Unsloth, vicuna": {"conversation": [{"role": "user", "content": "Who?"}, SAY]},
}
PAIR = {"chosen": SAID, "rejected": "Bren."}
CHOSEN = "--preference_data chosen"
REFUSED = {  # (row, what is said of it, the setting that is its cure)
    "TRL, preference": ({"prompt": "Who?", **PAIR}, "preference set", {"preference_data": "chosen"}),
    "TRL, conversational preference": (
        {"prompt": [ASK], "chosen": [SAY], "rejected": [{**SAY, "content": "Bren."}]},
        "preference set",
        {"preference_data": "chosen"},
    ),
    "TRL, implicit prompt": (
        {"chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": "Bren."}]},
        "preference set",
        {"preference_data": "chosen"},
    ),
    "TRL, unpaired preference": (
        {"prompt": "Who?", "completion": SAID, "label": True},
        "whether the answer is a good one",
        {"preference_data": "chosen"},
    ),
    "LLaMA-Factory, preference": (
        {
            "conversations": [{"from": "human", "value": "Who?"}],
            "chosen": {"from": "gpt", "value": SAID},
            "rejected": {"from": "gpt", "value": "Bren."},
        },
        "preference set",
        {"preference_data": "chosen"},
    ),
    "LLaMA-Factory, KTO": ({"messages": [ASK, SAY], "label": True}, "good one", {"preference_data": "chosen"}),
    "OpenAI, preference": (
        {
            "input": {"messages": [ASK], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [SAY],
            "non_preferred_output": [{**SAY, "content": "Bren."}],
        },
        "preference set",
        {"preference_data": "chosen"},
    ),
    "axolotl, a chosen response": (
        {"instruction": "Who?", "chosen_response": SAID, "rejected_response": "Bren."},
        "preference set",
        {"preference_data": "chosen"},
    ),
    "TRL, vision": (
        {"messages": [ASK, SAY], "images": ["a.png"]},
        "pictures or plays sound",
        {"ignore_columns": "images"},
    ),
    "LLaMA-Factory, audio": ({"messages": [ASK, SAY], "audios": ["a.wav"]}, "sound", {"ignore_columns": "audios"}),
    "OpenAI, reinforcement": (
        {"messages": [ASK], "reference_answer": SAID},
        "no message is the assistant's",
        {"columns": "prompt=messages[0].content,completion=reference_answer"},
    ),
    "TRL, prompt only": ({"prompt": "Who?"}, "no known format: the row has 'prompt'", None),
    "TRL, stepwise": (
        {"prompt": "Who?", "completions": ["T", "am."], "labels": [True, False]},
        "no known format",
        {"columns": "prompt=prompt,completion=completions[0]", "ignore_columns": "labels"},
    ),
}


def answers(path, **more):
    tokens = byte_level(TOOLS)
    more = {"prompt_format": "auto", **more}
    return [run for row in dataset.load_data(settings(path, **more), tokens).train for run in learned(row, tokens)]


@pytest.mark.parametrize("name", READ)
def test_a_documented_form_is_read(name, tmp_path):
    found = answers(write(tmp_path / "rows.jsonl", READ[name]))
    last = found[-1].removesuffix("<|im_end|>").removesuffix("</s>")
    assert (last == SAID) or ("weather" in last and CALL in READ[name]["messages"])
    assert not any("No." in text or "Bren" in text for text in found)


@pytest.mark.parametrize("name", REFUSED)
def test_a_documented_form_that_is_no_answer_to_learn_is_refused(name, tmp_path):
    row, said, cure = REFUSED[name]
    path = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(UsageError) as refused:
        answers(path)
    assert said in str(refused.value) and "rows.jsonl:1: " in str(refused.value) and "cure: " in str(refused.value)
    if cure:
        flag = next(iter(cure))
        assert re.search(rf"--{flag}\b", str(refused.value)) or flag == "columns"
        (last,) = [text.removesuffix("<|im_end|>") for text in answers(path, **cure)]
        assert last == SAID if "completions" not in row else last == "T"
