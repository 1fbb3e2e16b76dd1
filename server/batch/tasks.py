"""Lines of requests: OpenAI's batch format, and plain objects.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
{"custom_id": "b", "prompt": "Once", "max_tokens": 8}     or prompt_token_ids, or messages
"just a prompt"

An engine that only embeds takes plain lines for texts to embed:

{"custom_id": "c", "prompt": "Once", "pooling": "mean", "dimensions": 64}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from octavo.engine.errors import InvalidRequestError, OctavoError
from octavo.engine.input.input_processor import POOLED, Prompt
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.outputs import vector_of
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.batch.results import result_id

if TYPE_CHECKING:
    from octavo.engine.any_engine import AnyEngine

MAX_LINE_BYTES = 16 << 20
_PARAMS = frozenset(f.name for f in dataclasses.fields(SamplingParams)) - {"output_kind"}
_SOURCES = ("prompt", "prompt_token_ids", "messages")
_OWN = ("custom_id", "priority", "tenant", "cache_salt")
_EMBEDDED = frozenset(("pooling", "normalize", "dimensions", "prompt_name"))
URLS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
"""Of lines in OpenAI's format."""

Outputs = list[RequestOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One line, checked.

    Attributes:
        number: of its line, from 1.
        custom_id: the user's name for it.
        prompts: what to answer; several only in OpenAI's completions.
        params: how.
        options: more for `InputProcessor.process`.
        result: the record of its outputs, one a prompt.
        failure: the record of an error.
    """

    number: int
    custom_id: str | None
    prompts: list[Prompt]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)
    result: Callable[[Outputs], dict[str, Any]]
    failure: Callable[[OctavoError], dict[str, Any]]


class BadLineError(InvalidRequestError):
    """A line that can never be served.

    Attributes:
        number: of the line.
        record: the result that says so.
    """

    def __init__(self, number: int, cause: InvalidRequestError, record: dict[str, Any]) -> None:
        super().__init__(f"line {number}: {cause.field}", cause.value, cause.allowed)
        self.number = number
        self.record = record


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Numbers, from 1, and contents of the lines that are not empty. Too long ones are cut off.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                _skip_line(file, line)
            if line.strip():
                yield number, line


def _skip_line(file: BinaryIO, part: bytes) -> None:
    while part and not part.endswith(b"\n"):
        part = file.readline(MAX_LINE_BYTES)


def read_task(number: int, line: bytes, defaults: SamplingParams, engine: AnyEngine) -> Task:
    """The task of a line.

    Args:
        defaults: parameters of plain lines that do not give their own.

    Raises:
        BadLineError: it can never be served.
    """
    value: Any = None
    try:
        value = _parse(line)
        if isinstance(value, dict) and "url" in value:
            return _openai_task(number, value, engine)
        return _plain_task(number, value, defaults, engine)
    except InvalidRequestError as error:
        raise BadLineError(number, error, failure_record(number, value, error)) from None


def custom_id_of(line: bytes) -> str | None:
    """The name that a line has, if it has one."""
    try:
        return _name_of(_parse(line))
    except InvalidRequestError:
        return None


def failure_record(number: int, value: object, error: OctavoError) -> dict[str, Any]:
    """The result of a line that has none, in the format of the line."""
    described = {
        "message": str(error),
        "type": type(error).__name__,
        "param": getattr(error, "field", None),
    }
    custom_id = _name_of(value)
    if not isinstance(value, dict) or "url" not in value:
        named = {} if custom_id is None else {"custom_id": custom_id}
        return {"line": number, **named, "error": described}
    response = {"status_code": error.http_status, "body": {"error": described}}
    return {
        "id": result_id(number), "custom_id": custom_id, "response": response, "error": None
    }  # fmt: skip


def _name_of(value: object) -> str | None:
    found = value.get("custom_id") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def _parse(line: bytes) -> Any:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidRequestError("line", line[:40], f"at most {MAX_LINE_BYTES} bytes")
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidRequestError("line", line[:80], "JSON in UTF-8") from None


def _plain_task(number: int, value: Any, defaults: SamplingParams, engine: AnyEngine) -> Task:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise InvalidRequestError("line", value, "a string or an object")
    embeds = not engine.inputs.generates
    sources = _SOURCES[:2] if embeds else _SOURCES
    given = [name for name in sources if name in value]
    if len(given) != 1:
        raise InvalidRequestError("prompt", given, f"exactly one of {', '.join(sources)}")
    for name in value:
        if name not in (_EMBEDDED if embeds else _PARAMS) and name not in (*sources, *_OWN):
            allowed = f"{', '.join(sorted(_EMBEDDED))}" if embeds else "a sampling parameter"
            raise InvalidRequestError(
                name, value[name], f"{', '.join(sources + _OWN)} or {allowed}"
            )
    custom_id = value.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        raise InvalidRequestError("custom_id", custom_id, "a string")
    for name in ("tenant", "cache_salt"):
        if not isinstance(value.get(name, ""), str):
            raise InvalidRequestError(name, value[name], "a string")
    prompt = _plain_prompt(given[0], value[given[0]], engine)
    pooling, changed = None, POOLED
    if embeds:
        pooler = engine.inputs.pooler_or_refuse()
        pooling = PoolingParams(
            **{name: value[name] for name in value if name in _EMBEDDED - {"prompt_name"}}
        )
        pooler.resolve(pooling)
        prompt = pooler.prompted(prompt, value.get("prompt_name"))
    else:
        params = {name: value[name] for name in value if name in _PARAMS}
        changed = defaults.replace(**params, output_kind=RequestOutputKind.FINAL_ONLY)

    def result(outputs: Outputs) -> dict[str, Any]:
        named = {} if custom_id is None else {"custom_id": custom_id}
        made = _embedding(outputs[0]) if embeds else _plain_result(outputs[0])
        return {"line": number, **named, **made}

    return Task(
        number=number,
        custom_id=custom_id,
        prompts=[prompt],
        params=changed,
        options={
            "pooling": pooling,
            "priority": Priority.parse(value.get("priority")),
            "tenant": value.get("tenant", ""),
            "cache_salt": value.get("cache_salt", ""),
        },
        result=result,
        failure=lambda error: failure_record(number, value, error),
    )


def _plain_prompt(name: str, value: Any, engine: AnyEngine) -> Prompt:
    if name == "messages":
        return engine.tokenizer.encode_chat(value)
    is_ids = isinstance(value, list) and all(type(token_id) is int for token_id in value)
    if is_ids if name == "prompt_token_ids" else isinstance(value, str) or is_ids:
        prompt: Prompt = value
        return prompt
    raise InvalidRequestError(name, value, "a string, or a list of token ids")


def _embedding(output: RequestOutput) -> dict[str, Any]:
    usage = {"prompt_tokens": len(output.prompt_token_ids)}
    return {"embedding": vector_of(output).tolist(), "usage": usage}


def _plain_result(output: RequestOutput) -> dict[str, Any]:
    def of(completion: Any) -> dict[str, Any]:
        record = {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.cumulative_logprob is not None:
            record["cumulative_logprob"] = completion.cumulative_logprob
        return record

    completions = [of(completion) for completion in output.outputs]
    record = dict(completions[0])
    if len(completions) > 1:
        record["completions"] = completions
    record["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(c.token_ids) for c in output.outputs),
    }
    return record


def check_openai_line(value: dict[str, Any]) -> dict[str, Any]:
    """The body of a line in OpenAI's format.

    Raises:
        InvalidRequestError: a field that is not known, missing or not as it should be.
    """
    for name in value:
        if name not in ("custom_id", "method", "url", "body"):
            raise InvalidRequestError(name, value[name], "custom_id, method, url and body")
    if not isinstance(value.get("custom_id"), str):
        raise InvalidRequestError("custom_id", value.get("custom_id"), "a string")
    if value.get("method", "POST") != "POST":
        raise InvalidRequestError("method", value["method"], "POST")
    if value.get("url") not in URLS:
        raise InvalidRequestError("url", value.get("url"), " or ".join(URLS))
    body = value.get("body")
    if not isinstance(body, dict):
        raise InvalidRequestError("body", body, "an object")
    return body


def _openai_task(number: int, value: dict[str, Any], engine: AnyEngine) -> Task:
    body = check_openai_line(value)
    custom_id, url = value["custom_id"], value["url"]
    try:
        from octavo.server.batch.openai_body import read_body
    except ImportError as error:
        allowed = f"not given, unless octavo[http] is installed ({error})"
        raise InvalidRequestError("url", url, allowed) from None
    read = read_body(url, body, result_id(number), engine)

    def result(outputs: Outputs) -> dict[str, Any]:
        response = {
            "status_code": 200, "request_id": result_id(number), "body": read.whole(outputs)
        }  # fmt: skip
        return {
            "id": result_id(number), "custom_id": custom_id, "response": response, "error": None
        }  # fmt: skip

    return Task(
        number=number,
        custom_id=custom_id,
        prompts=read.prompts,
        params=read.params,
        options=read.options,
        result=result,
        failure=lambda error: failure_record(number, value, error),
    )
