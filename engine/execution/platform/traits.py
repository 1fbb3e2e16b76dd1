"""How kinds of devices differ, as far as code outside of kernels has to know.

A CPU computes: a step takes longer with each of its tokens, and its memory is the host's. A TPU or
GPU waits for weights, and its memory is its own. Who asks which of them a mesh is made of asks here
for what follows from it, and never for a platform's name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from octavo.engine.execution.step_spec import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformTraits:
    """What follows from the kind of a mesh's devices.

    Attributes:
        in_host_memory: weights and pages lie in the host's memory. What is free is known before
            they are there, others use it, too, and zeroed pages take none until they are written.
        variants: sampling variants that programs are compiled in. Where a branch on a device value
            costs a round trip, greedy programs have none.
        has_dear_rows: a step of few tokens takes longer with each of them.
        has_quick_programs: a program can be compiled sooner than it should be to compute fast.
        compiles_apart: what compiling leaves in a process is worth another process.
        has_native_functions: products of few rows may be functions of `pallas_kernels/cpu`.
        checks_int8_products: they are compared with exact ones before weights of int8 are relied
            on: compilers choose among many kernels, of which some were wrong.
        has_host_loops: unless they are compiled into the program's graph, loops and branches on
            device values are the host's, whose call of a program then lasts as long as the program.
        runs_branches_at_once: branches and loops of a program that do not read each other's results
            run at once, in another order on each device: a collective in one of them may wait for
            ever for a device that waits in the other.
        run_tokens: pages of a growing sequence follow each other for so many tokens.
    """

    in_host_memory: bool
    variants: tuple[Variant, ...]
    has_dear_rows: bool
    has_quick_programs: bool
    compiles_apart: bool
    has_native_functions: bool
    checks_int8_products: bool
    has_host_loops: bool
    runs_branches_at_once: bool
    run_tokens: int


CPU = PlatformTraits(
    in_host_memory=True,
    variants=("general",),  # a CPU branches for nothing, and one variant less halves compiling
    has_dear_rows=True,
    has_quick_programs=True,
    compiles_apart=True,
    has_native_functions=True,
    checks_int8_products=False,
    has_host_loops=False,
    runs_branches_at_once=True,
    run_tokens=64,  # pages side by side are read up to a third faster than pages here and there
)
TPU = PlatformTraits(
    in_host_memory=False,
    variants=("greedy", "general"),
    has_dear_rows=False,
    has_quick_programs=False,
    compiles_apart=False,
    has_native_functions=False,
    checks_int8_products=True,
    has_host_loops=False,
    runs_branches_at_once=False,
    run_tokens=1,  # each page is copied by itself
)
GPU = replace(TPU, has_host_loops=True)


def traits_of(mesh: Mesh) -> PlatformTraits:
    """The traits of a mesh's devices, which are of one kind."""
    return traits_of_device(mesh.devices.flat[0])


def traits_of_device(device: jax.Device) -> PlatformTraits:
    """The traits of a device."""
    if device.platform == "cpu":
        return CPU
    return GPU if device.platform == "gpu" else TPU
