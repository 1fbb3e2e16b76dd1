from __future__ import annotations

import datetime
from typing import Any

import pytest

from octavo.engine.errors import InvalidRequestError, ModelLoadError
from octavo.engine.text.chat_template import ChatTemplate, check_messages

HI = [{"role": "user", "content": "hi"}]


def _render(source: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


def test_templates_see_messages_named_tokens_and_variables() -> None:
    source = "{{ bos_token }}{{ messages[0].role }}:{{ messages[0]['content'] }}{{ extra }}"
    assert _render(source, extra="!") == "<s>user:hi!"


def test_tools_and_documents_are_none_unless_given() -> None:
    source = "{{ tools is none }} {{ documents is none }}"
    assert _render(source) == "True True"
    assert _render(source, tools=[{}]) == "False True"


def test_the_generation_prompt_can_be_left_out() -> None:
    source = "x{% if add_generation_prompt %}>{% endif %}"
    assert _render(source) == "x>"
    assert _render(source, add_generation_prompt=False) == "x"


def test_blocks_leave_no_blank_lines_and_loops_can_be_left() -> None:
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n{% break %}\n{% endif %}\n"
        "a\n{% endfor %}\n"
    )
    assert _render(source, HI * 3) == "a\n"


def test_json_is_written_without_html_escapes() -> None:
    assert _render("{{ x | tojson }}", x={"k": "<é>'"}) == '{"k": "<é>\'"}'
    assert _render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_the_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime.datetime(2024, 7, 26)
    )
    assert template.render(HI) == "26 Jul 2024"


def test_generation_blocks_are_transparent() -> None:
    assert _render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_messages_are_copied_and_keep_their_other_keys_but_those_that_are_null() -> None:
    message = {"role": "user", "content": "42", "name": "Ann"}
    checked = check_messages([message | {"audio": None}])
    assert checked == [message]
    assert checked[0] is not message


def call(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}, **more}


def test_an_assistant_that_calls_tools_needs_no_content() -> None:
    message = {"role": "assistant", "tool_calls": [call()]}
    assert check_messages([message])[0]["content"] is None


def test_an_empty_list_of_calls_is_none() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": []}
    assert check_messages([message]) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize("arguments", ['{"x": ["ä", 1]}', {"x": ["ä", 1]}])
@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
        "{{ '' + messages[0].tool_calls[0].function.arguments }}",
        "{{ messages[0].content + messages[0].tool_calls[0].function.arguments }}",
        "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}"
        '{"{{ k }}": {{ v | tojson }}}{% endfor %}',
    ],
    ids=["as JSON", "as text", "with content", "one by one"],
)
def test_arguments_of_calls_are_an_object_or_text_as_the_template_takes_them(
    source: str, arguments: Any
) -> None:
    message = {"role": "assistant", "tool_calls": [call(arguments)]}
    assert _render(source, [message]) == '{"x": ["ä", 1]}'


def test_results_need_no_ids_where_calls_have_none() -> None:
    result = {"role": "tool", "content": "42"}
    asked = {"role": "assistant", "tool_calls": [call(), call()]}
    assert check_messages([asked, result, result])[1:] == [result, result]


def test_a_thought_has_both_of_its_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        source = "{{ messages[0].reasoning }}{{ messages[0].reasoning_content }}"
        message = {"role": "assistant", "content": "x", name: "hm"}
        assert _render(source, [message]) == "hmhm"


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_an_assistant_that_said_nothing_needs_no_content(content: dict[str, Any]) -> None:
    """As in the answer to a turn that ended within its thought."""
    template = "{{ messages[1].reasoning }}|{{ messages[1].content }}"
    turn = {"role": "assistant", "reasoning_content": "Well", **content}
    assert _render(template, [*HI, turn]) == "Well|"


def test_a_template_that_knows_of_no_tools_is_given_none() -> None:
    with pytest.raises(InvalidRequestError, match="knows of no tools") as error:
        _render("{{ messages[0].content }}", tools=[{}])
    assert error.value.field == "tools"
    assert _render("{{ messages[0].content }}", tools=[]) == "hi"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        (None, "messages"),
        ([], "messages"),
        (["hi"], r"messages\[0\]"),
        ([*HI, {"content": "x"}], r"messages\[1\]\.role"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            r"messages\[0\]\.content\[0\]",
        ),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} = "):
        _render("", messages)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_an_invalid_request(
    source: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as error:
        _render(source)
    assert error.value.field == "messages"


def test_a_template_that_does_not_parse_is_a_bad_model() -> None:
    with pytest.raises(ModelLoadError, match="does not parse"):
        ChatTemplate("{% if %}", {})
