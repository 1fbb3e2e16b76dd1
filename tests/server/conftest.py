"""A server in this process over an engine that a person can work out by hand; a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import grpc
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from octavo.engine.config import EngineConfig
from octavo.engine.observability.load import EngineLoad
from octavo.engine.output.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.engine.process.own_process import ServingProcess
from octavo.engine.request import Priority
from octavo.engine.sampling_defaults import NO_DEFAULTS
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.scheduler.load import QueueLoad
from octavo.server.client import AsyncOctavoClient
from octavo.server.serve import Addresses, OctavoServer
from octavo.server.serve_config import ServeConfig


class CountingEngine:
    """Has AsyncEngine's methods; token k of any answer is k, its text "k ".

    Attributes:
        seen: keyword arguments of every `generate`.
        live: requests whose stream is open, by engine id: owner, and the id that outputs show.
        failure: raised instead of the second token, if set.
        gate: tokens after the first wait for it.
        given_up: what streams end with at their next token, once it was given up.
    """

    model_name = "counting"
    max_model_len = 64
    platform, num_devices = "cpu", 1

    def __init__(self) -> None:
        self.config = EngineConfig(model="counting", dtype="float32")
        self.dtype = "float32"
        self.sampling_defaults = NO_DEFAULTS
        self.engine = SimpleNamespace(
            num_rows=2, inputs=SimpleNamespace(generates=True, pooler=None)
        )
        self.model_config = SimpleNamespace(vocab_size=1000)
        self.tokenizer = SimpleNamespace(
            encode=lambda text, add_special_tokens=True: [ord(c) for c in text],
            decode=lambda ids, skip_special_tokens=True: "".join(map(chr, ids)),
            chat_template=None,
            model_type="",
        )
        self.is_ready = False
        self.is_healthy = True
        self.num_turns = 0
        self.is_in_turn = False
        self.seen: list[dict[str, Any]] = []
        self.live: dict[str, tuple[str, str]] = {}
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.given_up: Exception | None = None

    def give_up(self, error: Exception) -> None:
        self.is_healthy, self.given_up = False, error
        self.gate.set()

    async def start(self) -> None:
        self.is_ready = True

    async def shutdown(self, drain_s: float = 0.0) -> None:
        self.is_ready = False

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, is_cut: bool = False
    ) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def abort(self, request_id: str, owner: str = "") -> bool:
        return (owner, request_id) in self.live.values()

    def load(self, num_prompt_tokens: int = 1, priority: Priority = Priority.NORMAL) -> EngineLoad:
        figures: dict[str, Any] = {
            field.name: 0
            for field in dataclasses.fields(EngineLoad)
            if field.default is dataclasses.MISSING
        }
        figures |= {
            "queues": {priority: QueueLoad(num_waiting=2, oldest_s=0.5, num_prompt_tokens=9)},
            "predicted_ttft_s": num_prompt_tokens / 4,
            "num_running": len(self.live),
            "num_free_pages": 8 - len(self.live),
            "num_total_pages": 8,
            "kv_cache_usage": len(self.live) / 8,
            "steps_by_tokens": (0, 0),
        }
        return EngineLoad(**figures)

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        owner: str = "",
        trace_parent: str = "",
        **rest: Any,
    ) -> AsyncIterator[RequestOutput]:
        assert sampling_params is not None
        self.seen.append({"prompt": prompt, "params": sampling_params, "id": request_id, **rest})
        engine_id = f"counting-{len(self.seen)}"
        request_id = request_id or engine_id
        self.live[engine_id] = owner, request_id
        try:
            last = sampling_params.max_tokens or 0
            metrics = RequestMetrics(arrival_s=100.0, first_token_s=101.0)
            for k in range(1, last + 1):
                if k > 1:
                    await self.gate.wait()
                    if self.given_up is not None:
                        raise self.given_up
                    if self.failure is not None:
                        raise self.failure
                finished = k == last
                metrics.last_token_s = 100.0 + k
                delta = sampling_params.output_kind is RequestOutputKind.DELTA
                token_ids = [k] if delta else list(range(1, k + 1))
                if sampling_params.output_kind is RequestOutputKind.FINAL_ONLY and not finished:
                    continue
                yield RequestOutput(
                    request_id=request_id,
                    prompt=None,
                    prompt_token_ids=[7, 8],
                    prompt_logprobs=None,
                    outputs=[
                        CompletionOutput(
                            index=0,
                            text="".join(f"{token} " for token in token_ids),
                            token_ids=token_ids,
                            finish_reason="length" if finished else None,
                        )
                    ],
                    finished=finished,
                    metrics=metrics,
                    num_cached_tokens=1,
                    engine_id=engine_id,
                )
                await asyncio.sleep(0)
        finally:
            del self.live[engine_id]


@pytest.fixture
def counting_engine() -> CountingEngine:
    """An engine whose token k is k."""
    return CountingEngine()


class Stand:
    """An in-process server, its engine, and a client of it."""

    def __init__(self, addresses: Addresses, server: OctavoServer, engine: CountingEngine) -> None:
        self.address = addresses.grpc
        self.http = addresses.http
        self.server = server
        self.engine = engine
        self.client = AsyncOctavoClient(self.address)
        self.channel = grpc.aio.insecure_channel(self.address)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that other tasks bring about."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
def on_stand() -> Callable[..., None]:
    """Runs a coroutine function against a fresh server over a `CountingEngine`.

    Keyword arguments are the server's settings and, as `process`, those of the process.
    """

    def run(
        scenario: Callable[[Stand], Awaitable[None]],
        process: ServingProcess | None = None,
        **config: Any,
    ) -> None:
        async def main() -> None:
            engine = CountingEngine()
            settings = {"grpc_port": 0, "drain_timeout_s": 20.0} | config
            server = OctavoServer(ServeConfig(**settings), process=process)
            stand = Stand(await server.bind(), server, engine)
            await server.attach(engine)  # type: ignore[arg-type]
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(server.drain_and_stop)
                stack.push_async_callback(stand.channel.close)
                stack.push_async_callback(stand.client.close)
                async with asyncio.timeout(60):
                    await scenario(stand)

        asyncio.run(main())

    return run


@dataclass
class Process:
    """A server process."""

    popen: subprocess.Popen[str]
    grpc: str
    http: str
    stderr: Path

    def ended(self, timeout_s: float = 60.0) -> int:
        """Its exit status, once it has ended."""
        return self.popen.wait(timeout=timeout_s)


START_S = 300.0
"""For a server to be ready on a busy machine with cold caches."""


def _server_process(
    *args: str, log: Path, environ: dict[str, str] | None = None
) -> contextlib.AbstractContextManager[Process]:
    return listening("serve", "--quiet", *args, log=log, environ=environ)


@contextlib.contextmanager
def listening(
    *arguments: str, log: Path, environ: dict[str, str] | None = None
) -> Iterator[Process]:
    """An `octavo` command that serves on free ports, from ready until the block's end."""
    command = [sys.executable, "-m", "octavo.server.cli.main", *arguments]
    command += ["--grpc-port", "0", "--http-port", "0"]
    with log.open("w") as stderr:
        popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True,
            env=os.environ | (environ or {}),
        )  # fmt: skip
        try:
            assert popen.stdout is not None
            lines = read_lines(popen.stdout, 2)
            addresses = [lines.get(timeout=START_S) for _ in range(2)]
            assert all(addresses), log.read_text()
            grpc_address, http_url = [line.split()[-1] for line in addresses]
            yield Process(popen, grpc_address, http_url, log)
        finally:
            popen.kill()
            popen.communicate()


