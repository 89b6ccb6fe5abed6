"""Tool calls through the tokenizer's own template: what is learned is what the model has to write."""

import pytest
from data_fixtures import TOOLS, byte_level
from test_data_chat import learned, prepared


def call(arguments, content=None, **more):
    """A conversation in which the assistant calls a function, as OpenAI writes it."""
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": content, "tool_calls": calls, **more}]


@pytest.mark.parametrize("arguments", ['{"city": "Köln", "n": 2}', ' {"city":"K\\u00f6ln","n":2}\n', {"city": "Köln", "n": 2}])
@pytest.mark.parametrize(("written", "expected"), [
    ("arguments | tojson", '{"city": "Köln", "n": 2}'),  # Qwen2.5, Llama 3.1, Mistral
    ("arguments if call.function.arguments is string else call.function.arguments | tojson", '{"city": "Köln", "n": 2}'),  # Qwen3
    ("arguments + '\\n'", '{"city": "Köln", "n": 2}\n'),  # DeepSeek R1
    ("arguments", '{"city": "Köln", "n": 2}'),
    ("arguments | items | join(' ')", "('city', 'Köln') ('n', 2)"),  # Qwen3 Coder
])
def test_arguments_are_an_object_however_they_are_written(written, expected, arguments, tmp_path):
    """Hand-made: the ways of models' own templates; OpenAI writes arguments as JSON text, transformers asks for an object."""
    tokens = byte_level(TOOLS.replace("arguments | tojson", written))
    read = prepared(tmp_path, tokens, call(arguments))
    assert learned(read.train[0], tokens) == [f'<tool_call>{{"name": "weather", "arguments": {expected}}}</tool_call><|im_end|>']


def test_words_that_look_like_python_do_not_make_text_of_arguments(tmp_path):
    tokens = byte_level(TOOLS)
    read = prepared(tmp_path, tokens, call('{"n": 2}', "With {'n': 2}."))
    assert learned(read.train[0], tokens) == ["With {'n': 2}.<tool_call>{\"name\": \"weather\", \"arguments\": {\"n\": 2}}</tool_call><|im_end|>"]


def test_a_call_has_words_beside_it_or_none(tmp_path):
    """Qwen3's template joins content, so null has to be empty text; Llama's asks whether there are calls, so an empty list has to be none."""
    tokens = byte_level(TOOLS.replace("m.content }}", "'' + m.content }}{{ '!' if 'tool_calls' in m }}"))
    turns = [call("{}"), call("{}", "I ask."), [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "tool_calls": []}]]
    said = [learned(example, tokens)[0].removesuffix("<|im_end|>") for example in prepared(tmp_path, tokens, *turns).train]
    asks = '!<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    assert said == [asks, "I ask." + asks, "Ho"]


def test_a_call_without_an_object_around_its_function(tmp_path):
    tokens = byte_level(TOOLS.replace("call.function.", "call."))
    turns = [{"role": "user", "content": "And now?"}, {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": "{\"n\": 2}"}]}]
    assert learned(prepared(tmp_path, tokens, turns).train[0], tokens) == ['<tool_call>{"name": "weather", "arguments": {"n": 2}}</tool_call><|im_end|>']
