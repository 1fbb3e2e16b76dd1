"""Compiles every case for one target; run as a process of its own, one JSON line a case.

python benchmarks/aot/compile_target.py h200 --only attention
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.aot.hot_loops import has_code, hot_loops
from benchmarks.aot.targets import TARGETS, Target

if TYPE_CHECKING:
    from benchmarks.aot.cases import Case

MAX_DEVICES = 4
"""Of the smallest slice of a TPU."""
ENVIRONMENT = {
    "tpu": {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    "cuda": {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",  # by nvdisasm, where there is one
    },
}
_SPILLS = re.compile(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    target = TARGETS[args.target]
    os.environ.update(ENVIRONMENT[target.platform])
    for result in compile_all(target, args.only):
        print(json.dumps(result), flush=True)


def compile_all(target: Target, only: str) -> Iterator[dict[str, Any]]:
    """One dict a case: name, seconds, and what the compiler says of it, or `error`."""
    import jax

    from benchmarks.aot.cases import attention_cases, step_cases
    from benchmarks.aot.copies import weight_copies
    from octavo.pallas_kernels.compat import compile_lowered, devices_of_topology
    from octavo.sharding.mesh import make_mesh

    if target.platform == "tpu":
        devices = devices_of_topology("tpu", topology_name=target.topology)
    else:
        devices = devices_of_topology(
            "cuda", target_config=target.target_config(), topology=target.topology
        )
    kind = devices[0].device_kind
    backend: Any = "mosaic_tpu" if target.platform == "tpu" else "mosaic_gpu"
    for case in (*attention_cases(target.platform), *step_cases()):
        if only not in case.name:
            continue
        mesh = make_mesh(num_devices(case, target), devices)
        result = describe(case, target, backend, kind, mesh.size)
        begun_s = time.perf_counter()
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _stderr() as log:
                lowered = case.lower(mesh, backend)
                compiled = compile_lowered(lowered, case.compiler_options(kind))
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {str(error)[:400]}"
            yield result
            continue
        result["compile_s"] = time.perf_counter() - begun_s
        memory = compiled.memory_analysis()
        copied = sum(copy.num_bytes for copy in weight_copies(compiled.as_text()))
        result["copied_bytes"] = copied
        result["counted_bytes"] += 2 * copied
        result["temp_bytes"] = memory.temp_size_in_bytes
        result["argument_bytes"] = memory.argument_size_in_bytes
        result["memory_bytes"] = memory.temp_size_in_bytes + memory.argument_size_in_bytes
        if result["memory_bytes"] > target.memory_bytes:
            result["over_memory"] = True
        result.update(registers(log[0]))
        yield result


def describe(
    case: Case, target: Target, backend: Any, device_kind: str, num_devices: int
) -> dict[str, Any]:
    """What is known of a case without a compiler, in figures of one device."""
    counted = case.counted(backend, device_kind)
    result: dict[str, Any] = {
        "target": target.name,
        "case": case.name,
        "num_devices": num_devices,
        "bytes": case.bytes_moved / num_devices,
        "flops": case.flops / num_devices,
        "counted_bytes": counted.num_bytes / num_devices,
        "counted_flops": counted.flops / num_devices,
        "weight_bytes": case.weight_bytes / num_devices,
        "is_decode": not case.attention.chunk,
    }
    if target.platform == "tpu":
        result.update(vmem(case, device_kind, num_devices))
    return result


def num_devices(case: Case, target: Target) -> int:
    """Devices that share the case: as few as hold weights and KV with a tenth to spare."""
    count = 1
    while case.resident_bytes > 0.9 * target.memory_bytes * count and count < MAX_DEVICES:
        count *= 2
    return count


def vmem(case: Case, device_kind: str, num_devices: int) -> dict[str, int]:
    """VMEM that the attention kernel plans for, and what a core has."""
    from octavo.pallas_kernels.ragged_paged_attention import tiles_tpu

    a = case.attention
    layout = a.layout("mosaic_tpu")
    heads, kv_heads = a.num_heads // num_devices, a.num_kv_heads // num_devices
    dtype = "float32" if a.itemsize == 4 else "bfloat16"
    q_shape, pool = (a.rows + a.chunk, heads, layout.head_dim), layout.shape(2, kv_heads)
    tiles = tiles_tpu.choose_tpu_tiles(
        q_shape, dtype, pool, a.kv_dtype, device_kind, value_size=a.value_size
    )
    sizes = {"page_size": a.page_size, "num_kv_heads": kv_heads, "head_dim": layout.width}
    sizes |= {"halves": layout.halves, "value_dim": a.value_size}
    sizes |= {"q_itemsize": a.itemsize, "kv_itemsize": a.kv_dtype.itemsize}
    parts = [(a.group, tiles.decode_pages)] if a.rows else []
    if a.chunk:
        parts.append((tiles.prefill_tile * a.group, tiles.prefill_pages))
    planned = [tiles_tpu.scratch_bytes(rows=rows, pages=pages, **sizes) for rows, pages in parts]
    return {"vmem_bytes": max(planned), "vmem_limit_bytes": tiles_tpu.vmem_bytes(device_kind)}


@contextlib.contextmanager
def _stderr() -> Iterator[list[str]]:
    """What compilers below Python write to the process's standard error and output meanwhile."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        text = [""]
        try:
            yield text
        finally:
            sys.stdout.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            file.seek(0)
            text[0] = file.read().decode(errors="replace")


def registers(log: str) -> dict[str, Any]:
    """Most registers and all spilled bytes that ptxas reports, and the hot loops of the machine
    code, where it was printed; nothing on a TPU."""
    used = [int(n) for n in _REGISTERS.findall(log)]
    if not used:
        return {}
    spills = sum(int(a) + int(b) for a, b in _SPILLS.findall(log))
    found: dict[str, Any] = {"registers": max(used), "spill_bytes": spills}
    if has_code(log):
        found["hot_loops"] = [loop.as_dict() for loop in hot_loops(log)]
    return found


if __name__ == "__main__":
    main()
