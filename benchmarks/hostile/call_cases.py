"""gRPC calls with one large message: each is refused, or harms nobody.

The service has no chat and so no template variables; KServe's parameters are what comes nearest.
Every case sends one message and fails on an answer that tells of a fault of the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from benchmarks.hostile.case import Addresses, Case
from octavo.server.proto.kserve.v2 import inference_pb2 as kserve
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

SERVICE = "/octavo.v1.OctavoService"
INFER = "/inference.GRPCInferenceService/ModelInfer"
REFUSED = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
    )
)


def calls(method: str, message: bytes, count: int = 1) -> Callable[[Addresses], Awaitable[None]]:
    """Sends a message that must be refused, so many at once."""

    async def send(to: Addresses) -> None:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(to.grpc, options=options) as channel:
            made = [
                channel.unary_unary(method)(message, metadata=list(to.headers.items()))
                for _ in range(count)
            ]
            for call in made:
                code, details = await call.code(), await call.details()
                assert code in REFUSED, f"{method}: {code} {details}"

    return send


def _generate(**fields: object) -> tuple[str, bytes]:
    request = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    return f"{SERVICE}/Generate", request.SerializeToString()


def _parameters() -> tuple[str, bytes]:
    request = kserve.ModelInferRequest(model_name="tiny")  # as the suite's server calls any model
    for number in range(200_000):
        request.parameters[f"x{number}"].int64_param = number
    return INFER, request.SerializeToString()


_TEXT = "a" * 4_000_000
_MESSAGES: dict[str, tuple[str, bytes]] = {
    "gRPC: a prompt of 4 MB": _generate(prompt=_TEXT),
    "gRPC: a prompt of 1,000,000 token ids": _generate(
        prompt_token_ids=pb.TokenIds(ids=[7] * 1_000_000)
    ),
    "gRPC: a bad word of 1 MB": _generate(
        prompt="a", sampling_params=pb.SamplingParams(bad_words=["a" * 10**6])
    ),
    "gRPC: 300,000 stop strings": _generate(
        prompt="a", sampling_params=pb.SamplingParams(stop=["ab"] * 300_000)
    ),
    "gRPC: 200,000 biases": _generate(
        prompt="a", sampling_params=pb.SamplingParams(logit_bias=dict.fromkeys(range(200_000), 1.0))
    ),
    "gRPC: 4 MB to tokenize": (
        f"{SERVICE}/Tokenize",
        pb.TokenizeRequest(text=_TEXT).SerializeToString(),
    ),
    "gRPC: 1,000,000 ids to detokenize": (
        f"{SERVICE}/Detokenize",
        pb.DetokenizeRequest(token_ids=[7] * 1_000_000).SerializeToString(),
    ),
    "gRPC: 200,000 parameters": _parameters(),
    "gRPC: 2,000,000 empty inputs": (INFER, b"\x2a\x00" * 2_000_000),
}

CASES = tuple(
    Case(name=name, send=calls(*message), short=False) for name, message in _MESSAGES.items()
)
