"""Clients of a server that is told of tools, and of one that keeps things for two tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

TOKENS = {"a": "token-of-tenant-a", "b": "token-of-tenant-b"}
"""Tenant -> its token."""


@pytest.fixture(scope="session")
def tools_client(tools_live: Any) -> Iterator[openai.OpenAI]:
    """OpenAI's client of it."""
    with openai.OpenAI(base_url=f"{tools_live.http}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def keeps_live(
    tools_args: tuple[str, ...],
    server_process: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A server process of two tenants that keeps a few responses, files and batches."""
    folder = tmp_path_factory.mktemp("keeps-live")
    tokens = folder / "tokens"
    tokens.write_text("".join(f"{tenant}:{token}\n" for tenant, token in TOKENS.items()))
    with server_process(
        *(*tools_args, "--token-file", str(tokens)),
        *("--responses-store-bytes", "200000", "--responses-store-entries", "8"),
        *("--batch-files-dir", str(folder / "batches"), "--batch-file-bytes", "6000000"),
        *("--batch-files-bytes", "9000000"),
        log=folder / "stderr",
    ) as process:
        yield process


@pytest.fixture(scope="session")
def tenants(keeps_live: Any) -> Iterator[dict[str, openai.OpenAI]]:
    """OpenAI's client of it, of each tenant."""
    clients = {
        tenant: openai.OpenAI(base_url=f"{keeps_live.http}/v1", api_key=token, max_retries=0)
        for tenant, token in TOKENS.items()
    }
    yield clients
    for client in clients.values():
        client.close()
