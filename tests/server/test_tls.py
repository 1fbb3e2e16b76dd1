"""TLS without client certificates: anybody may come, nobody may read along."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
import trustme

from octavo.client import AsyncOctavoClient, SamplingParams
from octavo.engine.errors import InvalidConfigError
from octavo.server.serve import OctavoServer
from octavo.server.serve_config import ServeConfig

TWO = SamplingParams(max_tokens=2)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    cert = authority.issue_cert("127.0.0.1")
    cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    return {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}


def test_who_trusts_the_authority_is_served_over_both_protocols(
    on_stand: Callable[..., None], authority: trustme.CA, files: dict[str, str]
) -> None:
    async def scenario(stand):
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        channel = grpc.aio.secure_channel(stand.address, credentials)
        async with AsyncOctavoClient(channel=channel) as client:
            assert (await client.generate("x", TWO)).outputs[0].token_ids == [1, 2]
        context = ssl.create_default_context()
        authority.configure_trust(context)
        assert stand.http.startswith("https://")
        async with httpx.AsyncClient(base_url=stand.http, verify=context) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert answer.json()["choices"][0]["text"] == "1 2 "

    on_stand(scenario, http_port=0, **files)


def test_without_tls_or_trust_there_is_no_connection(
    on_stand: Callable[..., None], files: dict[str, str]
) -> None:
    async def scenario(stand):
        stranger = grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())
        for channel in (stand.channel, grpc.aio.secure_channel(stand.address, stranger)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/octavo.v1.OctavoService/GetLoad")(b"")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await channel.close()
        for url in (stand.http, stand.http.replace("https", "http")):
            async with httpx.AsyncClient(base_url=url) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health")
        assert not stand.engine.seen

    on_stand(scenario, http_port=0, **files)


@pytest.mark.parametrize("spoilt", ["tls_cert", "tls_key"])
def test_files_that_do_not_fit_are_named_at_the_start(files: dict[str, str], spoilt: str) -> None:
    Path(files[spoilt]).write_text("nothing of use")
    with pytest.raises(InvalidConfigError, match="tls_cert"):
        OctavoServer(ServeConfig(grpc_port=0, **files))
