"""Embeddings, scores and classes as tensors: several texts in, one row for each out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import Prompt
from octavo.engine.input.tokenization import AS_THE_MODEL_WANTS, Tokenization
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.outputs import vector_of
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.pooling.pooler import Pooler
from octavo.engine.pooling.scoring import Scoring, plan_scores
from octavo.engine.request import Priority
from octavo.server.kserve.ask import check_entries, check_id, read_options
from octavo.server.kserve.tensors import Tensor, read_texts
from octavo.server.proto.kserve.v2 import inference_pb2 as pb

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

INPUTS = {"text_input": "BYTES", "text_pair": "BYTES", "pooling_parameters": "BYTES"}
"""Input -> datatype; all but the first may be left out."""
OUTPUTS = {
    "embedding": "FP32",
    "score": "FP32",
    "probabilities": "FP32",
    "num_input_tokens": "UINT32",
}
"""Output -> datatype. One of the first three is asked for."""
KINDS = ("embedding", "score", "probabilities")
MAX_TEXTS = 256
MAX_PARAMETERS_CHARS = 4096
_PARAMETERS = {
    "embedding": ("pooling", "normalize", "dimensions", "prompt_name"),
    "score": ("instruction",),
    "probabilities": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledAsk:
    """A pooled request as the engine takes it.

    Attributes:
        kind: of its rows, one of `KINDS`.
        texts, names: prompts, and for each the input that holds it.
        params: how each is pooled.
        tokenization: of each.
        scoring: what scores are made of; None for other kinds.
        wanted: outputs to give.
        request_id: the client's own id; None if it gave none.
        priority, timeout_s: see `Front.generate`.
    """

    kind: str
    texts: list[Prompt]
    names: list[str]
    params: PoolingParams
    tokenization: Tokenization
    scoring: Scoring | None
    wanted: tuple[str, ...]
    request_id: str | None
    priority: Priority
    timeout_s: float | None


def pools(engine: AsyncEngine) -> bool:
    """Whether an engine takes pooled requests."""
    return engine.engine.inputs.pooler is not None


def is_pooled(request: pb.ModelInferRequest, engine: AsyncEngine) -> bool:
    """Whether a request asks for rows and not for text: by its outputs, or because the engine
    generates nothing."""
    asked = {output.name for output in request.outputs}
    return not engine.engine.inputs.generates or not asked.isdisjoint(KINDS)


def read_pooled_ask(request: pb.ModelInferRequest, pooler: Pooler) -> PooledAsk:
    """Checks a request.

    Raises:
        InvalidRequestError: something that can never be served; names the field.
    """
    check_entries(request)
    inputs = read_texts(request, INPUTS, MAX_TEXTS)
    texts = inputs.get("text_input", [])
    if not texts:
        raise InvalidRequestError("text_input", None, "given: it is required")
    options, values = read_options(request.parameters)
    for name, value in values.items():
        allowed = "not given: a pooled request generates nothing (see pooling_parameters)"
        raise InvalidRequestError(name, value, allowed)
    kind, wanted = _wanted(request, inputs)
    given = _parameters(inputs.get("pooling_parameters"), kind)
    pairs = inputs.get("text_pair")
    if (pairs is not None) != (kind == "score"):
        allowed = "given with the output score, and with no other"
        raise InvalidRequestError("text_pair", pairs, allowed)
    tokenization, scoring = AS_THE_MODEL_WANTS, None
    names = ["text_input"] * len(texts)
    prompts: list[Prompt] = list(texts)
    params = PoolingParams(classify=True)
    if kind == "score":
        both = ("text_input", "text_pair")
        scoring = plan_scores(
            pooler, prompts, list(pairs or ()), given.get("instruction"), names=both
        )
        prompts, names, params = scoring.texts, scoring.names, scoring.params
        tokenization = scoring.tokenization(tokenization)
    elif kind == "embedding":
        name = given.pop("prompt_name", None)
        params = PoolingParams(**given)
        prompts = [pooler.prompted(text, name) for text in texts]
    elif pooler.head is None:
        allowed = "embedding or score: the model has no classification head"
        raise InvalidRequestError("outputs", kind, allowed)
    pooler.resolve(params)
    return PooledAsk(
        kind=kind,
        texts=prompts,
        names=names,
        params=params,
        tokenization=tokenization,
        scoring=scoring,
        wanted=wanted,
        request_id=check_id(request),
        priority=options.get("priority", Priority.NORMAL),
        timeout_s=options.get("timeout_s"),
    )


def tensors_of(ask: PooledAsk, outputs: list[RequestOutput]) -> list[Tensor]:
    """The tensors of an answer.

    Raises:
        OctavoError: a request did not end well.
    """
    vectors = [vector_of(output) for output in outputs]
    rows: Any = np.stack(vectors)
    if ask.scoring is not None:
        num_pairs = len(ask.scoring.pairs)
        rows = np.array([ask.scoring.score(pair, vectors) for pair in range(num_pairs)])
    counts = [len(output.prompt_token_ids) for output in outputs]
    made = {
        ask.kind: Tensor(ask.kind, "FP32", rows),
        "num_input_tokens": Tensor("num_input_tokens", "UINT32", [sum(counts)]),
    }
    return [made[name] for name in ask.wanted]


def _wanted(request: pb.ModelInferRequest, inputs: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The kind of rows, and all outputs."""
    asked = tuple(dict.fromkeys(output.name for output in request.outputs))
    for name in asked:
        if name not in OUTPUTS:
            raise InvalidRequestError("outputs", name, f"of a pooled request: {', '.join(OUTPUTS)}")
    kinds = [name for name in asked if name in KINDS]
    if len(kinds) > 1:
        raise InvalidRequestError("outputs", list(asked), f"one of {', '.join(KINDS)}")
    kind = kinds[0] if kinds else "score" if "text_pair" in inputs else "embedding"
    return kind, asked if kinds else (kind, *asked)


def _parameters(given: list[str] | None, kind: str) -> dict[str, Any]:
    if given is None:
        return {}
    allowed = "one JSON object"
    if len(given) != 1 or len(given[0]) > MAX_PARAMETERS_CHARS:
        allowed += f" of at most {MAX_PARAMETERS_CHARS} characters"
        raise InvalidRequestError("pooling_parameters", f"{len(given)} texts", allowed)
    try:
        values = json.loads(given[0])
    except (ValueError, RecursionError):
        raise InvalidRequestError("pooling_parameters", given[0], allowed) from None
    if not isinstance(values, dict):
        raise InvalidRequestError("pooling_parameters", given[0], allowed)
    for name, value in values.items():
        if name not in _PARAMETERS[kind]:
            known = ", ".join(_PARAMETERS[kind]) or "nothing"
            raise InvalidRequestError(f"pooling_parameters.{name}", value, f"{known} with {kind}")
        is_text = name in ("prompt_name", "instruction")
        if is_text and not isinstance(value, str | None):
            raise InvalidRequestError(f"pooling_parameters.{name}", value, "a string, or null")
    return values
