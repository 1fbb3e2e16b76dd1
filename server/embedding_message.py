"""Requests for embeddings, and embeddings, to and from their messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.engine.errors import InvalidRequestError
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.outputs import EmbeddingOutput, EmbeddingRequestOutput, vector_of
from octavo.engine.pooling.params import PoolingParams
from octavo.models.pooling_config import POOLINGS, Pooling
from octavo.server.output_message import read_timings, timings_message
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

_NUMBERS = {name: pb.Pooling.Value(f"POOLING_{name.upper()}") for name in POOLINGS}
_NAMES: dict[int, Pooling] = {number: name for name, number in _NUMBERS.items()}


def pooling_params_from_message(request: pb.EmbedRequest) -> PoolingParams:
    """How a request wants its hidden states pooled.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    number = request.pooling
    if number != pb.POOLING_UNSPECIFIED and number not in _NAMES:
        named = ", ".join(f"{name} ({value})" for name, value in _NUMBERS.items())
        raise InvalidRequestError("pooling", int(number), named)
    return PoolingParams(
        pooling=_NAMES.get(number),
        normalize=request.normalize if request.HasField("normalize") else None,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
    )


def pooling_fields(params: PoolingParams) -> dict[str, Any]:
    """The fields of a request that say so; None for those that are left to the model."""
    number = None if params.pooling is None else _NUMBERS[params.pooling]
    return {
        "pooling": None if number is None else pb.Pooling.Name(number),
        "normalize": params.normalize,
        "dimensions": params.dimensions,
    }


def embed_response(output: RequestOutput, model: str) -> pb.EmbedResponse:
    """The message of a pooled request's one output.

    Raises:
        OctavoError: it did not end well.
    """
    message = pb.EmbedResponse(
        request_id=output.request_id,
        model=model,
        prompt_token_ids=output.prompt_token_ids,
        embedding=vector_of(output).tolist(),
    )
    message.usage.prompt_tokens = len(output.prompt_token_ids)
    message.usage.cached_tokens = output.num_cached_tokens
    message.timings.CopyFrom(timings_message(output.metrics, 0, 1))
    return message


def read_embed_response(message: pb.EmbedResponse, prompt: str | None) -> EmbeddingRequestOutput:
    """The output; times are in seconds since the server accepted the request.

    Args:
        prompt: its text, if it was sent as text.
    """
    return EmbeddingRequestOutput(
        request_id=message.request_id,
        outputs=EmbeddingOutput(np.array(message.embedding, np.float32)),
        prompt=prompt,
        prompt_token_ids=list(message.prompt_token_ids),
        num_cached_tokens=message.usage.cached_tokens,
        metrics=read_timings(message.timings),
    )
