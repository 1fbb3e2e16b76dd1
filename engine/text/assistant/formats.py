"""The formats of calls that are known."""

from __future__ import annotations

import re
from collections.abc import Callable

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.assistant.gemma_calls import GemmaCalls
from octavo.engine.text.assistant.harmony import Harmony
from octavo.engine.text.assistant.json_calls import JsonCalls
from octavo.engine.text.assistant.named_calls import (
    NamedCalls,
    read_deepseek,
    read_kimi,
    read_mistral,
)
from octavo.engine.text.assistant.pythonic_calls import PythonicCalls
from octavo.engine.text.assistant.tool_format import ToolFormat
from octavo.engine.text.assistant.xml_calls import Tags, XmlCalls

AUTO = "auto"
FIELD = "tool_call_parser"


def _has(*signs: str, unless: tuple[str, ...] = ()) -> Callable[[str, str], bool]:
    """Tells templates that contain all of some texts and none of others."""
    return lambda template, _: (
        all(sign in template for sign in signs) and not any(sign in template for sign in unless)
    )


def _has_any(*signs: str, families: str = "") -> Callable[[str, str], bool]:
    """Tells templates that contain one of some texts, and models of some families."""
    return lambda template, model_type: (
        any(sign in template for sign in signs)
        or bool(families and model_type.startswith(families))
    )


LIST = ("[", ", ", "]")
_QWEN_TAGS = Tags(
    call="<function=",
    named=">",
    key="<parameter=",
    value=">",
    value_end="</parameter>",
    call_end="</function>",
    is_padded=True,
)
_DSML_TAGS = Tags(
    call='<｜DSML｜invoke name="',
    named='">',
    key='<｜DSML｜parameter name="',
    value="",
    value_end="</｜DSML｜parameter>",
    call_end="</｜DSML｜invoke>",
    nothing="\n",
    types={'" string="true">': True, '" string="false">': False},
)

