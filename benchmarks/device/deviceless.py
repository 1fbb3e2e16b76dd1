"""Compiles what the device suite would run on a device that is not there.

    python benchmarks/device_suite.py --compile-for h200

Roofs, every check's and every kernel's program, experts of one and of many tokens; whole steps are
`make aot`'s. Needs its compilers; call it before JAX is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.aot.compile_target import ENVIRONMENT
from benchmarks.aot.targets import TARGETS


def compile_all(name: str, only: str) -> Iterator[dict[str, Any]]:
    """One row a program: its seconds, or why it does not compile.

    Args:
        name: of a target.
        only: programs whose name contains this.
    """
    target = TARGETS[name]
    os.environ.update(ENVIRONMENT[target.platform])
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from octavo.pallas_kernels.compat import devices_of_topology
    from octavo.sharding.mesh import make_mesh

    if target.platform == "tpu":
        devices = devices_of_topology("tpu", topology_name=target.topology)
    else:
        devices = devices_of_topology(
            "cuda", target_config=target.target_config(), topology=target.topology
        )
    mesh = make_mesh(1, devices)
    whole = NamedSharding(mesh, PartitionSpec())
    for what, program, make in _programs(f"mosaic_{'tpu' if target.platform == 'tpu' else 'gpu'}"):
        if only not in what:
            continue
        begun_s = time.perf_counter()
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                inputs = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
                    jax.eval_shape(make),
                )
                program.lower(*inputs).compile()
            yield {"what": what, "seconds": round(time.perf_counter() - begun_s, 1), "ok": True}
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            yield {"what": what, "failed": text, "ok": False}


def _programs(backend: Any) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Name, jitted function, and what makes its inputs."""
    import jax
    import jax.numpy as jnp

    from benchmarks.device import checks, experts, kernels, roofs

    def zeros(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.zeros(shape, dtype)

    yield (
        "roofs copy",
        roofs.looped(lambda x: x + 1.0, 10),
        lambda: (zeros(1 << 29, dtype=jnp.float32),),
    )
    yield (
        "roofs product",
        roofs.looped(lambda a, b: jnp.dot(a, b), 20),
        lambda: (zeros(8192, 8192), zeros(8192, 8192)),
    )
    for name, rows, kv_dtype in kernels.cases():
        yield (
            f"kernels {name}",
            roofs.looped(kernels.attention(rows, backend), kernels.LOOPS),
            lambda rows=rows, kv=kv_dtype: kernels.make_batch(rows, backend, "bfloat16", kv),
        )
    for kind, heads, head_dim, page_size, extra, kv_dtype in checks.GRID:
        shape = kind, heads, head_dim, page_size, kv_dtype
        name = f"{kind} {heads[0]}/{heads[1]} D{head_dim} P{page_size} {kv_dtype or ''}".strip()
        for each in (backend, "reference"):
            yield (
                f"checks {name} {each}",
                jax.jit(checks.attention(each, kind, head_dim, extra)),
                lambda shape=shape: checks.make_inputs(
                    np.random.default_rng(0), backend, "bfloat16", *shape
                ),
            )
    for name in experts.SHAPES:
        for tokens in (1, 2048):
            run, make = experts.program(name, tokens, "mosaic_gpu", "bfloat16")
            yield f"experts {name}, {tokens} tokens", jax.jit(run), make
