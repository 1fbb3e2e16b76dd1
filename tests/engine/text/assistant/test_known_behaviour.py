"""Turns on which other projects' parsers are tested are read as those projects found right.

Each case names the project and the file in which the behaviour is held; its text is made here.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from octavo.engine.text.assistant.events import AssistantParser
from octavo.engine.text.assistant.formats import format_named
from octavo.engine.text.assistant.reasoning import reasoning_named
from octavo.engine.text.assistant.tool import FunctionTool
from tests.engine.text.assistant.turns import TOOLS, Said, said

TYPED = FunctionTool(
    "typed",
    {
        "type": "object",
        "properties": {
            "whole": {"type": "integer"},
            "real": {"type": "float"},
            "flag": {"type": "boolean"},
            "text": {"type": "string"},
            "map": {"type": "object"},
            "list": {"anyOf": [{"type": "array"}, {"type": "null"}]},
            "maybe": {"type": ["integer", "null"]},
        },
    },
)
ALL_TOOLS = (*TOOLS, TYPED)
BERLIN: dict[str, Any] = {"city": "Berlin"}

# Format, text, what the user sees, calls that are whole, and what of a last one was told.
CASES: tuple[tuple[str, str, str, list[tuple[str, dict[str, Any]]], str | None], ...] = (
    # vLLM: test_hermes_tool_parser.py: a call that breaks off is not whole.
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Berlin"}',
        "",
        [],
        '{"city": "Berlin"}',
    ),
    # vLLM: test_llama3_json_tool_parser.py.
    (
        "llama3_json",
        'So: {"name": "ping", "parameters": {}} Anything else?',
        "So: Anything else?",
        [("ping", {})],
        None,
    ),
    ("llama3_json", '{"name": "ping"}', '{"name": "ping"}', [], None),
    ("llama3_json", '{"parameters": {}}', '{"parameters": {}}', [], None),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Berlin"}} I used {get_weather} and '
        '{"city": "Berlin"}.',
        'I used {get_weather} and {"city": "Berlin"}.',
        [("get_weather", BERLIN)],
        None,
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {no json}',
        "no json}",
        [],
        "{",
    ),
    # vLLM: test_kimi_k2_tool_parser.py: an id without a count is skipped, a count alone is clear
    # only with one tool, and what follows a broken call is read.
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bad.0 "
        '<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|><|tool_call_begin|>'
        'functions.get_weather:1 <|tool_call_argument_begin|>{"city": "Berlin"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bad.0 "
        '<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>',
        [("get_weather", BERLIN)],
        None,
    ),
    # vLLM: test_gemma4_tool_parser.py.
    (
        "gemma4",
        'Well. <|tool_call>call:weather.get-now{city:<|"|>Bonn, NRW<|"|>}<tool_call|>',
        "Well.",
        [("weather.get-now", {"city": "Bonn, NRW"})],
        None,
    ),
    (
        "gemma4",
        '<|tool_call>call:f{o:{<|"|>3<|"|>:<|"|>a]b<|"|>},n:null,l:[[1,true],2.5]}<tool_call|>',
        "",
        [("f", {"o": {"3": "a]b"}, "n": None, "l": [[1, True], 2.5]})],
        None,
    ),
    ("gemma4", "<|tool_call>call:f{flag:}<tool_call|>", "", [("f", {"flag": ""})], None),
    ("gemma4", '<|tool_call>call:f{city:<|"|>Bo', "", [], '{"city": "Bo'),
    # vLLM: test_qwen3coder_tool_parser.py: types come from the schema, "anyOf" among them.
    (
        "qwen3_coder",
        "<tool_call>\n<function=typed>\n<parameter=whole>\n42\n</parameter>\n<parameter=real>\n3.5\n"
        "</parameter>\n<parameter=flag>\ntrue\n</parameter>\n<parameter=text>\n42\n</parameter>\n"
        '<parameter=map>\n{"a": [1,\n 2]}\n</parameter>\n<parameter=list>\nnull\n</parameter>\n'
        "<parameter=maybe>\n7\n</parameter>\n</function>\n</tool_call>",
        "",
        [
            (
                "typed",
                {
                    "whole": 42,
                    "real": 3.5,
                    "flag": True,
                    "text": "42",
                    "map": {"a": [1, 2]},
                    "list": None,
                    "maybe": 7,
                },
            )
        ],
        None,
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin\n</function>\n</tool_call>",
        "",
        [("get_weather", BERLIN)],
        None,
    ),
    # vLLM: test_glm4_moe_tool_parser.py: words between calls, a call without arguments.
    (
        "glm45",
        "First.\n\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Berlin</arg_value>\n"
        "</tool_call>\n\nThen:\n\n<tool_call>ping\n</tool_call>",
        "First.\n\nThen:",
        [("get_weather", BERLIN), ("ping", {})],
        None,
    ),
    # SGLang: test_function_call_parser.py: words before and after marked calls.
    (
        "pythonic",
        "Now: <|python_start|>[get_weather(city='Berlin', days=[1, 2])]<|python_end|> Done.",
        "Now: Done.",
        [("get_weather", {"city": "Berlin", "days": [1, 2]})],
        None,
    ),
    # vLLM: test_pythonic_tool_parser.py: values that Python and JSON write differently.
    (
        "pythonic",
        """[typed(text="it's", flag=True, list=[], map={'a': None, "b": {}}), ping()]""",
        "",
        [("typed", {"text": "it's", "flag": True, "list": [], "map": {"a": None, "b": {}}}),
         ("ping", {})],
        None,
    ),
    # vLLM: test_deepseekv3_tool_parser.py: words before, and several calls.
    (
        "deepseek_v3",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n"
        "```json\n{}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Berlin"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Let me see.",
        [("ping", {}), ("get_weather", BERLIN)],
        None,
    ),
    # vLLM: test_openai_tool_parser.py: a call, and the answer after it.
    (
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Berlin"}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|>",
        "Sunny.",
        [("get_weather", BERLIN)],
        None,
    ),
)  # fmt: skip


def every_cut(make: Any, text: str) -> Said:
    """What a turn says, which is the same for every two cuts and for single characters."""
    whole = said(make(), [text])
    assert said(make(), list(text)) == whole
    places = range(0, len(text), max(1, len(text) // 40))
    for first, last in itertools.combinations(places, 2):
        assert said(make(), [text[:first], text[first:last], text[last:]]) == whole
    return whole


@pytest.mark.parametrize(("name", "text", "content", "calls", "rest"), CASES)
def test_a_turn_is_read_as_other_projects_read_it(name, text, content, calls, rest):
    whole = every_cut(lambda: format_named(name).parser(ALL_TOOLS), text)
    assert whole.content == content
    parts = [(kind, each, text) for kind, each, text in whole.parts if kind == "call"]
    if rest is not None:
        assert parts.pop()[2] == rest
    assert [(each, json.loads(text)) for _, each, text in parts] == calls
    assert whole.num_ended == len(calls)


def test_a_count_alone_names_the_only_tool():
    # vLLM: test_kimi_k2_tool_parser.py.
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>0 <|tool_call_argument_begin|>"
        '{"city": "Berlin"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    whole = every_cut(lambda: format_named("kimi_k2").parser([TOOLS[0]]), text)
    assert [(call.name, call.arguments) for call in whole.calls] == [("get_weather", BERLIN)]
    assert whole.ids == ["0"]
    assert not every_cut(lambda: format_named("kimi_k2").parser(TOOLS), text).calls


CALL = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>ping\n</tool_call>"
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)

# Reasoning, format of calls, whether the prompt opened the thought, text, thought, words, calls.
THOUGHTS: tuple[tuple[str, str | None, bool, str, str, str, int], ...] = (
    # vLLM: test_qwen3_reasoning_parser.py.
    ("qwen3", None, True, "It rains</think>Yes", "It rains", "Yes", 0),
    ("qwen3", None, True, "It rains</think>", "It rains", "", 0),
    ("qwen3", None, False, "<think>It rains</think>Yes", "It rains", "Yes", 0),
    ("qwen3", None, True, "<think>It\nrains</think>Yes\nno", "It\nrains", "Yes\nno", 0),
    ("qwen3", None, True, "It rains", "It rains", "", 0),
    ("qwen3", "qwen3_coder", True, f"I need it.\n\n{CALL}", "I need it.", "", 1),
    ("qwen3", "qwen3_coder", False, f"<think>I need it.\n\n{CALL}", "I need it.", "", 1),
    ("qwen3", "qwen3_coder", False, f"I need it.\n\n{CALL}", "", "I need it.", 1),
    # Without calls to be read, the mark is a word of the thought.
    ("qwen3", None, True, f"hm {CALL} hm</think>Yes", f"hm {CALL} hm", "Yes", 0),
    # vLLM: test_glm4_moe_reasoning_parser.py.
    ("glm45", "glm45", False, f"<think>hm</think>\nSo {GLM_CALL}", "hm", "So", 1),
    ("glm45", "glm45", True, f"hm{GLM_CALL}", "hm", "", 1),
    # vLLM: test_kimi_k2_reasoning_parser.py.
    ("kimi_k2", "kimi_k2", True, f"hm{KIMI_CALL}", "hm", "", 1),
    # vLLM: test_deepseekr1_reasoning_parser.py, test_granite_reasoning_parser.py,
    # test_seedoss_reasoning_parser.py, test_mistral_reasoning_parser.py.
    ("deepseek_r1", None, True, "a</think>b</think>c", "a", "b</think>c", 0),
    (
        "granite",
        None,
        False,
        "Here is my thought process: It rains. Here is my response: Yes",
        " It rains. ",
        " Yes",
        0,
    ),
    ("seed_oss", None, False, "<seed:think>a</seed:think>b", "a", "b", 0),
    ("mistral", None, False, "[THINK]a[/THINK]b", "a", "b", 0),
    ("mistral", None, False, "a[/THINK]b", "", "a[/THINK]b", 0),
    # vLLM: test_gemma4_reasoning_parser.py.
    ("gemma4", None, False, "<|channel>thought\nIt rains\n<channel|>Yes", "It rains", "Yes", 0),
    # vLLM: test_cohere_command_reasoning_parser.py.
    (
        "cohere_command",
        None,
        False,
        "<|START_THINKING|>a<|END_THINKING|>b",
        "a",
        "b",
        0,
    ),
    # vLLM: test_gptoss_reasoning_parser.py.
    (
        "openai_gptoss",
        None,
        False,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        "a",
        "b",
        0,
    ),
)


@pytest.mark.parametrize(
    ("name", "calls", "is_open", "text", "reasoning", "content", "num_calls"), THOUGHTS
)
def test_a_thought_is_read_as_other_projects_read_it(
    name, calls, is_open, text, reasoning, content, num_calls
):
    def make() -> AssistantParser:
        answer = None if calls is None else format_named(calls).parser(TOOLS)
        return reasoning_named(name).parser(answer, is_open=is_open)

    whole = every_cut(make, text)
    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert whole.num_ended == len(whole.calls) == num_calls
