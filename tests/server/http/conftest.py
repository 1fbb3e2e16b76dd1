"""A server of the tiny model that is told of tools, in a template as Hermes and Qwen have it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

TEMPLATE = Path(__file__).parents[3] / "docs" / "hermes.jinja"
CONTEXT = 4096


@pytest.fixture(scope="session")
def tools_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for the descriptions of tools, each byte of which is a token."""
    directory = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(tiny_model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": CONTEXT})
    )
    return directory


@pytest.fixture(scope="session")
def tools_live(
    tools_model: Path,
    server_process: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A server process over it, shared by all tests that leave it as it was."""
    log = tmp_path_factory.mktemp("tools-live") / "stderr"
    with server_process(
        *("--model", str(tools_model), "--served-model-name", "tiny", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "256", "--max-model-len", str(CONTEXT)),
        *("--num-kv-pages", "1200", "--block-size", "16", "--warm-up", "coarse"),
        *("--fail-on-compile", "--chat-template", str(TEMPLATE)),
        log=log,
    ) as process:
        yield process


@pytest.fixture(scope="session")
def tools_client(tools_live: Any) -> Iterator[openai.OpenAI]:
    """OpenAI's client of it."""
    with openai.OpenAI(base_url=f"{tools_live.http}/v1", api_key="unused", max_retries=0) as client:
        yield client


TOKENS = {"a": "token-of-tenant-a", "b": "token-of-tenant-b"}
"""Tenant -> its token."""


@pytest.fixture(scope="session")
def keeps_live(
    tools_model: Path,
    server_process: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A server process of two tenants that keeps a few responses, files and batches."""
    folder = tmp_path_factory.mktemp("keeps-live")
    tokens = folder / "tokens"
    tokens.write_text("".join(f"{tenant}:{token}\n" for tenant, token in TOKENS.items()))
    with server_process(
        *("--model", str(tools_model), "--served-model-name", "tiny", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "256", "--max-model-len", str(CONTEXT)),
        *("--num-kv-pages", "1200", "--block-size", "16", "--warm-up", "coarse"),
        *("--fail-on-compile", "--chat-template", str(TEMPLATE), "--token-file", str(tokens)),
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
