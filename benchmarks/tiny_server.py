"""A small random model on disk, and a server process over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from octavo.models.families.table import config_from_hf
from octavo.models.loading.tensors import expected_shapes
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": 0,
    "eos_token_id": 1, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ARGS = (
    *("--served-model-name", "tiny", "--max-num-seqs", "16", "--max-num-batched-tokens", "64"),
    *("--max-model-len", "512", "--num-kv-pages", "400", "--block-size", "16"),
    *("--warm-up", "full", "--fail-on-compile"),
)
FREE_PORTS = ("--grpc-port", "0", "--http-port", "0")


@dataclass
class Server:
    """A server process, where it listens, and what it wrote to standard error."""

    popen: subprocess.Popen[str]
    grpc: str
    http: str
    log: Path

    def end(self) -> int:
        """Ends it; its exit status."""
        self.popen.terminate()
        try:
            self.popen.wait(30)
        except subprocess.TimeoutExpired:
            self.popen.kill()
        self.popen.communicate()
        return self.popen.returncode


def write_tiny_model(
    directory: Path, poison: int | None = None, *, context: int = 512, template: str = TEMPLATE
) -> Path:
    """A random two-layer Llama with one token a byte.

    Args:
        poison: a token whose embedding is not a number.
        context: most tokens of a sequence.
        template: of chats.
    """
    config = CONFIG | {"tie_word_embeddings": poison is None, "max_position_embeddings": context}
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in expected_shapes(config_from_hf(config)).items()
    }
    if poison is not None:
        tensors["model.embed_tokens.weight"][poison] = np.nan
    save_file(tensors, str(directory / "model.safetensors"))
    tokens = ["<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(tokens[:2])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@contextlib.contextmanager
def serving(
    model: Path,
    args: Sequence[str] = (),
    program: Sequence[str] = ("octavo.server.cli.main", "serve"),
) -> Iterator[Server]:
    """`octavo serve` over the model on free ports, from ready until the block's end.

    Args:
        args: more options; they go after `ARGS`.
        program: the module that serves, and its first arguments.
    """
    command = [*program, "--quiet", "--model", str(model), *ARGS, *FREE_PORTS, *args]
    server = start(command, model / "server.log")
    try:
        yield server
    finally:
        server.end()


def start(command: Sequence[str], log: Path) -> Server:
    """A server process that is ready.

    Args:
        command: the module that serves, and its arguments.
        log: takes what it writes to standard error.

    Raises:
        RuntimeError: it ended before; carries the end of its log.
    """
    # Small products are quickest in one thread, and the clients need the other core.
    environ = {"JAX_PLATFORMS": "cpu"} | os.environ
    with log.open("w") as stderr:
        popen = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environ,
        )
    server = Server(popen, "", "", log)
    try:
        assert popen.stdout is not None
        lines = [popen.stdout.readline() for _ in range(2)]
        if not all(lines):
            raise RuntimeError(f"it did not start:\n{log.read_text()[-4000:]}")
        server.grpc, server.http = (line.split()[-1] for line in lines)
    except BaseException:
        server.end()
        raise
    return server


async def held_at_the_end(channel: grpc.aio.Channel) -> str | None:
    """What an idle server still holds ten seconds after its last answer; None if nothing."""
    call = channel.unary_unary("/octavo.v1.OctavoService/GetLoad")
    for _ in range(200):
        load = pb.GetLoadResponse.FromString(await call(b""))
        if load.num_running == load.num_waiting == 0:
            break
        await asyncio.sleep(0.05)
    if load.num_running or load.num_waiting or load.num_free_pages != load.num_total_pages:
        return f"held at the end: {load}"
    return None
