"""Chat templates: Jinja programs that come with a model, run in a sandbox."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.engine.errors import InvalidRequestError, ModelLoadError
from octavo.engine.text.assistant.formats import knows_tools
from octavo.engine.text.assistant.history import CallHistory, with_text_arguments
from octavo.engine.text.final_message import before_mark, with_mark

_MESSAGES_ALLOWED = 'a list of {"role": string, "content": string or list of text parts}'
_REASONING_NAMES = (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning"))
"""Of a message's thought: clients and templates use either."""
_CONTENT_ALLOWED = 'a string, or a list of {"type": "text", "text": string}'


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text, with the names that Hugging Face templates expect.
        named_tokens: "bos_token", "eos_token", … -> text; visible to the template.
        now: today, for templates that state the date.

    Raises:
        ModelLoadError: the source is not a template.
    """

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self._named_tokens = dict(named_tokens)
        self._knows_tools = knows_tools(source)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # one that is nested too deep fails in the compiler
            raise ModelLoadError(f"the chat template does not parse: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: role and content each; a content's text parts are joined by newlines, and
                the arguments of `tool_calls` that are JSON text become objects.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end within the last message, which the answer goes on with;
                only without `add_generation_prompt`.
            variables: further names for the template; `tools` and `documents` are None if absent.

        Raises:
            InvalidRequestError: malformed messages, or the template refuses them or fails, or there
                are tools and it knows of none.
        """
        if continue_final_message:
            if add_generation_prompt:
                allowed = "false together with continue_final_message"
                raise InvalidRequestError("add_generation_prompt", True, allowed)
            text = self.render(with_mark(messages), add_generation_prompt=False, **variables)
            return before_mark(text)
        if variables.get("tools") and not self._knows_tools:
            given = f"{len(variables['tools'])} tools"
            allowed = "not given: the model's chat template knows of no tools"
            raise InvalidRequestError("tools", given, allowed)
        conversation = check_messages(messages)
        names: dict[str, Any] = {"tools": None, "documents": None, **self._named_tokens}
        names.update(variables)
        names.update(add_generation_prompt=add_generation_prompt)
        try:
            return self._render(names, conversation)
        except Exception as error:  # a template can fail in any way that an expression can
            raise InvalidRequestError(
                "messages",
                messages,
                f"what the model's chat template accepts ({error or type(error).__name__})",
            ) from error

    def _render(self, names: Mapping[str, Any], conversation: list[dict[str, Any]]) -> str:
        """The text. Templates differ in what they take calls for, so several forms are tried."""
        forms = [conversation]
        if any(message.get("tool_calls") for message in conversation):
            # Some ask whether a message that calls tools has no content, and others join its
            # content to other words; some write arguments as JSON, and others join their text.
            with_text = [with_text_arguments(message) for message in conversation]
            forms += [_with_content(conversation), with_text, _with_content(with_text)]
        for form in forms[:-1]:
            with contextlib.suppress(TypeError):
                return self._template.render({**names, "messages": form})
        return self._template.render({**names, "messages": forms[-1]})


def template_of_request(source: str, named_tokens: Mapping[str, str]) -> ChatTemplate:
    """A template that a request brings.

    Raises:
        InvalidRequestError: the source is not a template.
    """
    try:
        return ChatTemplate(source, named_tokens)
    except ModelLoadError as error:
        allowed = f"a chat template in Jinja's language ({error.__cause__})"
        raise InvalidRequestError("chat_template", source, allowed) from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with every content one string, and arguments of calls as objects.

    Keys besides `role` and `content` are kept unless they are null. `content` may be None or absent
    in a message of the assistant's, which may have calls or a thought alone.

    Raises:
        InvalidRequestError: names the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", messages, _MESSAGES_ALLOWED)
    if not messages:
        raise InvalidRequestError("messages", messages, "at least one message")
    history = CallHistory()
    return [
        _check_message(f"messages[{index}]", item, history) for index, item in enumerate(messages)
    ]


def _check_message(field: str, message: object, history: CallHistory) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(field, message, 'an object with "role" and "content"')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{field}.role", role, "a string that is not empty")
    checked = {key: value for key, value in message.items() if value is not None}
    history.check(field, checked)
    for name, other in _REASONING_NAMES:
        if name in checked:
            checked.setdefault(other, checked[name])
    content = message.get("content")
    if content is None and checked.get("tool_calls"):
        checked["content"] = None
    elif content is None and role == "assistant":
        checked["content"] = ""
    else:
        checked["content"] = _content_text(f"{field}.content", content)
    return checked


def _with_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": message["content"] or ""} for message in messages]


def _content_text(field: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise InvalidRequestError(field, content, _CONTENT_ALLOWED)
    texts = []
    for index, part in enumerate(content):
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        )
        if not isinstance(text, str):
            raise InvalidRequestError(f"{field}[{index}]", part, '{"type": "text", "text": string}')
        texts.append(text)
    return "\n".join(texts)


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; no effect here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
