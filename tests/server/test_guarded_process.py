"""A server process behind TLS and tokens: who gets in, what is logged, how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.engine.errors import EngineDeadError, UnauthenticatedError
from octavo.engine.sampling_params import SamplingParams
from octavo.server.client import OctavoClient

WAIT_S = 60
OLD, NEW = "old-token-0123456789", "new-token-0123456789"
SECRET_PROMPT = "what nobody may read"


@dataclass
class Guarded:
    process: Any
    tokens: Path
    ca: trustme.CA
    client_cert: trustme.LeafCert

    def http(self, token: str | None = OLD, *, with_cert: bool = True) -> httpx.Client:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if with_cert:
            self.client_cert.configure_cert(context)
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        url = self.process.http
        return httpx.Client(base_url=url, verify=context, headers=headers, timeout=WAIT_S)

    def channel(self, token: str | None = OLD, *, with_cert: bool = True) -> grpc.Channel:
        cert = self.client_cert
        own = (cert.private_key_pem.bytes(), cert.cert_chain_pems[0].bytes()) if with_cert else ()
        credentials = grpc.ssl_channel_credentials(self.ca.cert_pem.bytes(), *own)
        if token is not None:
            call = grpc.access_token_call_credentials(token)
            credentials = grpc.composite_channel_credentials(credentials, call)
        return grpc.secure_channel(self.process.grpc, credentials)


@pytest.fixture(scope="module")
def guarded(tiny_model, server_process, tiny_args, tmp_path_factory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    ca = trustme.CA()
    server_cert = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    server_cert.private_key_pem.write_to_path(folder / "key.pem")
    server_cert.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    tokens = folder / "tokens"
    tokens.write_text(OLD)
    (folder / "settings.yaml").write_text(
        f"model: {tiny_model}\n"
        f"tls_cert: {folder / 'cert.pem'}\n"
        f"tls_key: {folder / 'key.pem'}\n"
        f"tls_client_ca: {folder / 'ca.pem'}\n"
        f"token_file: {tokens}\n"
        "log_level: info\n"
        "log_format: text\n"
    )
    environ = {"OCTAVO_LOG_FORMAT": "json", "OCTAVO_CONFIG": str(folder / "settings.yaml")}
    with server_process(*tiny_args, log=folder / "log", environ=environ) as process:
        assert process.http.startswith("https://127.0.0.1:")
        yield Guarded(process, tokens, ca, ca.issue_cert("client.example"))


def test_a_token_and_a_certificate_open_both_protocols(guarded):
    with guarded.http() as client:
        ask = {"prompt": SECRET_PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=ask, headers={"x-request-id": "by-http"})
        text = answer.json()["choices"][0]["text"]
    with OctavoClient(channel=guarded.channel()) as client:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        output = client.generate(SECRET_PROMPT, params, request_id="by-grpc")
    assert output.outputs[0].text == text


@pytest.mark.parametrize("token", [None, NEW, OLD[:-1], "é" * 20])
def test_without_a_good_token_nobody_gets_in(guarded, token):
    headers = {} if token is None else {"authorization": f"Bearer {token}".encode()}
    with guarded.http(None) as client:
        for path in ("/v1/models", "/v1/load", "/metrics", "/openapi.json", "/nowhere"):
            answer = client.get(path, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"
        answer = client.post("/v1/completions", content=b"x" * 100_000, headers=headers)
        assert answer.status_code == 401
    if token is None or token.isascii():
        with OctavoClient(channel=guarded.channel(token)) as client:
            with pytest.raises(UnauthenticatedError):
                client.generate("x")
            with pytest.raises(UnauthenticatedError):
                list(client.stream("x"))


def test_health_needs_no_token(guarded):
    with guarded.http(None) as client:
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        assert client.get("/ping").status_code == 200
        for path in ("/version", "/server_info", "/tokenizer_info"):
            assert client.get(path).status_code == 401
    with guarded.channel(None) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_without_a_certificate_nobody_gets_in(guarded):
    with guarded.http(with_cert=False) as client, pytest.raises(httpx.TransportError):
        client.get("/health")
    with guarded.channel(with_cert=False) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(httpx.TransportError):
        httpx.get(guarded.process.http.replace("https", "http") + "/health")


def test_a_certificate_of_another_authority_opens_nothing(guarded):
    stranger = trustme.CA().issue_cert("client.example")
    forged = dataclasses.replace(guarded, client_cert=stranger)
    with forged.http() as client, pytest.raises(httpx.TransportError):
        client.get("/health")
    with forged.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_tokens_rotate_in_and_out_without_a_restart(guarded):
    def let_in(token: str) -> tuple[bool, bool]:
        with guarded.http(token) as client:
            by_http = client.get("/v1/models").status_code == 200
        with OctavoClient(channel=guarded.channel(token)) as client:
            try:
                client.load()
            except UnauthenticatedError:
                return by_http, False
        return by_http, True

    def rotate(*tokens: str, until: str, opens: bool) -> None:
        guarded.tokens.write_text("\n".join(tokens))
        end_s = time.monotonic() + WAIT_S
        while let_in(until) != (opens, opens):
            assert time.monotonic() < end_s
            time.sleep(0.1)

    assert let_in(OLD) == (True, True)
    rotate(OLD, NEW, until=NEW, opens=True)
    assert let_in(OLD) == (True, True)
    rotate(NEW, until=OLD, opens=False)
    assert let_in(NEW) == (True, True)
    rotate(OLD, NEW, until=OLD, opens=True)


def test_the_log_names_requests_and_keeps_their_text(guarded):
    text = guarded.process.stderr.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    ended = {line["request_id"]: line for line in lines if line["logger"] == "octavo.request"}
    for name in ("by-http", "by-grpc"):
        line = ended[name]
        assert (line["level"], line["finish_reason"]) == ("info", "length")
        assert (line["prompt_tokens"], line["generation_tokens"]) == (len(SECRET_PROMPT), 4)
        assert 0 < line["ttft_s"] <= line["e2e_s"]
    for secret in (SECRET_PROMPT, OLD, NEW):
        assert secret not in text


# The last test: it ends the module's server.
def test_sigterm_drains_both_protocols_and_exits_cleanly(guarded):
    params = SamplingParams(max_tokens=480, ignore_eos=True, temperature=0)
    body = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        grpc_client = stack.enter_context(OctavoClient(channel=guarded.channel()))
        http_client = stack.enter_context(guarded.http())
        streams = [grpc_client.stream("x", params) for _ in range(6)]
        firsts = [next(stream) for stream in streams]
        response = stack.enter_context(http_client.stream("POST", "/v1/completions", json=body))
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        guarded.process.popen.send_signal(signal.SIGTERM)
        for first, stream in zip(firsts, streams, strict=True):
            parts = [first, *stream]
            assert sum(len(part.outputs[0].token_ids) for part in parts) == 480
        assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert guarded.process.ended() == os.EX_OK
        with pytest.raises(EngineDeadError):
            grpc_client.generate("x")
