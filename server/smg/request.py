"""smg's requests as the engine takes them: prompts, sampling parameters, how they are cut."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.tokenization import AS_THE_MODEL_WANTS, Tokenization
from octavo.engine.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    RequestOutputKind,
    SamplingParams,
)
from octavo.engine.structured.params import MAX_CHOICES, StructuredOutputsParams
from octavo.server.proto.smg import vllm_engine_pb2 as pb

MAX_NAME_CHARS = 256
"""Of request ids."""
_AS_THEY_ARE = (
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "skip_special_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
)
_UNLESS_ZERO = ("top_p", "repetition_penalty", "n")
"""Fields in which 0 is no value, and means "not given"."""
_IF_GIVEN = ("temperature", "logprobs", "prompt_logprobs", "seed")
_REFUSED = ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")
_GRAMMARS = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "json_object": "json_object",
}
"""smg's name of a grammar -> that of `StructuredOutputsParams`."""


def check_served(request: pb.GenerateRequest) -> None:
    """Refuses what Octavo does not do.

    Raises:
        InvalidRequestError: images, pages from another engine, or a replica to run at.
    """
    for name in _REFUSED:
        if request.HasField(name):
            raise InvalidRequestError(name, "given", "not given: a prompt of text or tokens alone")
    if request.extra_mm_inputs:
        given = f"{len(request.extra_mm_inputs)} batches"
        raise InvalidRequestError("extra_mm_inputs", given, "none")
    if request.HasField("data_parallel_rank"):
        allowed = "not given: the server spreads requests over its replicas itself"
        raise InvalidRequestError("data_parallel_rank", request.data_parallel_rank, allowed)


def prompt_of(request: pb.GenerateRequest | pb.EmbedRequest, most: int | None) -> str | list[int]:
    """The text or the token ids of a request.

    Args:
        most: token ids that it may have; None for any number.

    Raises:
        InvalidRequestError: neither, or too many ids.
    """
    if isinstance(request, pb.GenerateRequest) and request.HasField("text"):
        return request.text
    if not request.HasField("tokenized"):
        raise InvalidRequestError("tokenized", None, "given: the token ids of the prompt")
    ids = request.tokenized.input_ids
    if most is not None and len(ids) > most:
        allowed = f"at most {most}, as max_model_len says"
        raise InvalidRequestError("tokenized.input_ids", f"{len(ids)} tokens", allowed)
    return list(ids)


def request_id_of(request_id: str) -> str | None:
    """The router's name of a request; None if it gave none.

    Raises:
        InvalidRequestError: too long a name.
    """
    if len(request_id) > MAX_NAME_CHARS:
        raise InvalidRequestError("request_id", request_id, f"at most {MAX_NAME_CHARS} characters")
    return request_id or None


def tokenization_of(message: pb.SamplingParams) -> Tokenization:
    """How a prompt is cut.

    Raises:
        InvalidRequestError: a number of tokens that cannot be.
    """
    if not message.HasField("truncate_prompt_tokens"):
        return AS_THE_MODEL_WANTS
    return Tokenization(truncate_prompt_tokens=message.truncate_prompt_tokens)


def sampling_params_of(message: pb.SamplingParams, *, stream: bool) -> SamplingParams:
    """Sampling parameters with vLLM's defaults: no limit of tokens, a temperature of 1.

    smg makes text of tokens itself. Only the search for stop strings needs text here.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    values: dict[str, Any] = {name: getattr(message, name) for name in _AS_THEY_ARE}
    values |= {name: getattr(message, name) for name in _UNLESS_ZERO if getattr(message, name)}
    values |= {name: getattr(message, name) for name in _IF_GIVEN if message.HasField(name)}
    values["max_tokens"] = message.max_tokens if message.HasField("max_tokens") else None
    for name, most in (("stop", MAX_STOP_STRINGS), ("stop_token_ids", MAX_STOP_TOKENS)):
        items = getattr(message, name)
        _check_count(name, items, most)
        values[name] = tuple(items)
    if message.logit_bias:
        _check_count("logit_bias", message.logit_bias, MAX_LOGIT_BIASES)
        values["logit_bias"] = dict(message.logit_bias)
    return SamplingParams(
        **values,
        structured_outputs=_grammar_of(message),
        detokenize=bool(message.stop),
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def _grammar_of(message: pb.SamplingParams) -> StructuredOutputsParams | None:
    name = message.WhichOneof("constraint")
    if name is None:
        return None
    if name == "structural_tag":
        known = ", ".join((*_GRAMMARS, "choice"))
        raise InvalidRequestError(name, message.structural_tag, f"not given; one of {known}")
    if name == "choice":
        _check_count("choice.choices", message.choice.choices, MAX_CHOICES)
        return StructuredOutputsParams(choice=tuple(message.choice.choices), asked_as=name)
    values = {_GRAMMARS[name]: getattr(message, name)}
    return StructuredOutputsParams(**values, asked_as=name)


def _check_count(name: str, items: Sized, most: int) -> None:
    if len(items) > most:
        raise InvalidRequestError(name, f"{len(items)} entries", f"at most {most}")
