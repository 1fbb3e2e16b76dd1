"""Formats are chosen by what tells one family's chat template from the others'.

The excerpts are made here. Each has the marks that the named models' templates have, and nothing
else of them.
"""

from __future__ import annotations

import pytest

from octavo.engine.text.assistant.formats import FORMATS, format_for
from octavo.engine.text.assistant.reasoning import REASONING_FORMATS, reasoning_for

SHOWS = "{%- if tools %}{{ tools | tojson }}{% endif %}"
CHATML = "{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}"
THINK = "{{ '<think>' + thought + '</think>' }}"
CALL = "'<tool_call>' + call + '</tool_call>'"
CODER = "<tool_call><function=f><parameter=x></parameter></function></tool_call>"
DEEPSEEK = "{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}"
DSML = "{{ '<｜DSML｜invoke name=\"' + name }}"
SEPARATED = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>"
LLAMA = '{{ \'{"name": "\' + c.name + \'", "parameters": \' }}<|eot_id|>'

# Models, excerpt, format of calls, format of thoughts.
TEMPLATES: tuple[tuple[str, str, str | None, str | None], ...] = (
    ("Qwen2.5, Hermes 3, MiMo-VL", CHATML + SHOWS + CALL, "hermes", None),
    ("Qwen3, QwQ, SmolLM3, Bielik", CHATML + SHOWS + CALL + THINK, "hermes", "qwen3"),
    ("Qwen3-Coder", CHATML + SHOWS + CODER, "qwen3_coder", None),
    ("Qwen3.5, Nemotron 3, Step 3.5", CHATML + SHOWS + CODER + THINK, "qwen3_coder", "qwen3"),
    ("Llama 3.1, 3.2, 3.3", SHOWS + LLAMA, "llama3_json", None),
    ("Llama 3.2 with Python", SHOWS + "[func_name1(a=1)]<|eot_id|>", "pythonic", None),
    ("Llama 4", SHOWS + "[func_name1(a=1)]<|header_start|><|eot|>", "pythonic", None),
    ("Gemma 3 with Python", SHOWS + "<start_of_turn>[func_name1(a=1)]", "pythonic", None),
    ("Gemma 4", SHOWS + "<|tool_call><tool_call|><|channel><channel|>", "gemma4", "gemma4"),
    ("FunctionGemma", SHOWS + "<start_function_call>call:<escape>", "functiongemma", None),
    ("Mistral 7B, Nemo", SHOWS + "[AVAILABLE_TOOLS][TOOL_CALLS][{", "mistral_json", None),
    ("Mistral Small 3.2, Devstral", SHOWS + "[TOOL_CALLS]f[ARGS]", "mistral", None),
    (
        "Ministral 3 Reasoning",
        SHOWS + "[TOOL_CALLS]f[ARGS][THINK][/THINK]",
        "mistral",
        "mistral",
    ),
    ("DeepSeek R1 distilled", DEEPSEEK + THINK + "{{ enable_thinking }}", None, "deepseek_r1"),
    (
        "DeepSeek R1-0528",
        SHOWS + DEEPSEEK + THINK + SEPARATED.format("function") + "```json",
        "deepseek_v3",
        "deepseek_r1",
    ),
    (
        "DeepSeek V3-0324",
        SHOWS + DEEPSEEK + SEPARATED.format("function") + "```json",
        "deepseek_v3",
        None,
    ),
    (
        "DeepSeek V3.1",
        SHOWS + DEEPSEEK + "{% if thinking %}</think>" + SEPARATED.format("f"),
        "deepseek_v31",
        "deepseek_v3",
    ),
    # As published: calls of the history are written, tools are not shown.
    (
        "DeepSeek V3.1",
        DEEPSEEK + "{% if thinking %}</think>" + SEPARATED.format("f"),
        None,
        "deepseek_v3",
    ),
    (
        "DeepSeek V3.2",
        SHOWS + DEEPSEEK + DSML + "<｜DSML｜function_calls>{% if thinking %}</think>",
        "deepseek_v32",
        "deepseek_v3",
    ),
    (
        "DeepSeek V4",
        SHOWS + DEEPSEEK + DSML + "<｜DSML｜tool_calls>{% if thinking %}</think>",
        "deepseek_v4",
        "deepseek_v3",
    ),
    ("Kimi K2", SHOWS + "<|tool_calls_section_begin|>", "kimi_k2", None),
    ("Kimi K2 Thinking", SHOWS + "<|tool_calls_section_begin|>" + THINK, "kimi_k2", "kimi_k2"),
    ("GLM 4.5, 4.6, 4.7, 5", SHOWS + CALL + "<arg_key></arg_key>" + THINK, "glm45", "glm45"),
    ("MiniMax M1", SHOWS + "<tool_calls></tool_calls><end_of_sentence>", "minimax", None),
    ("MiniMax M2", SHOWS + "<minimax:tool_call>" + THINK, "minimax_m2", "minimax_m2"),
    (
        "Seed-OSS",
        SHOWS + "<seed:tool_call><function=f><parameter=x></seed:think>",
        "seed_oss",
        "seed_oss",
    ),
    ("Phi-4 mini", SHOWS + "<|tool|><|/tool|><|tool_call|><|/tool_call|>", "phi4_mini_json", None),
    ("Phi-4 mini, vLLM's", SHOWS + 'functools[{"name": f}]<|end|>', "phi4_mini_json", None),
    ("Granite 3", SHOWS + "<|start_of_role|><|tool_call|>", "granite", None),
    (
        "Granite 3.2",
        SHOWS + "<|tool_call|>Here is my thought process: Here is my response:",
        "granite",
        "granite",
    ),
    (
        "Command A, R7B",
        SHOWS + "<|START_THINKING|><|START_ACTION|>",
        "cohere_command",
        "cohere_command",
    ),
    ("InternLM 2.5", SHOWS + CHATML + "<|action_start|><|plugin|>", "internlm", None),
    ("Hunyuan A13B, Apriel", SHOWS + "<tool_calls>[{</tool_calls>", "hunyuan_a13b", None),
    ("Nemotron Nano", SHOWS + "<TOOLCALL></TOOLCALL>", "nemotron_json", None),
    ("Olmo 3", SHOWS + CHATML + "<function_calls></function_calls>", "olmo3", None),
    ("LFM2", SHOWS + CHATML + "<|tool_list_start|>", "lfm2", None),
    ("LFM2.5", SHOWS + CHATML + '{{ "List of tools: [" }}', "lfm2", None),
    (
        "gpt-oss",
        SHOWS + "<|start|><|channel|>analysis<|message|><|call|>",
        "openai",
        "openai_gptoss",
    ),
    ("Apertus, GigaChat", SHOWS + "<|tools_prefix|>", "json", None),
    ("Llama 2, Phi-3, Zephyr", CHATML, None, None),
)


@pytest.mark.parametrize(("models", "template", "calls", "thoughts"), TEMPLATES)
def test_a_template_tells_its_formats(models, template, calls, thoughts):
    chosen = format_for(template, ""), reasoning_for(template, "")
    assert tuple(each and each.name for each in chosen) == (calls, thoughts)


def test_every_format_has_a_template():
    assert {calls for _, _, calls, _ in TEMPLATES} == {each.name for each in FORMATS} | {None}
    named = {thoughts for _, _, _, thoughts in TEMPLATES}
    assert named == {each.name for each in REASONING_FORMATS} | {None}


def test_a_family_tells_its_format_where_the_template_does_not():
    assert format_for(SHOWS, "lfm2_moe") is not None
    assert [format_for(SHOWS, family).name for family in ("lfm2", "lfm2_moe", "llama", "")] == [
        "lfm2",
        "lfm2",
        "json",
        "json",
    ]
