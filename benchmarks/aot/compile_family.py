"""Compiles steps of one model for one target: a process of `families.py`, which sets its platform.

Prints a dict a step, in figures of one device; nothing where no slice of the target has room.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.aot.cases import lower_step
from benchmarks.aot.copies import weight_copies
from benchmarks.aot.families import MEMORY_SHARE, SLICES, models, shortened
from benchmarks.aot.targets import TARGETS, Target
from octavo.engine.execution.state import kv_bytes_per_token, pool_layouts, recurrent_bytes
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.execution.weights.weight_layout import loop_compiler_options
from octavo.models.config import ModelConfig
from octavo.models.families.table import config_from_hf
from octavo.models.parameters import abstract_weights
from octavo.pallas_kernels.compat import (
    compile_lowered,
    devices_of_topology,
    graph_compiler_options,
)
from octavo.pallas_kernels.ragged_paged_attention import Backend
from octavo.pallas_kernels.ragged_paged_attention.backends import AttentionShape, choose_backend
from octavo.sharding.mesh import make_mesh

BFLOAT16 = jnp.dtype("bfloat16")
PAGE, CONTEXT = 64, 2048
SHAPES = {"decode": StepShape(64, 64, 4, "greedy"), "prefill": StepShape(2048, 32, 0, "greedy")}
FREE_SHARE = 0.05
"""Of a device's memory, what temporaries may take, when a slice is chosen."""


def main() -> None:
    target, name, *steps = sys.argv[1:]
    values = models()[name]
    for num_devices in SLICES[target]:
        mesh = _mesh(TARGETS[target], num_devices)
        whole = config_from_hf(values).with_tensor_parallel(num_devices)
        backend = _attention(whole, mesh)
        kept = {"whole_weight_bytes": _weight_bytes(whole, mesh)}
        kept["kept_bytes"] = _kept_bytes(whole, mesh, backend)
        limit = (MEMORY_SHARE - FREE_SHARE) * TARGETS[target].memory_bytes
        if sum(kept.values()) < limit:
            break
    else:
        return
    short = config_from_hf(shortened(values)).with_tensor_parallel(num_devices)
    for step in steps:
        result = {"model": name, "target": target, "num_devices": num_devices, "step": step}
        result |= {"attention": backend, "num_layers": [short.num_layers, whole.num_layers]} | kept
        print(json.dumps(result | _compiled(short, whole, step, mesh, backend)), flush=True)


def _compiled(
    short: ModelConfig, whole: ModelConfig, step: str, mesh: Mesh, backend: Backend
) -> dict[str, Any]:
    """What the compiler says of a step, or its `error`."""
    device, shape = mesh.devices.flat[0], SHAPES[step]
    options = loop_compiler_options(shape, device.device_kind)
    if device.platform != "tpu":
        options |= graph_compiler_options()
    begun_s = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = compile_lowered(lower_step(short, shape, CONTEXT, mesh, backend), options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    copies = weight_copies(compiled.as_text())
    times = whole.num_layers / short.num_layers
    return {
        "compile_s": time.perf_counter() - begun_s,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "copied": sorted({copy.weight for copy in copies}),
        "copied_bytes": sum(
            copy.num_bytes * (times if copy.weight.startswith("layers") else 1) for copy in copies
        ),
    }


def _mesh(target: Target, num_devices: int) -> Mesh:
    topology = SLICES[target.name][num_devices]
    if target.platform == "tpu":
        devices = devices_of_topology("tpu", topology_name=topology)
    else:
        config = target.target_config()
        devices = devices_of_topology("cuda", target_config=config, topology=topology)
    return make_mesh(num_devices, devices)


def _attention(model: ModelConfig, mesh: Mesh) -> Backend:
    """As `choose_attention` chooses it, but for the check on a device."""
    device = mesh.devices.flat[0]
    found = {
        choose_backend(
            "auto",
            AttentionShape(
                num_heads=max(1, attention.num_heads // mesh.size),
                num_kv_heads=max(1, attention.num_kv_heads // mesh.size),
                head_dim=attention.head_dim,
                value_size=attention.asked.value_size,
                attention_chunk=attention.asked.attention_chunk,
                page_size=PAGE,
                max_tokens=SHAPES["prefill"].num_tokens,
                q_dtype=BFLOAT16,
                kv_dtype=BFLOAT16,
            ),
            platform=device.platform,
            device_kind=device.device_kind,
        )
        for attention in model.attentions()
    }
    return found.pop() if len(found) == 1 else "xla"


def _weight_bytes(model: ModelConfig, mesh: Mesh) -> float:
    leaves = jax.tree.leaves(abstract_weights(model, BFLOAT16, mesh))
    sizes = (math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    return sum(size * leaf.dtype.itemsize for size, leaf in zip(sizes, leaves, strict=True))


def _kept_bytes(model: ModelConfig, mesh: Mesh, backend: Backend) -> float:
    """Of decode's rows: pages of all layers, and states."""
    rows = SHAPES["decode"].num_rows
    token_bytes = kv_bytes_per_token(model, BFLOAT16, pool_layouts(model, backend, PAGE))
    is_split = all(attention.num_kv_heads % mesh.size == 0 for attention in model.attentions())
    pages = rows * CONTEXT * token_bytes / (mesh.size if is_split else 1)
    return pages + recurrent_bytes(model, rows)


if __name__ == "__main__":
    main()
