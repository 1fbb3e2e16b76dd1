"""What Triton's clients may ask of a model besides answers: configuration and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from octavo.server.front import Front
from octavo.server.kserve import ask, pooled
from octavo.server.proto.kserve.v2 import inference_pb2 as pb
from octavo.server.request_stats import Histogram
from octavo.server.server_info import engine_args

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

BACKEND = "octavo"
VERSION = "1"
DATA_TYPES: Mapping[str, pb.DataType] = {
    "BOOL": pb.TYPE_BOOL,
    "BYTES": pb.TYPE_STRING,
    "FP32": pb.TYPE_FP32,
    "UINT32": pb.TYPE_UINT32,
}
_NS = 1e9
_REQUIRED = next(iter(ask.INPUTS))
_ROWS = ("embedding", "probabilities")
"""Outputs of two dimensions."""


class TensorFacts(NamedTuple):
    """What a tensor is; -1 in its shape is any size."""

    datatype: str
    shape: tuple[int, ...]


def inputs_of(engine: AsyncEngine) -> dict[str, TensorFacts]:
    """The tensors that the model takes, by name."""
    found: dict[str, TensorFacts] = {}
    if engine.engine.inputs.generates:
        found |= {name: TensorFacts(kind, (1,)) for name, kind in ask.INPUTS.items()}
    if pooled.pools(engine):
        found |= {name: TensorFacts(kind, (-1,)) for name, kind in pooled.INPUTS.items()}
    return found


def outputs_of(engine: AsyncEngine) -> dict[str, TensorFacts]:
    """The tensors that the model gives, by name."""
    kinds: dict[str, str] = {}
    if engine.engine.inputs.generates:
        kinds |= ask.OUTPUTS
    if pooled.pools(engine):
        kinds |= pooled.OUTPUTS
    return {
        name: TensorFacts(kind, (-1, -1) if name in _ROWS else (-1,))
        for name, kind in kinds.items()
    }


def model_config(engine: AsyncEngine) -> pb.ModelConfig:
    """What the model takes, gives and was started with."""
    arguments = engine_args(engine)
    arguments |= {"dtype": engine.dtype, "max_model_len": str(engine.max_model_len)}
    specific = pb.ModelVersionPolicy.Specific(versions=[int(VERSION)])
    return pb.ModelConfig(
        name=engine.model_name,
        platform=BACKEND,
        backend=BACKEND,
        version_policy=pb.ModelVersionPolicy(specific=specific),
        input=[
            pb.ModelInput(
                name=name,
                data_type=DATA_TYPES[each.datatype],
                dims=each.shape,
                optional=name != _REQUIRED,
            )
            for name, each in inputs_of(engine).items()
        ],
        output=[
            pb.ModelOutput(name=name, data_type=DATA_TYPES[each.datatype], dims=each.shape)
            for name, each in outputs_of(engine).items()
        ],
        parameters={
            name: pb.ModelParameter(string_value=value) for name, value in arguments.items()
        },
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )


def model_statistics(engine: AsyncEngine, front: Front) -> pb.ModelStatistics:
    """What became of requests since the start, over all protocols."""
    stats = front.stats
    success = _duration(stats.e2e_s)
    return pb.ModelStatistics(
        name=engine.model_name,
        version=VERSION,
        last_inference=int(front.last_request_unix_s * 1000),
        inference_count=success.count,
        execution_count=engine.load().num_steps,
        inference_stats=pb.InferStatistics(
            success=success,
            fail=pb.StatisticDuration(count=stats.num_failed),
            queue=_duration(stats.queue_s),
            compute_infer=_duration(stats.prefill_s, stats.decode_s),
        ),
    )


def _duration(*parts: Histogram) -> pb.StatisticDuration:
    """Of requests whose time is in as many parts, the first of which counts them."""
    seconds = sum(part.sum for part in parts)
    return pb.StatisticDuration(count=sum(parts[0].counts), ns=round(seconds * _NS))
