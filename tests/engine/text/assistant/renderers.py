"""Writes calls as each family's own chat template renders them, by the templates alone.

Every renderer names the template or document that it follows. None shares a line with the parsers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.engine.text.assistant.turns import Call

Renderer = Callable[[random.Random, Sequence[Call]], str]


def as_json(rng: random.Random, value: Any) -> str:
    """JSON as transformers' `tojson` writes it, or as models do that were given another form."""
    style: dict[str, Any] = rng.choice(
        [{"ensure_ascii": False}, {"separators": (",", ":")}, {"indent": 2}, {}]
    )
    return json.dumps(value, **style)


def _object(rng: random.Random, call: Call, key: str = "arguments", name: str = "name") -> str:
    return f'{{"{name}": {json.dumps(call.name)}, "{key}": {as_json(rng, call.arguments)}}}'


def hermes(rng: random.Random, calls: Sequence[Call]) -> str:
    """Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B: tokenizer_config.json."""
    return "\n".join(f"<tool_call>\n{_object(rng, call)}\n</tool_call>" for call in calls)


def llama3_json(rng: random.Random, calls: Sequence[Call]) -> str:
    """meta-llama/Llama-3.1-8B-Instruct: tokenizer_config.json, and for several calls vLLM's
    documentation of its Llama parser, which separates them by semicolons."""
    tag = rng.choice(["", "<|python_tag|>"])
    return tag + "; ".join(_object(rng, call, "parameters") for call in calls)


def plain_json(rng: random.Random, calls: Sequence[Call]) -> str:
    """OpenAI's `function` object, one a line or in a list."""
    objects = [_object(rng, call) for call in calls]
    return rng.choice(["\n".join(objects), f"[{', '.join(objects)}]"])


def listed(opening: str, closing: str, key: str = "arguments", name: str = "name") -> Renderer:
    """A list of objects between two marks."""

    def render(rng: random.Random, calls: Sequence[Call]) -> str:
        objects = (_object(rng, call, key, name) for call in calls)
        return f"{opening}[{', '.join(objects)}]{closing}"

    return render


def phi4_mini(rng: random.Random, calls: Sequence[Call]) -> str:
    """microsoft/Phi-4-mini-instruct: its special tokens, and tool_chat_template_phi4_mini.jinja of
    vLLM."""
    marks = rng.choice([("<|tool_call|>", "<|/tool_call|>"), ("functools", "")])
    return listed(*marks)(rng, calls)


def minimax(rng: random.Random, calls: Sequence[Call]) -> str:
    """MiniMaxAI/MiniMax-M1-80k: chat_template.jinja."""
    lines = "\n".join(_object(rng, call) for call in calls)
    return f"<tool_calls>\n{lines}\n</tool_calls>"


def internlm(rng: random.Random, calls: Sequence[Call]) -> str:
    """internlm/internlm2_5-7b-chat: tool_chat_template_internlm2_tool.jinja of vLLM."""
    return "\n".join(
        f"<|action_start|><|plugin|>\n{_object(rng, call, 'parameters')}\n<|action_end|>"
        for call in calls
    )


def deepseek_v3(rng: random.Random, calls: Sequence[Call]) -> str:
    """deepseek-ai/DeepSeek-V3-0324 and DeepSeek-R1-0528: tokenizer_config.json."""
    made = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
        f"{as_json(rng, call.arguments)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


def deepseek_v31(rng: random.Random, calls: Sequence[Call]) -> str:
    """deepseek-ai/DeepSeek-V3.1: chat_template.jinja."""
    made = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{as_json(rng, call.arguments)}"
        "<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


def kimi_k2(rng: random.Random, calls: Sequence[Call]) -> str:
    """moonshotai/Kimi-K2-Instruct: docs/tool_call_guidance.md."""
    space = rng.choice(["", " "])
    made = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{index}{space}<|tool_call_argument_begin|>"
        f"{as_json(rng, call.arguments)}{space}<|tool_call_end|>"
        for index, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{made}<|tool_calls_section_end|>"


def mistral(rng: random.Random, calls: Sequence[Call]) -> str:
    """mistralai/Mistral-Small-3.2 and Magistral (`[ARGS]`, with and without `[CALL_ID]`):
    mistral-common's tokenizers v11 and v13."""
    middle = rng.choice(["[ARGS]", "[CALL_ID]a1b2c3d4e[ARGS]", ""])
    return "".join(
        f"[TOOL_CALLS]{call.name}{middle}{as_json(rng, call.arguments)}" for call in calls
    )


def _xml_text(rng: random.Random, value: Any) -> str:
    """A value through `tojson` if it is no string; older templates take `args_value | string`."""
    if isinstance(value, str):
        return value
    written = json.dumps(value, ensure_ascii=False)
    return written if isinstance(value, dict | list) else rng.choice([written, str(value)])


def qwen3_coder(rng: random.Random, calls: Sequence[Call]) -> str:
    """Qwen/Qwen3-Coder-30B-A3B-Instruct: chat_template.jinja."""
    return "\n".join(f"<tool_call>\n{_qwen_function(rng, call)}\n</tool_call>" for call in calls)