def read_lines(pipe: IO[str], count: int) -> queue.Queue[str]:
    """Its next lines as they come; empty ones after its end."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for _ in range(count):
            lines.put(pipe.readline())

    threading.Thread(target=read, daemon=True).start()
    return lines


TINY_ARGS = (
    *("--served-model-name", "tiny", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"),
    *("--max-model-len", "512", "--num-kv-pages", "160", "--block-size", "16"),
    *("--warm-up", "coarse", "--fail-on-compile"),
)


@pytest.fixture(scope="session")
def server_process() -> Callable[..., contextlib.AbstractContextManager[Process]]:
    """`octavo serve` with these arguments and free ports, from ready until the block's end."""
    return _server_process


@pytest.fixture(scope="session")
def tiny_args() -> tuple[str, ...]:
    """Engine arguments that make a tiny model's server ready soon."""
    return TINY_ARGS


@pytest.fixture(scope="session")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server process over the tiny model, shared by all tests that leave it as it was."""
    log = tmp_path_factory.mktemp("live") / "stderr"
    with _server_process("--model", str(tiny_model), *TINY_ARGS, log=log) as process:
        yield process


@pytest.fixture(scope="session")
def embeds(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The same of a server that generates and embeds."""
    log = tmp_path_factory.mktemp("embeds") / "stderr"
    args = ("--model", str(tiny_model), *TINY_ARGS, "--task", "both")
    with _server_process(*args, log=log) as process:
        yield process


TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
TINY_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in a Hugging Face directory: one token a byte, and a chat template."""
    from octavo.models.families.table import config_from_hf
    from octavo.models.loading.tensors import expected_shapes

    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG))
    rng = np.random.default_rng(0)
    save_file(
        {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in sorted(expected_shapes(config_from_hf(TINY_CONFIG)).items())
        },
        str(directory / "model.safetensors"),
    )
    tokens = ["<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(tokens[:2])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TINY_TEMPLATE})
    )
    return directory


TOOLS_TEMPLATE = Path(__file__).parents[2] / "docs" / "hermes.jinja"
TOOLS_CONTEXT = 4096


@pytest.fixture(scope="session")
def tools_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for the descriptions of tools, each byte of which is a token."""
    directory = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(tiny_model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": TOOLS_CONTEXT})
    )
    return directory


@pytest.fixture(scope="session")
def tools_args(tools_model: Path) -> tuple[str, ...]:
    """Arguments of a server of that model, told of tools in a template as Hermes and Qwen have."""
    return (
        *("--model", str(tools_model), "--served-model-name", "tiny", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "256", "--max-model-len", str(TOOLS_CONTEXT)),
        *("--num-kv-pages", "1200", "--block-size", "16", "--warm-up", "coarse"),
        *("--fail-on-compile", "--chat-template", str(TOOLS_TEMPLATE)),
    )


@pytest.fixture(scope="session")
def tools_live(
    tools_args: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """A server process of it, shared by all tests that leave it as it was."""
    log = tmp_path_factory.mktemp("tools-live") / "stderr"
    with _server_process(*tools_args, log=log) as process:
        yield process
