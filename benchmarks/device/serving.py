"""A server process on the device, over HTTP and gRPC: a checkpoint, its start, its streams.

The model is of Llama-3.2-1B's shapes, so small that a decode step takes about as long as the host's
part of it: what the scheduler, the streams and the sockets cost shows here and not in an 8B model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.device.report import Skipped

LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
PROMPT, ANSWER = 512, 128
CONCURRENT = (1, 16, 64)
FIGURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms",
           "p99_itl_ms")  # fmt: skip


def measure(
    results: dict[str, Any], deadline_s: float, *, backend: str, dtype: str, tiny: bool
) -> Iterator[dict[str, Any]]:
    """The server's start, then streams at several concurrencies, then the same without a server."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401

        from benchmarks.tiny_server import ARGS, serving
    except ModuleNotFoundError as error:
        raise Skipped(f"{error.name} is not installed, which a server needs") from error
    os.environ["JAX_PLATFORMS"] = ""  # `serving` would take the CPU.
    shapes = {"vocab_size": 1024, "torch_dtype": dtype} if tiny else LLAMA_1B
    prompt, answer = (32, 8) if tiny else (PROMPT, ANSWER)
    with tempfile.TemporaryDirectory() as directory:
        begun_s = time.perf_counter()
        model = write_model(Path(directory), shapes, dtype)
        yield {"what": "checkpoint written", "seconds": time.perf_counter() - begun_s}
        size = ("--num-kv-pages", "2000") if tiny else (
            "--max-model-len", "2048", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048",
            "--block-size", "64", "--num-kv-pages", "4000")  # fmt: skip
        cache = ("--compile-cache-dir", f"{directory}/cache")
        args = (*size, "--dtype", dtype, "--attention-backend", backend, *cache)
        sizes = (
            *("--prompt-len", str(prompt), "--output-len", str(answer)),
            *("--vocab-size", str(shapes["vocab_size"]), "--json"),
        )
        for mode, how in (("early", ("--warm-up", "early", "--no-fail-on-compile")), ("full", ())):
            begun_s = time.perf_counter()
            with serving(model, (*args, *how)) as server:
                ready_s = time.perf_counter() - begun_s
                yield {"what": f"server ready, {mode}", "seconds": ready_s}
                over_http = tuple(("HTTP", "--base-url", server.http, n) for n in CONCURRENT)
                over_grpc = ("gRPC", "--grpc", server.grpc, CONCURRENT[-1])
                for name, flag, where, count in (
                    over_http[:1] if mode == "early" else (*over_http, over_grpc)
                ):
                    if time.monotonic() > deadline_s:
                        return
                    num = ("--num-prompts", str(max(4, 2 * count)), "--max-concurrency", str(count))
                    figures = run("bench", "serve", flag, where, *num, *sizes)
                    yield {"what": f"{mode}, {name}, {count} streams of {prompt} + {answer}"} | {
                        name: figures[name] for name in FIGURES if name in figures
                    }
        begun_s = time.perf_counter()
        with serving(model, args):
            yield {"what": "server ready again", "seconds": time.perf_counter() - begun_s}
        figures = run(
            *("bench", "throughput", "--model", str(model), *ARGS, *args, "--json"),
            *("--num-prompts", str(2 * CONCURRENT[-1]), *sizes[:4]),
        )
        yield {"what": "no server"} | {
            name: value for name, value in figures.items() if isinstance(value, int | float)
        }


def write_model(directory: Path, shapes: dict[str, Any], dtype: str) -> Path:
    """A random Llama of these shapes; the tiny model's tokenizer, with a word for each
    other token.
    """
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from benchmarks import tiny_server
    from octavo.models.families.table import config_from_hf
    from octavo.models.loading.tensors import expected_shapes

    tiny_server.write_tiny_model(directory)
    config = tiny_server.CONFIG | shapes
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"w{number}": number for number in range(len(vocab), config["vocab_size"])}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    rng = np.random.default_rng(0)
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    # One block of numbers for all tensors: ten times as quick as fresh ones, and as good here.
    block = (0.02 * rng.standard_normal(1 << 22)).astype(stored)
    tensors = {
        name: np.ones(shape, stored) if len(shape) == 1 else np.resize(block, shape)
        for name, shape in expected_shapes(config_from_hf(config)).items()
    }
    save_file(tensors, str(directory / "model.safetensors"))
    return directory


def run(*command: str) -> dict[str, Any]:
    """What `octavo` prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "octavo.server.cli.main", *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise RuntimeError(f"octavo {command[0]} {command[1]}: {done.stderr[-500:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures
