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


def test_messages_are_copied_and_keep_their_other_keys() -> None:
    message = {"role": "tool", "content": "42", "tool_call_id": "c1"}
    checked = check_messages([message])
    assert checked == [message]
    assert checked[0] is not message


def test_an_assistant_that_calls_tools_needs_no_content() -> None:
    message = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert check_messages([message])[0]["content"] is None


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