def seed_oss(rng: random.Random, calls: Sequence[Call]) -> str:
    """ByteDance-Seed/Seed-OSS-36B-Instruct: chat_template.jinja."""
    return "\n".join(
        f"<seed:tool_call>\n{_qwen_function(rng, call)}\n</seed:tool_call>" for call in calls
    )


def _qwen_function(rng: random.Random, call: Call) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{_xml_text(rng, value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"<function={call.name}>\n{parameters}</function>"


def minimax_m2(rng: random.Random, calls: Sequence[Call]) -> str:
    """MiniMaxAI/MiniMax-M2: docs/tool_calling_guide.md."""
    made = "".join(
        f'<invoke name="{call.name}">\n'
        + "".join(
            f'<parameter name="{key}">{_json_or_text(value)}</parameter>\n'
            for key, value in call.arguments.items()
        )
        + "</invoke>\n"
        for call in calls
    )
    return f"<minimax:tool_call>\n{made}</minimax:tool_call>"


def glm45(rng: random.Random, calls: Sequence[Call]) -> str:
    """zai-org/GLM-4.5 (a part a line) and GLM-4.7 (none): chat_template.jinja."""
    line = rng.choice(["\n", ""])
    return "\n".join(
        f"<tool_call>{call.name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_json_or_text(value)}</arg_value>{line}"
            for key, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def _json_or_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dsml(section: str) -> Renderer:
    """deepseek-ai/DeepSeek-V3.2: encoding/encoding_dsv32.py; V4 differs in the section's name."""

    def render(rng: random.Random, calls: Sequence[Call]) -> str:
        made = "\n".join(
            f'<｜DSML｜invoke name="{call.name}">\n'
            + "\n".join(
                f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
                f"{_json_or_text(value)}</｜DSML｜parameter>"
                for key, value in call.arguments.items()
            )
            + "\n</｜DSML｜invoke>"
            for call in calls
        )
        return f"<｜DSML｜{section}>\n{made}\n</｜DSML｜{section}>"

    return render


def _python(call: Call) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"


def pythonic(rng: random.Random, calls: Sequence[Call]) -> str:
    """meta-llama/Llama-3.2-3B-Instruct and Llama-4: text_prompt_format.md of llama-models."""
    made = f"[{', '.join(map(_python, calls))}]"
    return f"<|python_start|>{made}<|python_end|>" if rng.random() < 0.3 else made


def olmo3(rng: random.Random, calls: Sequence[Call]) -> str:
    """allenai/Olmo-3-7B-Instruct: tool_chat_template_olmo3.jinja of vLLM."""
    lines = "\n".join(map(_python, calls))
    return f"<function_calls>{lines}</function_calls>"


def lfm2(rng: random.Random, calls: Sequence[Call]) -> str:
    """LiquidAI/LFM2-1.2B: its model card, "Tool use"."""
    return f"<|tool_call_start|>[{', '.join(map(_python, calls))}]<|tool_call_end|>"


def gemma(opening: str, quote: str, closing: str) -> Renderer:
    """google/functiongemma-270m-it and google/gemma-4: chat_template.jinja (`format_argument`)."""

    def written(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            inner = ",".join(f"{key}:{written(value[key])}" for key in value)
            return f"{{{inner}}}"
        if isinstance(value, list):
            return f"[{','.join(map(written, value))}]"
        return json.dumps(value)

    def render(rng: random.Random, calls: Sequence[Call]) -> str:
        return "".join(
            f"{opening}call:{call.name}{written(call.arguments)}{closing}" for call in calls
        )

    return render


def openai(rng: random.Random, calls: Sequence[Call]) -> str:
    """openai/gpt-oss: the harmony response format's documentation."""
    made = []
    for call in calls:
        body = f"<|message|>{as_json(rng, call.arguments)}<|call|>"
        made.append(
            rng.choice(
                [
                    f"<|channel|>commentary to=functions.{call.name} <|constrain|>json{body}",
                    f" to=functions.{call.name}<|channel|>commentary <|constrain|>json{body}",
                    f"<|channel|>commentary to=functions.{call.name}{body}",
                ]
            )
        )
    return "<|start|>assistant".join(made)


RENDERERS: dict[str, Renderer] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "json": plain_json,
    "phi4_mini_json": phi4_mini,
    # ibm-granite/granite-3.1-8b-instruct: tokenizer_config.json
    "granite": listed("<|tool_call|>", ""),
    # mistralai/Mistral-7B-Instruct-v0.3: tokenizer_config.json
    "mistral_json": listed("[TOOL_CALLS] ", ""),
    # nvidia/Llama-3.1-Nemotron-Nano: tool_chat_template_nemotron_json.jinja of vLLM
    "nemotron_json": listed("<TOOLCALL>", "</TOOLCALL>"),
    # tencent/Hunyuan-A13B-Instruct: tool_chat_template_hunyuan_a13b.jinja of vLLM
    "hunyuan_a13b": listed("<tool_calls>", "</tool_calls>"),
    # CohereLabs/c4ai-command-a-03-2025: its model card, "Tool use"
    "cohere_command": listed("<|START_ACTION|>", "<|END_ACTION|>", "parameters", "tool_name"),
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
