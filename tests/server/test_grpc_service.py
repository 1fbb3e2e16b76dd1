"""The service's own duties, over an engine whose answers are known."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import sys
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnattainableTargetError,
    UnknownModelError,
)
from octavo.engine.input.targets import Targets
from octavo.engine.input.tokenization import AS_THE_MODEL_WANTS
from octavo.engine.process.interpreter_share import LOOP_SLACK_S, SWITCH_S, timer_slack_s
from octavo.engine.process.own_process import ServingProcess
from octavo.engine.request import Priority
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.server import serve
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.serve import HEALTH_PERIOD_S, Ending, OctavoServer
from octavo.server.serve_config import ServeConfig

GENERATE = "/octavo.v1.OctavoService/Generate"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def raw_error(stand: Any, message: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stand.channel.unary_unary(GENERATE)(message)
    return caught.value


def details(error: grpc.aio.AioRpcError, kind: Any) -> list[Any]:
    found = []
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Is(kind.DESCRIPTOR):
                    found.append(kind())
                    detail.Unpack(found[-1])
    return found


async def health(stand: Any) -> int:
    stub = health_pb2_grpc.HealthStub(stand.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest())).status


def test_a_stream_gives_deltas_and_ends_with_usage_and_timings(on_stand):
    async def scenario(stand):
        method = stand.channel.unary_stream(
            GENERATE + "Stream", response_deserializer=pb.GenerateResponse.FromString
        )
        request = pb.GenerateRequest(prompt="x", sampling_params=pb.SamplingParams(max_tokens=3))
        messages = [message async for message in method(request.SerializeToString())]
        assert [list(message.outputs[0].token_ids) for message in messages] == [[1], [2], [3]]
        assert [message.finished for message in messages] == [False, False, True]
        assert [list(message.prompt_token_ids) for message in messages] == [[7, 8], [], []]
        assert not messages[0].HasField("usage")
        assert messages[-1].usage == pb.Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=3)
        assert messages[-1].timings.first_token_s == 1.0
        assert messages[-1].timings.tpot_s == 1.0
        assert messages[-1].outputs[0].finish_reason == pb.FINISH_REASON_LENGTH

    on_stand(scenario)


def test_cumulative_streams_count_each_token_once(on_stand):
    async def scenario(stand):
        params = SamplingParams(max_tokens=3)
        outputs = [
            output.outputs[0].token_ids
            async for output in stand.client.stream(
                "x", params, output_kind=RequestOutputKind.CUMULATIVE
            )
        ]
        assert outputs == [[1], [1, 2], [1, 2, 3]]

    on_stand(scenario)


def test_every_field_of_a_request_reaches_the_engine(on_stand):
    async def scenario(stand):
        params = SamplingParams(
            n=2, presence_penalty=0.1, frequency_penalty=-0.2, repetition_penalty=1.3,
            temperature=0.4, top_p=0.5, top_k=6, min_p=0.07, seed=0, stop=["a", "b"],
            stop_token_ids=[3], ignore_eos=True, max_tokens=2, min_tokens=1, logprobs=0,
            prompt_logprobs=0, logit_bias={5: -1.5}, allowed_token_ids=[1, 2], bad_words=["c"],
            skip_special_tokens=False, include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        await stand.client.generate(
            [1, 2], params, request_id="r", model="counting", priority="high", tenant="t",
            cache_salt="s", ttft_target_ms=5.0, tpot_target_ms=6.0, e2e_target_ms=7000.0,
        )  # fmt: skip
        assert stand.engine.seen == [
            {
                "prompt": [1, 2], "params": params, "id": "r", "priority": Priority.HIGH,
                "timeout_s": None, "tenant": "t", "cache_salt": "s",
                "targets": Targets(ttft_target_s=0.005, tpot_target_s=0.006, e2e_target_s=7.0),
                "tokenization": AS_THE_MODEL_WANTS, "pooling": None, "generated": [],
            }
        ]  # fmt: skip

    on_stand(scenario)


def test_no_limit_of_tokens_is_not_the_default_limit(on_stand):
    async def scenario(stand):
        with contextlib.suppress(OctavoError):
            await stand.client.generate("x", SamplingParams(max_tokens=None))
        await stand.client.generate("x")
        # Tried again in between: an engine that ends a request without an answer may be going down.
        most = [seen["params"].max_tokens for seen in stand.engine.seen]
        assert (most[0], most[-1]) == (None, 16)

    on_stand(scenario)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(prompt="x", prompt_token_ids=pb.TokenIds(ids=[1])), "prompt"),
        (pb.GenerateRequest(prompt="x", request_id=""), "request_id"),
        (pb.GenerateRequest(prompt="x", request_id="r" * 257), "request_id"),
        (pb.GenerateRequest(prompt="x", tenant="t" * 257), "tenant"),
        (pb.GenerateRequest(prompt="x", priority=9), "priority"),  # type: ignore[arg-type]
        (pb.GenerateRequest(prompt="x", timeout_s=math.nan), "timeout_s"),
        (pb.GenerateRequest(prompt="x", ttft_target_ms=0.0), "ttft_target_ms"),
        (pb.GenerateRequest(prompt="x", tpot_target_ms=math.inf), "tpot_target_ms"),
        (pb.GenerateRequest(prompt="x", e2e_target_ms=-1.0), "e2e_target_ms"),
        *(
            (pb.GenerateRequest(prompt="x", sampling_params=pb.SamplingParams(**values)), field)
            for values, field in (
                ({"temperature": math.nan}, "temperature"),
                ({"temperature": -0.1}, "temperature"),
                ({"top_p": 0.0}, "top_p"),
                ({"max_tokens": 0}, "max_tokens"),
                ({"max_tokens": 4, "unlimited_tokens": True}, "max_tokens"),
                ({"n": 65}, "n"),
                ({"n": 2, "temperature": 0.0}, "n"),
                ({"logprobs": 21}, "logprobs"),
                ({"stop": [""]}, "stop"),
                ({"seed": -2}, "seed"),
                ({"logit_bias": {1: math.inf}}, "logit_bias"),
                ({"allowed_token_ids": pb.TokenIds()}, "allowed_token_ids"),
                ({"structured_outputs": pb.StructuredOutputs()}, "structured_outputs"),
                (
                    {"structured_outputs": pb.StructuredOutputs(json="{")},
                    "structured_outputs.json",
                ),
                ({"output_kind": 7}, "output_kind"),
            )
        ),
    ],
)
def test_bad_input_is_an_invalid_argument_that_names_its_field(on_stand, request_, field):
    async def scenario(stand):
        error = await raw_error(stand, request_.SerializeToString())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        [bad_request] = details(error, error_details_pb2.BadRequest)
        assert [violation.field for violation in bad_request.field_violations] == [field]
        assert field in error.details()
        assert not stand.engine.seen

    on_stand(scenario)


@pytest.mark.parametrize("message", [b"\x1a\x02\xff\xfe", b"\xff\xff", b"\x1a\x7f"])
def test_malformed_bytes_are_refused_and_the_server_lives(on_stand, message):
    async def scenario(stand):
        error = await raw_error(stand, message)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "UTF-8" in error.details()
        assert (await stand.client.generate("x")).finished

    on_stand(scenario)


def test_a_message_over_the_limit_is_refused_with_its_size(on_stand):
    async def scenario(stand):
        with pytest.raises(InvalidRequestError, match="at most 4194304 bytes") as caught:
            await stand.client.generate("x" * 5_000_000)
        assert caught.value.field == "message"
        assert (await stand.client.generate("x")).finished

    on_stand(scenario)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (InvalidRequestError("top_k", -5, "≥ 0"), grpc.StatusCode.INVALID_ARGUMENT),
        (UnknownModelError("model", "x", "'y'"), grpc.StatusCode.NOT_FOUND),
        (OverloadedError("queue is full", 1.25), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (
            UnattainableTargetError("ttft_target_s", 0.01, 0.0834),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
        (DeadlineExceededError("too late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (EngineDeadError("it broke"), grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_an_engine_error_keeps_its_type_message_and_status(on_stand, failure, code):
    async def scenario(stand):
        stand.engine.failure = failure
        with pytest.raises(type(failure)) as caught:
            await stand.client.generate("x")
        assert type(caught.value) is type(failure)
        assert str(caught.value) == str(failure)
        request = pb.GenerateRequest(prompt="x")
        assert (await raw_error(stand, request.SerializeToString())).code() is code

    on_stand(scenario)


def test_an_overload_says_when_to_come_back(on_stand):
    async def scenario(stand):
        stand.engine.failure = OverloadedError("queue is full", 1.25)
        error = await raw_error(stand, pb.GenerateRequest(prompt="x").SerializeToString())
        [retry] = details(error, error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToMilliseconds() == 1250
        [info] = details(error, error_details_pb2.ErrorInfo)
        assert (info.domain, info.reason) == ("octavo", "OVERLOADED")

    on_stand(scenario)


def test_a_target_that_no_idle_server_meets_says_the_least_and_no_time(on_stand):
    async def scenario(stand):
        stand.engine.failure = UnattainableTargetError("ttft_target_s", 0.01, 0.0834)
        error = await raw_error(stand, pb.GenerateRequest(prompt="x").SerializeToString())
        assert not details(error, error_details_pb2.RetryInfo)
        [info] = details(error, error_details_pb2.ErrorInfo)
        assert info.reason == "UNATTAINABLE_TARGET"
        assert info.metadata["least_s"] == "0.0834"
        [request] = details(error, error_details_pb2.BadRequest)
        assert request.field_violations[0].field == "ttft_target_s"
        assert stand.server.front.stats.refusals["unattainable_target"] == 1

    on_stand(scenario)


def test_an_unexpected_exception_is_internal_and_leaks_nothing(on_stand, caplog):
    async def scenario(stand):
        stand.engine.failure = RuntimeError("the secret")
        error = await raw_error(stand, pb.GenerateRequest(prompt="x").SerializeToString())
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details()
        incident = error.details().split("incident ")[1].split()[0]
        assert incident in caplog.text
        stand.engine.failure = None
        assert (await stand.client.generate("x")).finished

    on_stand(scenario)


def test_a_closed_stream_ends_its_request(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        stream = stand.client.stream("x", request_id="r")
        await anext(stream)
        assert list(stand.engine.live.values()) == [("", "r")]
        await stream.aclose()
        await stand.until(lambda: not stand.engine.live)

    on_stand(scenario)


def test_a_cancelled_unary_call_ends_its_request(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        call = asyncio.create_task(stand.client.generate("x"))
        await stand.until(lambda: bool(stand.engine.live))
        call.cancel()
        await stand.until(lambda: not stand.engine.live)

    on_stand(scenario)


def test_the_calls_deadline_is_the_requests(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        with pytest.raises(DeadlineExceededError):
            # Long enough for a busy machine to bring the call to the server before it ends.
            await stand.client.generate("x", timeout_s=1.5)
        assert 0 < stand.engine.seen[0]["timeout_s"] < 10
        await stand.until(lambda: not stand.engine.live)

    on_stand(scenario)


def test_the_earlier_of_both_deadlines_counts(on_stand):
    async def scenario(stand):
        request = pb.GenerateRequest(prompt="x", timeout_s=500.0).SerializeToString()
        await stand.channel.unary_unary(GENERATE)(request, timeout=5000)
        await stand.channel.unary_unary(GENERATE)(request, timeout=50)
        first, second = (seen["timeout_s"] for seen in stand.engine.seen)
        assert first == 500.0
        assert 0 < second < 100

    on_stand(scenario)


def test_two_requests_in_flight_may_share_an_id(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        stream = stand.client.stream("x", request_id="r")
        await anext(stream)
        other = await stand.client.generate("x", SamplingParams(max_tokens=1), request_id="r")
        assert (other.request_id, other.finished) == ("r", True)
        assert await stand.client.abort("r")
        assert not await stand.client.abort("unknown")
        with pytest.raises(InvalidRequestError, match="request_id"):
            await stand.client.abort("")
        await stream.aclose()

    on_stand(scenario)


def test_health_follows_the_engine(on_stand):
    async def scenario(stand):
        assert await health(stand) == SERVING
        stand.engine.is_healthy = False
        async with asyncio.timeout(20 * HEALTH_PERIOD_S):
            while await health(stand) == SERVING:
                await asyncio.sleep(HEALTH_PERIOD_S / 5)
        assert await health(stand) == NOT_SERVING

    on_stand(scenario)


@pytest.mark.parametrize("before_s", [0.005, SWITCH_S / 2])
def test_no_thread_waits_longer_for_the_interpreter_than_serving_allows(on_stand, before_s):
    async def scenario(stand):
        # The interpreter keeps whole microseconds.
        assert sys.getswitchinterval() == pytest.approx(min(before_s, SWITCH_S), abs=1.5e-6)
        # Nor does the engine's thread wait as long as the event loop, where that can be said.
        assert timer_slack_s() in (LOOP_SLACK_S, None)

    was_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(before_s)
    try:
        on_stand(scenario, process=ServingProcess())
    finally:
        sys.setswitchinterval(was_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_before_the_model_is_loaded_calls_are_unavailable(on_stand):
    async def scenario(stand):
        loading = OctavoServer(ServeConfig(grpc_port=0))
        async with grpc.aio.insecure_channel((await loading.bind()).grpc) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(GENERATE)(b"")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await loading.drain_and_stop()

    on_stand(scenario)


def test_a_drain_refuses_new_work_and_finishes_the_old(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        stream = stand.client.stream("x", SamplingParams(max_tokens=3))
        outputs = [await anext(stream)]
        stop = asyncio.create_task(stand.server.drain_and_stop())
        async with asyncio.timeout(20):
            while await health(stand) == SERVING:
                await asyncio.sleep(0.005)
        with pytest.raises(EngineDeadError, match="draining"):
            await stand.client.generate("x")
        stand.engine.gate.set()
        outputs += [output async for output in stream]
        assert [output.outputs[0].token_ids for output in outputs] == [[1], [2], [3]]
        await stop
        assert not stand.engine.is_ready

    on_stand(scenario)


def test_a_second_signal_does_not_wait_for_what_is_in_flight(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        stream = stand.client.stream("x")
        await anext(stream)
        hurry = asyncio.Event()
        hurry.set()
        await stand.server.drain_and_stop(hurry=hurry)
        assert not stand.engine.live
        with pytest.raises(OctavoError):
            await anext(stream)

    on_stand(scenario)


@pytest.mark.parametrize(
    ("is_stopped", "ending"), [(True, Ending.COMPILING), (False, Ending.HANGING)]
)
def test_an_engine_that_does_not_end_is_left_and_said_what_it_is_at(
    on_stand, monkeypatch, is_stopped, ending
):
    async def scenario(stand):
        left = asyncio.Event()
        monkeypatch.setattr(stand.engine, "shutdown", left.wait)
        monkeypatch.setattr(stand.engine, "is_stopped", is_stopped, raising=False)
        assert await stand.server.drain_and_stop() is ending
        left.set()

    monkeypatch.setattr(serve, "ENGINE_STOP_S", 0.02)
    on_stand(scenario)


def test_two_servers_never_share_a_port(on_stand):
    async def scenario(stand):
        port = int(stand.address.rsplit(":", 1)[1])
        with pytest.raises(OctavoError, match=f"grpc_port = '127.0.0.1:{port}'"):
            await OctavoServer(ServeConfig(grpc_port=port)).bind()

    on_stand(scenario)


def test_tokens_and_text_go_both_ways(on_stand):
    async def scenario(stand):
        assert await stand.client.tokenize("ab") == [97, 98]
        assert await stand.client.detokenize([97, 98]) == "ab"
        with pytest.raises(InvalidRequestError, match="0 to 999"):
            await stand.client.detokenize([1000])
        assert (await stand.client.load()).num_total_pages == 8

    on_stand(scenario)


def test_load_tells_the_queues_and_when_a_request_would_have_its_first_token(on_stand):
    async def scenario(stand):
        load = await stand.client.load(num_prompt_tokens=6, priority="high")
        assert load.predicted_ttft_s == 1.5
        assert list(load.queues) == [
            pb.QueueLoad(
                priority=pb.PRIORITY_HIGH, num_waiting=2, oldest_s=0.5, num_prompt_tokens=9
            )
        ]
        with pytest.raises(InvalidRequestError, match="num_prompt_tokens = 0"):
            await stand.client.load(num_prompt_tokens=0)

    on_stand(scenario)


def test_targets_may_come_as_metadata_and_fields_go_first(on_stand):
    async def scenario(stand):
        message = pb.GenerateRequest(prompt="x", tpot_target_ms=40.0).SerializeToString()
        call = stand.channel.unary_unary(GENERATE)
        await call(message, metadata=(("x-slo-ttft-ms", "250"), ("x-slo-tpot-ms", "9")))
        assert stand.engine.seen[-1]["targets"] == Targets(ttft_target_s=0.25, tpot_target_s=0.04)
        for bad in ("soon", "nan", "0"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message, metadata=(("x-slo-ttft-ms", bad),))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            (request,) = details(caught.value, error_details_pb2.BadRequest)
            assert request.field_violations[0].field == "x-slo-ttft-ms"

    on_stand(scenario)
