"""What HTTP does when the engine drains, hangs, breaks or refuses: by hand-made engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.engine.errors import (
    InvalidConfigError,
    OverloadedError,
    StepFailedError,
    UnattainableTargetError,
)
from octavo.engine.input.targets import Targets
from octavo.engine.input.tokenization import Tokenization
from octavo.engine.request import Priority
from octavo.server.serve import HEALTH_PERIOD_S, OctavoServer
from octavo.server.serve_config import ServeConfig

ASK = {"prompt": "x", "max_tokens": 3}


def client_of(stand) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stand.http, timeout=20)


async def status(client: httpx.AsyncClient, path: str) -> int:
    return (await client.get(path)).status_code


def test_a_loading_server_lives_and_is_not_ready(on_stand):
    async def scenario(stand):
        loading = OctavoServer(ServeConfig(grpc_port=0, http_port=0))
        url = (await loading.bind()).http
        async with httpx.AsyncClient(base_url=url) as client:
            assert await status(client, "/health") == 200
            assert await status(client, "/ready") == 503
            assert await status(client, "/metrics") == 200
            for path in ("/v1/models", "/v1/load"):
                answer = await client.get(path)
                assert answer.status_code == 503
                told = "the server is starting: the model is still loading"
                assert answer.json()["error"]["message"] == told
            answer = await client.post("/v1/completions", json=ASK)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "starting"
        await loading.drain_and_stop()

    on_stand(scenario)


def test_every_header_and_field_reaches_the_engine(on_stand):
    async def scenario(stand):
        headers = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "40", "x-slo-e2e-ms": "9000"}
        body = ASK | {
            "priority": "realtime", "timeout_s": 5, "tenant": "t", "cache_salt": "s", "top_k": 3,
            "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1, "stop_token_ids": [5],
            "allowed_token_ids": [5, 6], "bad_words": "no", "ignore_eos": True, "stop": ["a", "b"],
            "skip_special_tokens": False, "include_stop_str_in_output": True, "user": "u",
            "n": 2, "temperature": 0.4, "top_p": 0.5, "seed": 0, "presence_penalty": 0.1,
            "frequency_penalty": -0.2, "logit_bias": {"5": -1.5},
            "truncate_prompt_tokens": 9, "truncation_side": "right",
        }  # fmt: skip
        async with client_of(stand) as client:
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
        [seen] = stand.engine.seen
        params = seen.pop("params")
        assert seen == {
            "prompt": "x", "id": answer.headers["x-request-id"], "priority": Priority.REALTIME,
            "timeout_s": 5.0, "tenant": "t", "cache_salt": "s",
            "targets": Targets(ttft_target_s=0.25, tpot_target_s=0.04, e2e_target_s=9.0),
            "tokenization": Tokenization(truncate_prompt_tokens=9, truncation_side="right"),
            "pooling": None,
            "generated": (),
        }  # fmt: skip
        assert (params.top_k, params.min_p, params.repetition_penalty) == (3, 0.1, 1.2)
        assert (params.min_tokens, params.stop_token_ids, params.stop) == (1, (5,), ("a", "b"))
        assert (params.allowed_token_ids, params.bad_words) == ((5, 6), ("no",))
        assert (params.n, params.temperature, params.top_p, params.seed) == (2, 0.4, 0.5, 0)
        assert (params.presence_penalty, params.frequency_penalty) == (0.1, -0.2)
        assert dict(params.logit_bias) == {5: -1.5}
        assert params.ignore_eos
        assert params.include_stop_str_in_output
        assert not params.skip_special_tokens

    on_stand(scenario, http_port=0)


def test_a_drain_refuses_new_work_and_finishes_the_old(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        async with client_of(stand) as client:
            stream = asyncio.create_task(
                client.post("/v1/completions", json=ASK | {"stream": True})
            )
            unary = asyncio.create_task(client.post("/v1/completions", json=ASK))
            await stand.until(lambda: len(stand.engine.live) == 2)
            stop = asyncio.create_task(stand.server.drain_and_stop())
            while await status(client, "/ready") == 200:
                await asyncio.sleep(0.005)
            assert await status(client, "/health") == 200
            refused = await client.post("/v1/completions", json=ASK)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["type"] == "unavailable_error"
            assert not stop.done()
            stand.engine.gate.set()
            assert (await unary).json()["choices"][0]["text"] == "1 2 3 "
            assert (await stream).text.endswith("data: [DONE]\n\n")
            await stop
            assert not stand.engine.is_ready

    on_stand(scenario, http_port=0)


def test_what_outlasts_the_drain_is_cut_off(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        async with client_of(stand) as client:
            calls = [
                asyncio.create_task(client.post("/v1/completions", json=ASK | {"stream": stream}))
                for stream in (True, False)
            ]
            await stand.until(lambda: len(stand.engine.live) == 2)
            async with asyncio.timeout(15):
                await stand.server.drain_and_stop()
            assert not stand.engine.live
            stream, unary = await asyncio.gather(*calls)
            assert unary.status_code == 503
            for text in (unary.text, stream.text):
                assert "the server stopped before the answer was complete" in text
            assert "[DONE]" not in stream.text

    on_stand(scenario, http_port=0, drain_timeout_s=0.1)


def test_a_stuck_engine_is_dead_until_it_moves(on_stand):
    async def scenario(stand):
        async with client_of(stand) as client:
            assert await status(client, "/health") == 200
            stand.engine.is_in_turn = True
            async with asyncio.timeout(20 * HEALTH_PERIOD_S):
                while await status(client, "/health") == 200:
                    await asyncio.sleep(0.05)
            answer = await client.get("/health")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            assert "stuck" in answer.json()["error"]["message"]
            assert await status(client, "/ready") == 503
            stand.engine.num_turns += 1
            stand.engine.is_in_turn = False
            async with asyncio.timeout(20 * HEALTH_PERIOD_S):
                while await status(client, "/health") == 503:
                    await asyncio.sleep(0.05)
            assert await status(client, "/ready") == 200

    on_stand(scenario, http_port=0, stuck_after_s=0.8)


def test_a_stuck_engine_that_does_not_move_is_given_up(on_stand):
    async def scenario(stand):
        async with client_of(stand) as client:
            stand.engine.gate.clear()
            call = asyncio.create_task(
                client.post("/v1/completions", json={"model": "counting", "prompt": "a"})
            )
            while not stand.engine.live:
                await asyncio.sleep(0.01)
            stand.engine.is_in_turn = True
            async with asyncio.timeout(40 * HEALTH_PERIOD_S):
                answer = await call
            assert answer.status_code == 503
            assert "the engine hangs in a step" in answer.json()["error"]["message"]
            assert await status(client, "/health") == 503

    on_stand(scenario, http_port=0, stuck_after_s=0.2)


def test_a_broken_engine_is_dead(on_stand):
    async def scenario(stand):
        stand.engine.is_healthy = False
        async with client_of(stand) as client:
            assert await status(client, "/health") == await status(client, "/ready") == 503
            assert "broken" in (await client.get("/ready")).json()["error"]["message"]

    on_stand(scenario, http_port=0)


def test_a_port_that_listens_no_more_is_a_dead_server(on_stand):
    async def scenario(stand):
        stub = health_pb2_grpc.HealthStub(stand.channel)
        asked = health_pb2.HealthCheckRequest()
        assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        stand.server._http._server.should_exit = True
        async with asyncio.timeout(20 * HEALTH_PERIOD_S):
            while (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.05)

    on_stand(scenario, http_port=0)


def test_a_grpc_server_that_ended_is_a_dead_server(on_stand):
    async def scenario(stand):
        async with client_of(stand) as client:
            assert await status(client, "/health") == 200
            await stand.server._grpc.stop(0)
            async with asyncio.timeout(20 * HEALTH_PERIOD_S):
                while await status(client, "/health") == 200:
                    await asyncio.sleep(0.05)
            answer = await client.get("/ready")
            assert answer.status_code == 503
            assert "listens no more" in answer.json()["error"]["message"]

    on_stand(scenario, http_port=0)


def test_more_requests_than_the_most_are_refused_at_once_for_both_protocols(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        stream = stand.client.stream("x")
        await anext(stream)
        async with client_of(stand) as client:
            answer = await client.post("/v1/completions", json=ASK)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            stand.engine.gate.set()
            async for _ in stream:
                pass
            await stand.until(lambda: not stand.engine.live)
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200

    on_stand(scenario, http_port=0, max_concurrent_requests=1)


def test_requests_of_low_priority_leave_places_to_others(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        streams = [stand.client.stream("x", priority="low") for _ in range(7)]
        for stream in streams:
            await anext(stream)
        async with client_of(stand) as client:
            low = await client.post("/v1/completions", json={**ASK, "priority": "low"})
            assert low.status_code == 429
            assert "7 requests, its most for low priority" in low.json()["error"]["message"]
            streams.append(stand.client.stream("x"))
            await anext(streams[-1])
            assert (await client.post("/v1/completions", json=ASK)).status_code == 429
        stand.engine.gate.set()
        for stream in streams:
            async for _ in stream:
                pass

    on_stand(scenario, http_port=0, max_concurrent_requests=8)


def test_an_overloaded_engine_says_when_to_come_again(on_stand):
    async def scenario(stand):
        async def refuse(*args, **rest):
            raise OverloadedError("too much at once", 2.25)
            yield

        stand.engine.generate = refuse
        async with client_of(stand) as client:
            for stream in (False, True):
                answer = await client.post("/v1/completions", json=ASK | {"stream": stream})
                assert answer.status_code == 429
                assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (
                    "3", "2250",
                )  # fmt: skip
                assert answer.json()["error"]["code"] == "overloaded"

    on_stand(scenario, http_port=0)


def test_a_target_that_no_idle_server_meets_has_a_kind_of_its_own(on_stand):
    async def scenario(stand):
        async def refuse(*args, **rest):
            raise UnattainableTargetError("ttft_target_s", 0.01, 0.0834)
            yield

        stand.engine.generate = refuse
        async with client_of(stand) as client:
            for stream in (False, True):
                answer = await client.post("/v1/completions", json=ASK | {"stream": stream})
                assert answer.status_code == 422
                assert not {"retry-after", "retry-after-ms"} & answer.headers.keys()
                error = answer.json()["error"]
                assert error["code"] == "unattainable_target"
                assert error["param"] == "ttft_target_s"
                assert "at least 0.0834 s" in error["message"]
            page = (await client.get("/metrics")).text
        assert 'octavo:requests_refused_total{reason="unattainable_target"} 2.0' in page

    on_stand(scenario, http_port=0)


@pytest.mark.parametrize("bad", ["0", "-1", "nan", "inf", "86400001", "soon"])
def test_targets_that_are_none_are_refused_by_name(on_stand, bad):
    async def scenario(stand):
        async with client_of(stand) as client:
            for name in ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms"):
                answer = await client.post("/v1/completions", json=ASK, headers={name: bad})
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == name
                assert "at most 86400000 (a day)" in answer.json()["error"]["message"]
        assert not stand.engine.seen

    on_stand(scenario, http_port=0)


def test_openais_client_knows_refusals_by_their_types(on_stand, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a-good-token\n")

    async def scenario(stand):
        def client(token: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url=f"{stand.http}/v1", api_key=token, max_retries=0)

        ask = {"model": "counting", "prompt": "x", "max_tokens": 3}
        async with client("another-token") as stranger, client("a-good-token") as user:
            with pytest.raises(openai.AuthenticationError) as refused:
                await stranger.completions.create(**ask)
            assert refused.value.code == "invalid_api_key"
            assert (await user.completions.create(**ask)).choices[0].text == "1 2 3 "
            stand.engine.failure = OverloadedError("too much at once", 2.25)
            with pytest.raises(openai.RateLimitError) as full:
                await user.completions.create(**ask)
            assert full.value.response.headers["retry-after-ms"] == "2250"
            stand.engine.failure = StepFailedError("the device step failed")
            with pytest.raises(openai.InternalServerError):
                await user.completions.create(**ask)
            with pytest.raises(openai.APIError, match="the device step failed"):
                async for _ in await user.completions.create(**ask, stream=True):
                    pass

    on_stand(scenario, http_port=0, token_file=str(tokens))


def test_openais_client_waits_as_long_as_it_is_told_and_asks_again(on_stand):
    async def scenario(stand):
        refusals = [OverloadedError("too much at once", 0.01)] * 2
        generate = stand.engine.generate

        async def refuse_twice(*args, **rest):
            if refusals:
                raise refusals.pop()
            async for output in generate(*args, **rest):
                yield output

        stand.engine.generate = refuse_twice
        url = f"{stand.http}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=2) as client:
            answer = await client.completions.create(model="counting", prompt="x", max_tokens=2)
            assert answer.choices[0].text == "1 2 "
        assert not refusals

    on_stand(scenario, http_port=0)


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(on_stand):
    async def scenario(stand):
        stand.engine.failure = StepFailedError("the device step failed")
        async with client_of(stand) as client:
            answer = await client.post("/v1/completions", json=ASK | {"stream": True})
            events = [event for event in answer.text.split("\n\n") if event]
            assert len(events) == 2
            assert "the device step failed" in events[1]
            assert "[DONE]" not in answer.text
            whole = await client.post("/v1/completions", json=ASK)
            assert (whole.status_code, whole.json()["error"]["code"]) == (500, "step_failed")

    on_stand(scenario, http_port=0)


def test_a_bug_is_an_incident_that_tells_nothing(on_stand, caplog):
    async def scenario(stand):
        stand.engine.failure = RuntimeError("secret detail")
        async with client_of(stand) as client:
            whole = await client.post("/v1/completions", json=ASK)
            stream = await client.post("/v1/completions", json=ASK | {"stream": True})
            assert whole.status_code == 500
            for text in (whole.text, stream.text):
                assert "incident" in text
                assert "secret detail" not in text
            number = whole.json()["error"]["message"].split()[3]
            assert f"incident {number}" in caplog.text
            stand.engine.failure = None
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200

    on_stand(scenario, http_port=0)


def test_a_request_may_not_take_longer_than_the_server_allows(on_stand):
    async def scenario(stand):
        async with client_of(stand) as client:
            for timeout_s, seen in ((None, 7.0), (3.0, 3.0), (9.0, 7.0)):
                await client.post("/v1/completions", json=ASK | {"timeout_s": timeout_s})
                assert stand.engine.seen[-1]["timeout_s"] == seen

    on_stand(scenario, http_port=0, request_timeout_s=7.0)


def test_slow_senders_are_let_go(on_stand):
    """Headers that drip, bodies that never come, connections that say nothing."""

    async def scenario(stand):
        host, port = stand.http.removeprefix("http://").split(":")
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n"
        for sent, answered in (
            (b"", b""),
            (head, b""),
            (head + b"content-length: 5\r\n\r\n{", b"408"),
            (head + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"408"),
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(20):
                answer = await reader.read()
            writer.close()
            if answered:
                assert answer.startswith(b"HTTP/1.1 " + answered)
                assert b"request_timeout" in answer
            else:
                assert answer == b""

    on_stand(scenario, http_port=0, receive_timeout_s=0.3)


def test_a_client_that_reads_nothing_holds_only_itself(on_stand):
    async def scenario(stand):
        host, port = stand.http.removeprefix("http://").split(":")
        with contextlib.closing(socket.create_connection((host, int(port)))) as deaf:
            body = b'{"prompt":"x","max_tokens":100000,"stream":true}'
            deaf.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            await stand.until(lambda: len(stand.engine.live) == 1)
            async with client_of(stand) as client:
                for _ in range(20):
                    assert (await client.post("/v1/completions", json=ASK)).status_code == 200
            assert len(stand.engine.live) == 1
        await stand.until(lambda: not stand.engine.live)

    on_stand(scenario, http_port=0)


def test_a_streams_events_do_not_wait_for_acknowledgements(on_stand):
    async def scenario(stand):
        async with client_of(stand) as client:
            await client.get("/health")
            [connection] = stand.server._http._server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    on_stand(scenario, http_port=0)


def test_two_servers_never_share_a_port(on_stand):
    async def scenario(stand):
        port = int(stand.http.rsplit(":", 1)[1])
        other = OctavoServer(ServeConfig(grpc_port=0, http_port=port))
        with pytest.raises(InvalidConfigError, match=f"http_port = '127.0.0.1:{port}'"):
            await other.bind()
        await other.drain_and_stop()

    on_stand(scenario, http_port=0)
