"""Fields of other servers' bodies that are not served here, and the values of them that ask for
nothing.

Routers and frameworks write out every field of the server that they know best, at its default. Such
a value changes no answer, so it is taken. Any other value of the same field is refused by name:
nobody shall believe in an option that does nothing.

Sources: OpenAI's API reference; `ChatCompletionRequest` and `CompletionRequest` of vLLM and SGLang;
the extensions of TGI, llama.cpp and OpenRouter.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping

from octavo.engine.errors import InvalidRequestError

MAX_MEANT_CHARS = 64
"""Longer names are no slips of the pen."""

_EITHER = (True, False)
_ABSENT = ()
"""Only null asks for nothing."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI.
    "audio": _ABSENT,
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": _ABSENT,
    "parallel_tool_calls": _EITHER,  # a completion calls no tools
    "prediction": _ABSENT,
    "service_tier": ("auto", "default", "standard_only"),
    "verbosity": ("medium",),
    "web_search_options": _ABSENT,
    # OpenAI's Responses.
    "background": (False,),
    "context_management": ([], {}),
    "conversation": _ABSENT,
    "max_tool_calls": _ABSENT,
    "prompt": _ABSENT,
    # Anthropic's Messages.
    "betas": ([],),
    "container": _ABSENT,
    "diagnostics": _ABSENT,
    "inference_geo": _ABSENT,
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": _ABSENT,
    # vLLM.
    "documents": ([],),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "guided_decoding_backend": ("auto",),
    "guided_json_object": (False,),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": _ABSENT,
    "lora_request": _ABSENT,
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ([],),
    "repetition_detection": _ABSENT,
    "return_mm_kwargs": _EITHER,  # of routes that are not here
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": _EITHER,  # only tokenizers written in Python heed it
    "stream_interval": (1,),
    "structural_tag": _ABSENT,
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang.
    "bootstrap_host": _ABSENT,
    "bootstrap_port": _ABSENT,
    "bootstrap_room": _ABSENT,
    "custom_labels": ({},),
    "custom_logit_processor": _ABSENT,
    "custom_params": ({},),
    "data_parallel_rank": _ABSENT,
    "disagg_prefill_dp_rank": _ABSENT,
    "ebnf": _ABSENT,
    "extra_key": _ABSENT,
    "images_config": ({},),
    "json_schema": _ABSENT,
    "lora_id": _ABSENT,
    "lora_path": _ABSENT,
    "ngram_corpus_id": _ABSENT,
    "no_stop_trim": (False,),
    "regex": _ABSENT,
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "rid": _ABSENT,
    "routed_dp_rank": _ABSENT,
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": ([], ""),
    "stream_reasoning": (True,),
    # TGI, llama.cpp, OpenRouter.
    "adapter_id": _ABSENT,
    "cache_prompt": _EITHER,
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "grammar": _ABSENT,
    "id_slot": (-1,),
    "mirostat": (0,),
    "models": ([],),
    "n_probs": (0,),
    "provider": ({},),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "transforms": ([],),
    "typical_p": (1,),
    "watermark": (False,),
    "xtc_probability": (0,),
    # Served by one of the two routes alone.
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}  # fmt: skip
"""Name -> the values besides null that ask for nothing."""

_INSTEAD = {
    "ebnf": "structured_outputs.grammar",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "json_schema": "structured_outputs.json",
    "no_stop_trim": "include_stop_str_in_output",
    "regex": "structured_outputs.regex",
    "repeat_penalty": "repetition_penalty",
    "rid": "the header x-request-id",
    "separate_reasoning": "include_reasoning",
}
"""Name -> what is served in its place."""


def without_null(body: object) -> object:
    """The body without its null fields; anything but an object comes back as it is."""
    if not isinstance(body, Mapping):
        return body
    return {name: value for name, value in body.items() if value is not None}


def without_neutral(body: object, served: Collection[str]) -> object:
    """The body without fields known from other servers at a value that asks for nothing.

    Args:
        body: what the client sent; anything but an object comes back as it is.
        served: names of fields that the route has: these stay.
    """
    if not isinstance(body, Mapping):
        return body
    return {
        name: value
        for name, value in body.items()
        if name in served or not _is_neutral(name, value)
    }


def unserved(name: str, value: object, served: Collection[str]) -> InvalidRequestError:
    """Why a body may not have a field.

    Args:
        name: of the field; inside another one the names from the outside in, with dots.
        value: what the client wrote there.
        served: names that a client may have meant.
    """
    if name in NEUTRAL:
        neutral = [json.dumps(item) for item in NEUTRAL[name]]
        allowed = " or ".join([*neutral, "not given"]) + ": it is not served"
        if name in _INSTEAD:
            allowed += f" (use {_INSTEAD[name]})"
        return InvalidRequestError(name, value, allowed)
    allowed = "not given: it is not known here"
    last = name.rpartition(".")[2]
    # A name may be known to another API alone.
    if (
        last not in served
        and len(last) <= MAX_MEANT_CHARS
        and (near := difflib.get_close_matches(last, sorted(served), 1, 0.7))
    ):
        allowed += f"; did you mean {near[0]}?"
    return InvalidRequestError(name, value, allowed)


def _is_neutral(name: str, value: object) -> bool:
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in NEUTRAL.get(name, ())
    )