FORMATS: tuple[ToolFormat, ...] = (
    Harmony(name="openai", fits=_has("<|channel|>", "<|message|>")),
    GemmaCalls(
        name="gemma4",
        opening="<|tool_call>",
        closing="<tool_call|>",
        quote='<|"|>',
        fits=_has("<|tool_call>", "<tool_call|>"),
    ),
    GemmaCalls(
        name="functiongemma",
        opening="<start_function_call>",
        closing="<end_function_call>",
        quote="<escape>",
        fits=_has("<start_function_call>"),
    ),
    PythonicCalls(
        name="lfm2",
        opening="<|tool_call_start|>",
        closing="<|tool_call_end|>",
        # The templates show how tools are listed, and leave the calls to what the model learned.
        fits=_has_any(
            "<|tool_call_start|>", "<|tool_list_start|>", '"List of tools: [', families="lfm2"
        ),
    ),
    PythonicCalls(
        name="olmo3",
        opening="<function_calls>",
        closing="</function_calls>",
        inside=("", "\n", ""),
        fits=_has("<function_calls>"),
    ),
    XmlCalls(
        name="deepseek_v32",
        section="<｜DSML｜function_calls>",
        section_end="</｜DSML｜function_calls>",
        tags=_DSML_TAGS,
        more_markers=("｜DSML｜",),
        has_many=True,
        fits=_has("｜DSML｜", unless=("tool_calls>",)),
    ),
    XmlCalls(
        name="deepseek_v4",
        section="<｜DSML｜tool_calls>",
        section_end="</｜DSML｜tool_calls>",
        tags=_DSML_TAGS,
        more_markers=("｜DSML｜",),
        has_many=True,
        fits=_has("｜DSML｜"),
    ),
    NamedCalls(
        name="deepseek_v3",
        section="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>",
        before_name="function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        after_arguments="\n```",
        call_end="<｜tool▁call▁end｜>",
        between="\n",
        more_markers=("<｜tool▁sep｜>",),
        read=read_deepseek,
        fits=_has("<｜tool▁calls▁begin｜>", "```json"),
    ),
    NamedCalls(
        name="deepseek_v31",
        section="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>",
        before_arguments="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        more_markers=("<｜tool▁sep｜>",),
        read=read_deepseek,
        fits=_has("<｜tool▁calls▁begin｜>"),
    ),
    NamedCalls(
        name="kimi_k2",
        section="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>",
        before_name="functions.",
        before_arguments="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        is_counted=True,
        more_markers=("<|tool_call_argument_begin|>",),
        read=read_kimi,
        fits=_has("<|tool_calls_section_begin|>"),
    ),
    NamedCalls(
        name="mistral",
        call="[TOOL_CALLS]",
        before_arguments="[ARGS]",
        more_markers=("[ARGS]", "[CALL_ID]"),
        read=read_mistral,
        fits=_has("[TOOL_CALLS]", "[ARGS]"),
    ),
    JsonCalls(
        name="mistral_json",
        opening="[TOOL_CALLS]",
        space=" ",
        inside=LIST,
        fits=_has("[TOOL_CALLS]"),
    ),
    XmlCalls(
        name="glm45",
        section="<tool_call>",
        section_end="</tool_call>",
        tags=Tags(
            call="",
            named="",
            key="<arg_key>",
            value="</arg_key>\n<arg_value>",
            value_end="</arg_value>",
            call_end="",
        ),
        more_markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        fits=_has("<arg_key>"),
    ),
    XmlCalls(
        name="minimax_m2",
        section="<minimax:tool_call>",
        section_end="</minimax:tool_call>",
        tags=Tags(
            call='<invoke name="',
            named='">',
            key='<parameter name="',
            value='">',
            value_end="</parameter>",
            call_end="</invoke>",
        ),
        has_many=True,
        fits=_has("<minimax:tool_call>"),
    ),
    XmlCalls(
        name="seed_oss",
        section="<seed:tool_call>",
        section_end="</seed:tool_call>",
        tags=_QWEN_TAGS,
        fits=_has("<seed:tool_call>"),
    ),
    XmlCalls(
        name="qwen3_coder",
        section="<tool_call>",
        section_end="</tool_call>",
        tags=_QWEN_TAGS,
        other_openings=("<function=",),
        fits=_has("<function=", "<parameter="),
    ),
    JsonCalls(
        name="minimax",
        opening="<tool_calls>",
        closing="</tool_calls>",
        space="\n",
        inside=("", "\n", ""),
        fits=_has("<tool_calls>", "<end_of_sentence>"),
    ),
    JsonCalls(
        name="hunyuan_a13b",
        opening="<tool_calls>",
        closing="</tool_calls>",
        inside=LIST,
        fits=_has("<tool_calls>"),
    ),
    JsonCalls(
        name="phi4_mini_json",
        opening="<|tool_call|>",
        other_openings=("functools[",),
        closing="<|/tool_call|>",
        inside=LIST,
        fits=_has_any("<|/tool_call|>", "functools["),
    ),
    JsonCalls(
        name="granite",
        opening="<|tool_call|>",
        other_openings=("<tool_call>",),
        inside=LIST,
        fits=_has("<|tool_call|>"),
    ),
    JsonCalls(
        name="nemotron_json",
        opening="<TOOLCALL>",
        closing="</TOOLCALL>",
        inside=LIST,
        fits=_has("<TOOLCALL>"),
    ),
    JsonCalls(
        name="internlm",
        opening="<|action_start|><|plugin|>",
        closing="<|action_end|>",
        arguments_key="parameters",
        space="\n",
        fits=_has("<|action_start|>"),
    ),
    JsonCalls(
        name="cohere_command",
        opening="<|START_ACTION|>",
        closing="<|END_ACTION|>",
        name_key="tool_name",
        arguments_key="parameters",
        inside=LIST,
        fits=_has("<|START_ACTION|>"),
    ),
    JsonCalls(
        name="hermes",
        opening="<tool_call>",
        closing="</tool_call>",
        space="\n",
        fits=_has("<tool_call>"),
    ),
    PythonicCalls(
        name="pythonic",
        others=(("<|python_start|>", "<|python_end|>"), ("```tool_code", "```")),
        fits=_has("[func_name1("),
    ),
    JsonCalls(
        name="llama3_json",
        opening='{"name": ',
        other_openings=("<|python_tag|>",),
        arguments_key="parameters",
        closing=";",
        separator="; ",
        needs_known_name=True,
        fits=_has('"parameters": ', "<|eot_id|>"),
    ),
    # For templates that show tools to a model, but no way of calling them that is known here: a
    # bare object, as OpenAI's API has it, is what models write that were told no more.
    JsonCalls(
        name="json",
        opening='{"name": ',
        needs_known_name=True,
        fits=lambda template, _: knows_tools(template),
    ),
)
"""In the order in which they are tried on a template."""


def format_named(name: str) -> ToolFormat:
    """The format of a name.

    Raises:
        InvalidRequestError: there is none.
    """
    for each in FORMATS:
        if each.name == name:
            return each
    raise InvalidRequestError(FIELD, name, f"{AUTO} or one of {', '.join(format_names())}")


def format_names() -> list[str]:
    """The names of all formats."""
    return sorted(each.name for each in FORMATS)


def format_for(template: str, model_type: str) -> ToolFormat | None:
    """The format that a model was trained on, by its template and family.

    Args:
        template: Jinja source of the chat template.
        model_type: of the model's config; "" if it is not known.

    Returns:
        the format; None if the template shows no tools to the model.
    """
    if not knows_tools(template):
        return None
    return next((each for each in FORMATS if each.fits(template, model_type)), None)


def knows_tools(template: str) -> bool:
    """Whether a chat template makes use of tools."""
    return _TOOLS.search(template) is not None


_TOOLS = re.compile(r"\{[{%](?:(?![%}]\}).)*\btools\b", re.DOTALL)
