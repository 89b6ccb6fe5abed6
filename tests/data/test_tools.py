"""Tool calls through the tokenizer's own template: what is learned is what the model has to write."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from anyqlora.core import errors
from anyqlora.data import audit, dataset
from tests.data.test_chat import learned, prepared
from tests.support.data_fixtures import CHATML, NO_PREFIX, THINK, TOOLS, byte_level, settings, write

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "What it is like.", "parameters": {"city": {"type": "string"}}},
}


def call(arguments, content=None, **more):
    """A conversation in which the assistant calls a function, as OpenAI writes it."""
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return [
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": content, "tool_calls": calls, **more},
    ]


@pytest.mark.parametrize(
    "arguments", ['{"city": "Köln", "n": 2}', ' {"city":"K\\u00f6ln","n":2}\n', {"city": "Köln", "n": 2}]
)
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("arguments | tojson", '{"city": "Köln", "n": 2}'),  # Qwen2.5, Llama 3.1, Mistral
        (
            "arguments if call.function.arguments is string else call.function.arguments | tojson",
            '{"city": "Köln", "n": 2}',
        ),  # Qwen3
        ("arguments + '\\n'", '{"city": "Köln", "n": 2}\n'),  # DeepSeek R1
        ("arguments", '{"city": "Köln", "n": 2}'),
        ("arguments | items | join(' ')", "('city', 'Köln') ('n', 2)"),  # Qwen3 Coder
    ],
)
def test_arguments_are_an_object_however_they_are_written(written, expected, arguments, tmp_path):
    """Hand-made: the ways of models' own templates; OpenAI writes arguments as JSON text, transformers asks for an
    object.
    """
    tokens = byte_level(TOOLS.replace("arguments | tojson", written))
    read = prepared(tmp_path, tokens, call(arguments))
    assert learned(read.train[0], tokens) == [
        f'<tool_call>{{"name": "weather", "arguments": {expected}}}</tool_call><|im_end|>'
    ]


def test_words_that_look_like_python_do_not_make_text_of_arguments(tmp_path):
    tokens = byte_level(TOOLS)
    read = prepared(tmp_path, tokens, call('{"n": 2}', "With {'n': 2}."))
    assert learned(read.train[0], tokens) == [
        'With {\'n\': 2}.<tool_call>{"name": "weather", "arguments": {"n": 2}}</tool_call><|im_end|>'
    ]


def test_a_template_that_takes_neither_gives_its_first_reason(tmp_path):
    items = (
        TOOLS.replace("arguments | tojson", "arguments | items | join")
        + "{{ raise_exception('No tools') if messages[-1].tool_calls }}"
    )
    with pytest.raises(errors.UsageError, match="the chat template refuses it: No tools"):
        prepared(tmp_path, byte_level(items), call("{}"))


def test_a_call_has_words_beside_it_or_none(tmp_path):
    """Qwen3's template joins content, so null has to be empty text; Llama's asks whether there are calls, so an empty
    list has to be none.
    """
    tokens = byte_level(TOOLS.replace("m.content }}", "'' + m.content }}{{ '!' if 'tool_calls' in m }}"))
    turns = [
        call("{}"),
        call("{}", "I ask."),
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "tool_calls": []}],
    ]
    said = [
        learned(example, tokens)[0].removesuffix("<|im_end|>") for example in prepared(tmp_path, tokens, *turns).train
    ]
    asks = '!<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    assert said == [asks, "I ask." + asks, "Ho"]


def test_a_call_without_an_object_around_its_function(tmp_path):
    tokens = byte_level(TOOLS.replace("call.function.", "call."))
    turns = [
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": '{"n": 2}'}]},
    ]
    assert learned(prepared(tmp_path, tokens, turns).train[0], tokens) == [
        '<tool_call>{"name": "weather", "arguments": {"n": 2}}</tool_call><|im_end|>'
    ]


def test_a_learned_call_that_the_template_does_not_write_is_a_bad_row(tmp_path):
    """Nothing but the end of the turn would be learned."""
    with pytest.raises(
        errors.UsageError, match="rows.jsonl:1: the chat template does not write the call of 'weather' in message 2"
    ):
        prepared(tmp_path, byte_level(CHATML), call("{}"))
    with pytest.raises(errors.UsageError, match="does not write the call of 'other'"):
        two = call("{}")
        two[1]["tool_calls"] += [{"function": {"name": "other", "arguments": "{}"}}]
        prepared(tmp_path, byte_level(TOOLS.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")), two)


REASONS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1", "reasoning_content": "so"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "<think>hm</think>2"},
]
SAYS_YES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "yes"}]
ASKED = [
    *call("{}", weight=0),
    {"role": "tool", "content": '{"sky": "gr\u00e4y"}\n'},
    {"role": "assistant", "content": "It rains."},
]


@pytest.mark.parametrize(
    ("template", "turns", "tools", "expected"),
    [
        (TOOLS, ASKED, [WEATHER], {}),
        (
            TOOLS.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}"),
            ASKED,
            None,
            {},
        ),  # Llama 3.1
        (CHATML, ASKED, [WEATHER], {"tools": 1, "tool_calls": 1}),
        (CHATML, REASONS, None, {"reasoning": 1}),
        (THINK, REASONS, None, {}),
        (
            NO_PREFIX,
            [REASONS[0], {"role": "assistant", "content": "<think>\nso</think>1"}],
            None,
            {},
        ),  # what is asked has the answer's beginning
    ],
)
def test_what_a_template_leaves_out_is_counted_and_told(template, turns, tools, expected, tmp_path):
    """Of the assistant only what is learned: reasoning that is taken out of earlier turns, and stands in their own
    examples, is not lost.
    """
    path = write(tmp_path / "rows.jsonl", {"messages": turns, "tools": tools})
    tokens = byte_level(template)
    report = dataset.load_data(settings(path), tokens).report
    assert {name: count for name, count in report["sources"][0].items() if "not_in" in name} == {
        f"{name}_not_in_template": n for name, n in expected.items()
    }
    told = [
        f"{name.replace('_', ' ')} that the chat template leaves out: {n}, in {path}" for name, n in expected.items()
    ]
    assert audit.warnings(report) == audit.warnings(dataset.read_held_out(settings(path), str(path), tokens)[1]) == told


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (THINK.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"), REASONS[2:]),
        (TOOLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), call("{}", "And now?")),
        (CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), SAYS_YES),
        (CHATML.replace("{{ m.content }}", "{{ m.content[:2] }}"), SAYS_YES),
        (CHATML.replace("{{ m.content }}", "{{ m.text }}"), SAYS_YES),
    ],
)
def test_a_template_that_leaves_out_what_is_learned_is_refused(template, turns, tmp_path):
    path = write(tmp_path / "rows.jsonl", {"messages": turns})
    with pytest.raises(
        errors.UsageError, match="rows.jsonl:1: the chat template leaves out what the assistant says in"
    ):
        dataset.load_data(settings(path), byte_level(template))


@pytest.mark.parametrize(
    ("template", "bad"),
    [(THINK, [REASONS[0], {**REASONS[1], "reasoning_content": "x\ud800"}]), (TOOLS, call('{"city": "x\\ud800"}'))],
)
def test_half_a_surrogate_pair_is_found_wherever_the_template_writes_it(template, bad, tmp_path):
    path = write(tmp_path / "rows.jsonl", {"messages": REASONS[2:]}, {"messages": bad})
    read = dataset.load_data(settings(path, on_bad_row="skip"), byte_level(template))
    assert len(read.train) == 1 and [row["where"] for row in read.report["skipped"]] == [f"{path}:2"]
    assert "what the chat template writes holds half of a surrogate pair" in read.report["skipped"][0]["reason"]


def test_parquet_adds_no_argument_to_a_call(tmp_path):
    """The reference is the same row as JSON. A column of Parquet has one set of keys for all."""
    two = call({"city": "Rome"})
    two[1]["tool_calls"].append(
        {
            "id": "2",
            "type": "function",
            "function": {"name": "other", "arguments": {"n": 2, "at": [{"x": 1}, {"y": 2}]}},
        }
    )
    row = {
        "messages": two,
        "tools": [
            WEATHER,
            {"type": "function", "function": {"name": "other", "parameters": {"n": {"type": "number"}}}},
        ],
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    read = dataset.load_data(settings(tmp_path / "a.parquet"), byte_level(TOOLS))
    reference = dataset.load_data(settings(write(tmp_path / "a.jsonl", row)), byte_level(TOOLS))
    assert read.identity == reference.identity


def test_tools_may_be_json_text(tmp_path):
    """A cell of CSV is text, and an empty one is no tools."""
    rows = [{"messages": call("{}"), "tools": [WEATHER]}, {"messages": REASONS, "tools": None}]
    texts = [{"messages": call("{}"), "tools": json.dumps([WEATHER])}, {"messages": REASONS, "tools": ""}]
    read, reference = (
        dataset.load_data(settings(write(tmp_path / name, *given)), byte_level(TOOLS))
        for name, given in (("a.jsonl", texts), ("b.jsonl", rows))
    )
    assert read.identity == reference.identity


def test_a_message_is_counted_as_in_its_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"system": "Be brief.", "messages": call("{}")})
    with pytest.raises(errors.UsageError, match="the call of 'weather' in message 2"):
        dataset.load_data(settings(path), byte_level(CHATML))
