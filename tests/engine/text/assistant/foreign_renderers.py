"""Writes calls in the ways that other projects' parsers are tested with.

Every renderer names the project and the file whose cases show that way of writing. The texts are
made here; what was taken over is which deviations from the templates models are known to make.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.engine.text.assistant.renderers import Renderer
from tests.engine.text.assistant.turns import Call

Quote = Callable[[Any], str]


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(call: Call, name: str = "name", arguments: str = "arguments", between: str = ", ") -> str:
    return f'{{"{name}": "{call.name}"{between}"{arguments}": {_dumps(call.arguments)}}}'


def hermes(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_hermes_tool_parser.py (no line breaks around the object, calls
    side by side, arguments serialized once too often, no closing at the end of the turn)."""
    made = []
    for call in calls:
        text = json.dumps(_dumps(call.arguments)) if rng.random() < 0.3 else _dumps(call.arguments)
        comma = rng.choice([",", ",\n", ", "])
        made.append(f'<tool_call>{{"name": "{call.name}"{comma}"arguments": {text}}}</tool_call>')
    text = "".join(made)
    return text.removesuffix("</tool_call>") if rng.random() < 0.3 else text


def llama3_json(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_llama3_json_tool_parser.py (separators, "arguments")."""
    key = rng.choice(["parameters", "arguments"])
    between = rng.choice(["; ", ";", ";\n", "\n", " ; "])
    return between.join(_call(call, arguments=key) for call in calls)


def plain_json(rng: random.Random, calls: Sequence[Call]) -> str:
    """SGLang: test/registered/function_call/test_function_call_parser.py (lists with "parameters"),
    and the objects that OpenAI's API returns, with the call within "function"."""
    if rng.random() < 0.5:
        return f"[{', '.join(_call(call, arguments='parameters') for call in calls)}]"
    wrapped = [f'{{"type": "function", "function": {_call(call)}}}' for call in calls]
    return "\n".join(wrapped)


def _list(call: Callable[[Call], str], calls: Sequence[Call], rng: random.Random) -> str:
    first, between, last = rng.choice(
        [("[", ", ", "]"), ("[\n  ", ",\n  ", "\n]"), ("[", ",", "]")]
    )
    return first + between.join(map(call, calls)) + last


def phi4_mini(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_phi4mini_tool_parser.py ("parameters", white space)."""
    key = rng.choice(["arguments", "parameters"])
    return "functools" + _list(lambda call: _call(call, arguments=key), calls, rng)


def granite(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_granite_tool_parser.py (two marks, white space after them)."""
    mark = rng.choice(["<|tool_call|>", "<tool_call>"])
    return mark + rng.choice(["", " ", "\n"]) + _list(_call, calls, rng)


def mistral_json(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_mistral_tool_parser.py (arguments before the name)."""

    def written(call: Call) -> str:
        if rng.random() < 0.5:
            return _call(call)
        return f'{{"arguments": {_dumps(call.arguments)}, "name": "{call.name}"}}'

    return "[TOOL_CALLS]" + rng.choice(["", " "]) + _list(written, calls, rng)


def nemotron_json(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_nemotron_json_tool_parser.py."""
    space = rng.choice(["", " ", "\n"])
    return f"<TOOLCALL>{space}{_list(_call, calls, rng)}{space}</TOOLCALL>"


def hunyuan(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_hunyuan_a13b_tool_parser.py (line breaks, spaces)."""
    return f"<tool_calls>\n{_list(_call, calls, rng)}\n</tool_calls>"


def cohere(rng: random.Random, calls: Sequence[Call]) -> str:
    """llama.cpp: models/templates/CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja (ids)."""
    made = [
        f'{{"tool_call_id": "{index}", "tool_name": "{call.name}", '
        f'"parameters": {_dumps(call.arguments)}}}'
        for index, call in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(made) + "\n]<|END_ACTION|>"


def minimax(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_minimax_tool_parser.py (a line each, or none)."""
    line = rng.choice(["\n", ""])
    return f"<tool_calls>{line}{line.join(map(_call, calls))}{line}</tool_calls>"


def internlm(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_internlm2_tool_parser.py and
    examples/tool_chat_template_internlm2_tool.jinja ("arguments", no line break at the end)."""
    return "".join(f"<|action_start|><|plugin|>\n{_call(call)}<|action_end|>" for call in calls)


def deepseek_v3(rng: random.Random, calls: Sequence[Call]) -> str:
    """SGLang: test/registered/function_call/test_function_call_parser.py (line breaks around)."""
    line = rng.choice(["\n", ""])
    made = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
        f"{json.dumps(call.arguments, indent=rng.choice([None, 4]))}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{line}{made}{line}<｜tool▁calls▁end｜>"


def deepseek_v31(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_deepseekv31_tool_parser.py (no end of the section)."""
    made = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{json.dumps(call.arguments)}"
        "<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{made}" + rng.choice(["<｜tool▁calls▁end｜>", ""])


def dsml(section: str) -> Renderer:
    """SGLang: test/registered/function_call/test_deepseekv32_detector.py (JSON within a tag)."""

    def render(rng: random.Random, calls: Sequence[Call]) -> str:
        made = "".join(
            f'<｜DSML｜invoke name="{call.name}">\n{_dumps(call.arguments)}\n</｜DSML｜invoke>\n'
            for call in calls
        )
        return f"<｜DSML｜{section}>\n{made}</｜DSML｜{section}>"

    return render


def kimi_k2(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_kimi_k2_tool_parser.py (no prefix, white space)."""
    prefix = rng.choice(["functions.", ""])
    made = "".join(
        f"<|tool_call_begin|>{prefix}{call.name}:{index + 7} <|tool_call_argument_begin|>"
        f"{json.dumps(call.arguments, indent=2)} <|tool_call_end|>"
        for index, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{made}<|tool_calls_section_end|>"


def mistral(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_mistral_tool_parser.py (name and arguments side by side)."""
    space = rng.choice(["", " "])
    return "".join(f"[TOOL_CALLS]{call.name}{space}{_dumps(call.arguments)}" for call in calls)


def qwen3_coder(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_qwen3coder_tool_parser.py (values that are not closed, calls
    without the outer tag), and SGLang: test_qwen3_coder_detector (values on the tags' line)."""
    is_bare = len(calls) == 1 and rng.random() < 0.3
    outer = ("", "") if is_bare else ("<tool_call>\n", "\n</tool_call>")
    return "\n".join(outer[0] + _function(rng, call) + outer[1] for call in calls)


def seed_oss(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_seed_oss_tool_parser.py (with what Qwen's are known for)."""
    return "\n".join(
        f"<seed:tool_call>\n{_function(rng, call)}\n</seed:tool_call>" for call in calls
    )


def _function(rng: random.Random, call: Call) -> str:
    """A call whose values stand on a line, on lines of their own, or lack their closing."""
    parts = []
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else _dumps(value)
        can_stay_open = bool(text) and not text.startswith("\n")
        if rng.random() < 0.3 and can_stay_open:
            parts.append(f"<parameter={key}>\n{text}\n")
        elif rng.random() < 0.5 and can_stay_open and not text.endswith("\n"):
            parts.append(f"<parameter={key}>{text}</parameter>\n")
        else:
            parts.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return f"<function={call.name}>\n{''.join(parts)}</function>"


def minimax_m2(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_minimax_m2_tool_parser.py (no line breaks, many calls)."""
    line = rng.choice(["", "\n", "\n  "])
    made = "".join(
        f'{line}<invoke name="{call.name}">'
        + "".join(
            f'{line}<parameter name="{key}">'
            f"{value if isinstance(value, str) else _dumps(value)}</parameter>"
            for key, value in call.arguments.items()
        )
        + f"{line}</invoke>"
        for call in calls
    )
    return f"<minimax:tool_call>{made}{line}</minimax:tool_call>"


def glm45(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: tests/tool_parsers/test_glm4_moe_tool_parser.py (parts are indented)."""
    line = "\n    "
    return line.join(
        f"<tool_call>{call.name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>"
            f"{value if isinstance(value, str) else _dumps(value)}</arg_value>{line}"
            for key, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def _python(call: Call, quote: Quote, comma: str = ", ") -> str:
    return f"{call.name}({comma.join(f'{k}={quote(v)}' for k, v in call.arguments.items())})"


def pythonic(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: examples/tool_chat_template_gemma3_pythonic.jinja (values in JSON), and
    tests/tool_parsers/test_pythonic_tool_parser.py (a call a line, commas at the end)."""
    quote = rng.choice([_dumps, repr])
    first, between, last = rng.choice([("[", ", ", "]"), ("[\n", ",\n", "\n]"), ("[", ",", "]")])
    return first + between.join(_python(call, quote) for call in calls) + last


def olmo3(rng: random.Random, calls: Sequence[Call]) -> str:
    """vLLM: examples/tool_chat_template_olmo3.jinja (line breaks around, JSON's own words)."""
    quote = rng.choice([_dumps, repr])
    lines = "\n".join(_python(call, quote) for call in calls)
    return f"<function_calls>\n{lines}\n</function_calls>"


def lfm2(rng: random.Random, calls: Sequence[Call]) -> str:
    """SGLang: test/registered/function_call/test_function_call_parser.py (JSON in the marks)."""
    if rng.random() < 0.5:
        return f"<|tool_call_start|>{_list(_call, calls, rng)}<|tool_call_end|>"
    made = ", ".join(_python(call, _dumps) for call in calls)
    return f"<|tool_call_start|>[{made}]<|tool_call_end|>"


def gemma(opening: str, quote: str, closing: str) -> Renderer:
    """vLLM: tests/tool_parsers/test_gemma4_tool_parser.py and test_functiongemma_tool_parser.py
    (quoted keys of inner objects, white space, no closing)."""

    def written(rng: random.Random, value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            inner = ",".join(
                f"{quote}{key}{quote}:{written(rng, value[key])}"
                if rng.random() < 0.5
                else f"{key}:{written(rng, value[key])}"
                for key in value
            )
            return f"{{{inner}}}"
        if isinstance(value, list):
            return f"[{', '.join(written(rng, each) for each in value)}]"
        return json.dumps(value)

    def render(rng: random.Random, calls: Sequence[Call]) -> str:
        made = []
        for call in calls:
            inner = ", ".join(f"{k}: {written(rng, v)}" for k, v in call.arguments.items())
            made.append(f"{opening}call:{call.name}{{{inner}}}")
        text = closing.join(made)
        return text + rng.choice([closing, ""])

    return render


def openai(rng: random.Random, calls: Sequence[Call]) -> str:
    """xgrammar: python/xgrammar/builtin_structural_tag.py (three headers), and vLLM:
    tests/tool_parsers/test_openai_tool_parser.py (a thought before)."""
    made = []
    for call in calls:
        header = rng.choice(
            [
                f"<|channel|>commentary to=functions.{call.name}<|constrain|>json",
                f" to=functions.{call.name}<|channel|>commentary <|constrain|>json",
                f" to=functions.{call.name}<|channel|>commentary json",
                f"<|channel|>commentary to=functions.{call.name} code",
            ]
        )
        made.append(f"{header}<|message|>{_dumps(call.arguments)}<|call|>")
    return "<|start|>assistant".join(made)


FOREIGN_RENDERERS: dict[str, Renderer] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "json": plain_json,
    "phi4_mini_json": phi4_mini,
    "granite": granite,
    "mistral_json": mistral_json,
    "nemotron_json": nemotron_json,
    "hunyuan_a13b": hunyuan,
    "cohere_command": cohere,
    "minimax": minimax,
    "internlm": internlm,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "kimi_k2": kimi_k2,
    "mistral": mistral,
    "qwen3_coder": qwen3_coder,
    "seed_oss": seed_oss,
    "minimax_m2": minimax_m2,
    "glm45": glm45,
    "pythonic": pythonic,
    "olmo3": olmo3,
    "lfm2": lfm2,
    "gemma4": gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "functiongemma": gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "openai": openai,
}
