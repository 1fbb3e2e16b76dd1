"""SamplingParams to and from its message: a field that is not given takes its default."""

from __future__ import annotations

from collections.abc import Sized
from functools import lru_cache
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from octavo.engine.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    RequestOutputKind,
    SamplingParams,
)
from octavo.engine.structured.params import MAX_CHOICES, StructuredOutputsParams
from octavo.engine.structured.turn_grammar import TurnGrammar
from octavo.engine.text.assistant.tool_request import MAX_TOOLS
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

REMEMBERED_BYTES, NUM_REMEMBERED = 256, 1024
"""Parameters that are kept once they were read: up to so long a message, so many of them."""

_SCALARS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_LISTS = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKENS,
    "bad_words": MAX_BAD_WORDS,
}
"""Name -> most entries: longer lists are not made Python's own first."""

OUTPUT_KINDS = {
    RequestOutputKind.CUMULATIVE: pb.OUTPUT_KIND_CUMULATIVE,
    RequestOutputKind.DELTA: pb.OUTPUT_KIND_DELTA,
    RequestOutputKind.FINAL_ONLY: pb.OUTPUT_KIND_FINAL_ONLY,
}


def sampling_params_to_message(params: SamplingParams) -> pb.SamplingParams:
    """The message that says the same.

    Raises:
        InvalidRequestError: a number does not fit its field.
    """
    message = pb.SamplingParams(
        output_kind=OUTPUT_KINDS[params.output_kind], unlimited_tokens=params.max_tokens is None
    )
    for name in _SCALARS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    for name in _LISTS:
        getattr(message, name).extend(getattr(params, name))
    for token_id, bias in (params.logit_bias or {}).items():
        message.logit_bias[token_id] = bias
    if isinstance(params.structured_outputs, StructuredOutputsParams):
        given = params.structured_outputs.given()
        message.structured_outputs.CopyFrom(pb.StructuredOutputs(**given))
        if (turn := params.structured_outputs.turn) is not None:
            schemas = [pb.ToolSchema(field=name, schema=text) for name, text in turn.schemas]
            message.structured_outputs.turn.CopyFrom(
                pb.Turn(root=turn.root, calls=turn.calls, schemas=schemas)
            )
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(params.allowed_token_ids)
    return message


def sampling_params_from_message(
    message: pb.SamplingParams, defaults: SamplingDefaults = NO_DEFAULTS
) -> SamplingParams:
    """Validated parameters; streams give deltas unless they ask for another kind.

    Args:
        defaults: what it takes that it does not say.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    # Requests of one client mostly ask for the same: checking them takes ten times as long as this.
    if not message.logit_bias and message.ByteSize() <= REMEMBERED_BYTES:
        return _remembered(message.SerializeToString(), defaults)
    return _read(message, defaults)


@lru_cache(maxsize=NUM_REMEMBERED)
def _remembered(raw: bytes, defaults: SamplingDefaults) -> SamplingParams:
    return _read(pb.SamplingParams.FromString(raw), defaults)


def _read(message: pb.SamplingParams, defaults: SamplingDefaults) -> SamplingParams:
    values: dict[str, Any] = {
        name: getattr(message, name) for name in _SCALARS if message.HasField(name)
    }
    for name, most in _LISTS.items():
        items = getattr(message, name)
        _check_count(name, items, most)
        values[name] = tuple(items)
    if message.unlimited_tokens:
        if message.HasField("max_tokens"):
            raise InvalidRequestError(
                "max_tokens", message.max_tokens, "not given together with unlimited_tokens"
            )
        values["max_tokens"] = None
    if message.logit_bias:
        _check_count("logit_bias", message.logit_bias, MAX_LOGIT_BIASES)
        values["logit_bias"] = dict(message.logit_bias)
    if message.HasField("allowed_token_ids"):
        _check_count("allowed_token_ids", message.allowed_token_ids.ids, MAX_ALLOWED_TOKENS)
        values["allowed_token_ids"] = tuple(message.allowed_token_ids.ids)
    if message.HasField("structured_outputs"):
        values["structured_outputs"] = _structured_outputs(message.structured_outputs)
    values["output_kind"] = _output_kind(message.output_kind)
    return defaults.params(**values)


def sampling_defaults_to_message(defaults: SamplingDefaults) -> pb.SamplingParams:
    """The message that says what a model has of its own."""
    message = pb.SamplingParams()
    for name, value in defaults.values:
        setattr(message, name, value)
    return message


def sampling_defaults_from_message(message: pb.SamplingParams) -> SamplingDefaults:
    """What another server's model has of its own."""
    return SamplingDefaults(
        tuple((name, getattr(message, name)) for name in _SCALARS if message.HasField(name))
    )


def _structured_outputs(message: pb.StructuredOutputs) -> StructuredOutputsParams:
    optional = ("json", "regex", "grammar", "json_object", "whitespace_pattern")
    values = {name: getattr(message, name) for name in optional if message.HasField(name)}
    if message.choice:
        _check_count("structured_outputs.choice", message.choice, MAX_CHOICES)
        values["choice"] = tuple(message.choice)
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        values[name] = getattr(message, name)
    if message.HasField("turn"):
        values["turn"] = _turn(message.turn)
    return StructuredOutputsParams(**values)


def _turn(message: pb.Turn) -> TurnGrammar:
    _check_count("structured_outputs.turn.schemas", message.schemas, MAX_TOOLS)
    return TurnGrammar(
        root=message.root,
        calls=message.calls if message.HasField("calls") else None,
        schemas=tuple((each.field, each.schema) for each in message.schemas),
        is_trusted=False,
    )


def _check_count(name: str, items: Sized, most: int) -> None:
    if len(items) > most:
        raise InvalidRequestError(name, f"{len(items)} entries", f"at most {most}")


def _output_kind(value: int) -> RequestOutputKind:
    if value == pb.OUTPUT_KIND_UNSPECIFIED:
        return RequestOutputKind.DELTA
    for kind, number in OUTPUT_KINDS.items():
        if value == number:
            return kind
    raise InvalidRequestError("output_kind", value, "cumulative, delta or final_only (1 to 3)")
