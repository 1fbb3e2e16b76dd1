"""From bodies to what the engine takes: parameters, prompts, class, deadline and targets."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidRequestError, UnknownModelError
from octavo.engine.input.input_processor import Prompt
from octavo.engine.input.targets import Targets
from octavo.engine.input.tokenization import Tokenization
from octavo.engine.request import Priority
from octavo.engine.sampling_defaults import SamplingDefaults
from octavo.engine.sampling_params import MAX_BAD_WORDS, RequestOutputKind, SamplingParams
from octavo.server.http.answers import Telling
from octavo.server.http.grammar import grammar_of
from octavo.server.http.protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Serving,
    StreamOptions,
    TokenizeRequest,
)
from octavo.server.slo_headers import read_targets
from octavo.server.template_names import MAX_MESSAGES, MAX_NAME_CHARS, template_names

if TYPE_CHECKING:
    from octavo.engine.any_engine import AnyEngine
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.text.assistant.tool_request import ToolUse

MAX_PROMPTS = 128
MAX_SEQUENCES = 512
"""Answers that one body may ask for: its prompts times n."""
COMPLETION_TOKENS = 16
"""Of a completion that names no limit, whatever the model: OpenAI's API says so."""
MAX_TEMPLATE_CHARS = 65_536
_SAME_NAMES = (
    *("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"),
    *("logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids"),
    *("allowed_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A body as the engine takes it.

    Attributes:
        params: how tokens are chosen.
        options: keyword arguments of `Front.generate`.
        stream: whether the answer comes piece by piece.
        include_usage: whether a stream ends with the count of tokens.
        continuous_usage: whether each event of a stream tells the count so far, too.
        tells: what the answer holds besides the text.
    """

    params: SamplingParams
    options: dict[str, Any]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    tells: Telling


def completion_ask(
    body: CompletionRequest, headers: Mapping[str, str], defaults: SamplingDefaults
) -> Ask:
    """Of a completion.

    Args:
        headers: of the request.
        defaults: what it takes that it does not say.

    Raises:
        InvalidRequestError: a value that cannot be served; names the field.
    """
    if body.suffix:
        raise InvalidRequestError("suffix", body.suffix, "not given: infilling is not served")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("best_of", body.best_of, f"n ({body.n or 1}), or not given")
    tells = Telling(
        echo=bool(body.echo), logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids), generated=body.max_tokens != 0,
        skip_special_tokens=body.skip_special_tokens is not False,
    )  # fmt: skip
    limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _ask(body, headers, defaults, tells, {"max_tokens": limit, "logprobs": body.logprobs})


def chat_ask(body: ChatRequest, headers: Mapping[str, str], defaults: SamplingDefaults) -> Ask:
    """Of a chat. Takes and raises as `completion_ask`."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs", body.top_logprobs, "given with logprobs = true")
    limit = body.max_completion_tokens
    if limit is not None and body.max_tokens is not None and body.max_tokens != limit:
        raise InvalidRequestError(
            "max_tokens", body.max_tokens, f"max_completion_tokens ({limit}), or not given"
        )
    limit = body.max_tokens if limit is None else limit
    limit = defaults.max_tokens if limit is None else limit
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    tells = Telling(
        logprobs=num_top, prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids), generated=limit != 0,
    )  # fmt: skip
    return _ask(body, headers, defaults, tells, {"max_tokens": limit, "logprobs": num_top})


def prompts_of(value: object, name: str = "prompt", most: int = MAX_PROMPTS) -> list[Prompt]:
    """The prompts of a body, at most so many.

    Args:
        value: of the field `name`.

    Raises:
        InvalidRequestError: neither text nor token ids nor a list of them, or too many.
    """
    allowed = "text or token ids, or a list of texts or of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(name, value, allowed)
    if isinstance(value[0], int):
        return [value]
    if len(value) > most:
        raise InvalidRequestError(name, f"{len(value)} {name}s", f"at most {most}")
    kind = type(value[0])
    if kind not in (str, list) or any(type(item) is not kind for item in value):
        raise InvalidRequestError(name, value, allowed)
    return value


def check_sequences(num_prompts: int, n: int) -> None:
    """Raises InvalidRequestError if a body asks for more answers at once than one may."""
    if num_prompts * n > MAX_SEQUENCES:
        allowed = f"at most {MAX_SEQUENCES // num_prompts} with {num_prompts} prompts"
        raise InvalidRequestError("n", n, f"{allowed}: {MAX_SEQUENCES} answers in all")


def chat_names(body: ChatRequest | TokenizeRequest, use: ToolUse | None) -> dict[str, Any]:
    """What a chat gives its template besides the messages.

    Args:
        use: what the body says of tools.

    Raises:
        InvalidRequestError: `chat_template_kwargs` names what has a field of its own, or is too
            large.
    """
    assert body.messages is not None
    if len(body.messages) > MAX_MESSAGES:
        given = f"{len(body.messages)} messages"
        raise InvalidRequestError("messages", given, f"at most {MAX_MESSAGES}")
    names = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        names.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            # Most templates know of a thought, or none, and of no effort.
            names.setdefault("enable_thinking", False)
    return template_names(
        names,
        use,
        generates=body.add_generation_prompt,
        goes_on=bool(body.continue_final_message),
    )


def check_template(body: ChatRequest, *, is_trusted: bool) -> None:
    """Refuses a template of the request's own, unless requests' templates are trusted.

    Raises:
        InvalidRequestError: it has one, or one that is too long.
    """
    source = body.chat_template
    if source is None:
        return
    if not is_trusted:
        allowed = "not given: this server does not trust requests' templates"
        raise InvalidRequestError("chat_template", source, allowed)
    if len(source) > MAX_TEMPLATE_CHARS:
        allowed = f"at most {MAX_TEMPLATE_CHARS} characters"
        raise InvalidRequestError("chat_template", f"{len(source)} characters", allowed)


def check_model(model: str | None, engine: AsyncEngine | AnyEngine) -> None:
    """Raises UnknownModelError unless the model is the served one or not named."""
    if model is not None and model != engine.model_name:
        raise UnknownModelError("model", model, f"{engine.model_name!r}, or not given")


def request_id_of(headers: Mapping[str, str], kind: str) -> str:
    """The client's own id (`x-request-id`), or a new one."""
    given = headers.get("x-request-id")
    if given is None:
        return f"{kind}-{uuid.uuid4().hex}"
    if not 1 <= len(given) <= MAX_NAME_CHARS // 2 or not given.isprintable():
        raise InvalidRequestError(
            "x-request-id", given, f"1 to {MAX_NAME_CHARS // 2} printable characters"
        )
    return given


def _ask(
    body: Generation,
    headers: Mapping[str, str],
    defaults: SamplingDefaults,
    tells: Telling,
    extra: dict[str, Any],
) -> Ask:
    if not tells.generated:
        _check_no_tokens(body, tells)
        extra["max_tokens"] = 1
    if tells.prompt_logprobs is not None and body.stream:
        allowed = "not given with stream = true"
        raise InvalidRequestError("prompt_logprobs", tells.prompt_logprobs, allowed)
    wanted = body.stream_options or StreamOptions()
    if wanted.include_usage and not body.stream:
        raise InvalidRequestError("stream_options", "an object", "given only with stream = true")
    values = {
        name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None
    } | extra
    if tells.scores_prompt is not None:
        values["prompt_logprobs"] = tells.scores_prompt
    if (grammar := grammar_of(body)) is not None:
        values["structured_outputs"] = grammar
    for name in ("stop", "bad_words"):
        if (value := getattr(body, name)) is not None:
            values[name] = _strings(name, value)
    if wanted.continuous_usage_stats and not wanted.include_usage:
        allowed = "given only with stream_options.include_usage = true"
        raise InvalidRequestError("stream_options.continuous_usage_stats", True, allowed)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return Ask(
        params=defaults.params(**values, output_kind=kind),
        options=options_of(body, headers),
        stream=bool(body.stream),
        include_usage=wanted.include_usage,
        continuous_usage=wanted.continuous_usage_stats,
        tells=tells,
    )


def options_of(body: Serving, headers: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of `Front.generate` that any body may bring.

    Raises:
        InvalidRequestError: a value that cannot be served; names the field.
    """
    return {
        "priority": Priority.parse(body.priority),
        "timeout_s": _timeout(body.timeout_s),
        "targets": _targets(headers),
        "tenant": _name("tenant", body.tenant),
        "cache_salt": _name("cache_salt", body.cache_salt),
        "tokenization": Tokenization(
            add_special_tokens=body.add_special_tokens is not False,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "left",
        ),
    }


def _check_no_tokens(body: Generation, tells: Telling) -> None:
    """Refuses an answer without tokens to whoever asks for nothing of the prompt."""
    name = "max_completion_tokens"
    if getattr(body, name, None) is None:
        name = "max_tokens"
    if not tells.echo and tells.prompt_logprobs is None:
        instead = "prompt_logprobs" if isinstance(body, ChatRequest) else "echo or prompt_logprobs"
        raise InvalidRequestError(name, 0, f"at least 1, or 0 with {instead}")
    if body.min_tokens:
        raise InvalidRequestError("min_tokens", body.min_tokens, f"0 with {name} = 0")


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, list) and len(items) > MAX_BAD_WORDS:
        raise InvalidRequestError(name, f"{len(items)} strings", f"at most {MAX_BAD_WORDS}")
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise InvalidRequestError(name, value, "a string or a list of strings")
    return tuple(items)


def _targets(headers: Mapping[str, str]) -> Targets:
    return read_targets(headers, {})


def _timeout(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not math.isfinite(timeout_s):
        raise InvalidRequestError("timeout_s", timeout_s, "a finite number of seconds")
    return timeout_s


def _name(name: str, value: str | None) -> str:
    if value is not None and len(value) > MAX_NAME_CHARS:
        raise InvalidRequestError(name, value, f"at most {MAX_NAME_CHARS} characters")
    return value or ""
