"""What the device itself reaches: bytes copied and operations multiplied, a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


def seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of a run that blocks, after one that compiles and warms up."""
    run()
    times = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times)


def looped(body: Callable[..., jax.Array], count: int) -> Any:
    """A program of `x = body(x, *rest)`, `count` times: no dispatch counts."""

    @jax.jit
    def many(x: jax.Array, *rest: Any) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: body(x, *rest), x)

    return many


def in_loop(body: Callable[..., jax.Array], x: jax.Array, *rest: Any, count: int) -> float:
    """Seconds of one `x = body(x, *rest)` of `count` in one program."""
    many = looped(body, count)
    return seconds(lambda: jax.block_until_ready(many(x, *rest))) / count


def measure(results: dict[str, Any], deadline_s: float, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Copy bandwidth (bytes read and written) and the rate of a bfloat16 product."""
    del deadline_s
    num_bytes = 1 << (22 if tiny else 31)
    x = jnp.zeros((num_bytes // 4,), jnp.float32)
    copy_s = in_loop(lambda x: x + 1.0, x, count=2 if tiny else 10)
    results["copy_bytes_per_s"] = 2 * num_bytes / copy_s
    yield {"what": f"copy of {num_bytes >> 20} MiB", "GB/s": 2e-9 * num_bytes / copy_s}
    size = 128 if tiny else 8192
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    b = a * (1 / size**0.5)
    product_s = in_loop(lambda a, b: jnp.dot(a, b), a, b, count=2 if tiny else 20)
    results["matmul_flops_per_s"] = 2 * size**3 / product_s
    yield {"what": f"product of {size} x {size} bfloat16", "TFLOP/s": 2e-12 * size**3 / product_s}
    # What a model's own products are shaped like.
    rows, hidden, mlp = (16, 64, 128) if tiny else (2048, 4096, 14336)
    x = jax.random.normal(jax.random.key(1), (rows, hidden), jnp.bfloat16)
    up = jax.random.normal(jax.random.key(2), (hidden, mlp), jnp.bfloat16) / hidden**0.5
    down = jax.random.normal(jax.random.key(3), (mlp, hidden), jnp.bfloat16) / mlp**0.5
    pair_s = in_loop(
        lambda x, up, down: jnp.dot(jnp.dot(x, up), down), x, up, down, count=2 if tiny else 20
    )
    flops = 4 * rows * hidden * mlp
    yield {"what": f"{rows} x {hidden} x {mlp} and back", "TFLOP/s": 1e-12 * flops / pair_s}
