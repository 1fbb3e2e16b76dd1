"""The one place that knows how JAX versions differ (0.10.2 to 0.12), and what of JAX and XLA may
change without notice: experimental and private interfaces, XLA's own attributes and flags.

Everything here has a fallback, for a version that lacks it, and a test that it still has its effect
(`tests/pallas_kernels/test_compat.py`), as most of it would otherwise cease to in silence. Another
test finds what is used elsewhere. Pallas alone is exempt: kernels are written in
`jax.experimental.pallas`, and the files under `pallas_kernels/` import it themselves. What XLA
writes a CPU's program down as is known in `engine/execution/programs/light_program.py`, which
keeps to what it recognises.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding


def _parts(module: str, *names: str) -> Any:
    """Parts of a module by name; None in a JAX that lacks one of them."""
    try:
        found = importlib.import_module(module)
        return SimpleNamespace(**{name: getattr(found, name) for name in names})
    except (ImportError, AttributeError):
        return None


_config = _parts("jax._src.config", "config_states")
_cache = _parts("jax.experimental.compilation_cache.compilation_cache", "reset_cache")
_layout = _parts("jax.experimental.layout", "Format", "Layout", "with_layout_constraint")
_metadata = _parts("jax.experimental.xla_metadata", "set_xla_metadata")
_lapack = _parts("jaxlib.lapack", "prepare_lapack_call")
_executables = _parts("jax.experimental.serialize_executable", "serialize", "deserialize_and_load")

WIDE_VECTORS = {"xla_cpu_prefer_vector_width": "512"}
"""Compiler options: vectors of 512 bits on a CPU that has them, where XLA prefers 256."""
SMALL_TILES = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
"""Compiler options: bfloat16 stays in tiles of 8 x 128 on a TPU that has larger ones."""

_log = logging.getLogger(__name__)


def shard_map(
    function: Callable[..., Any], *, mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` without the check of replicated outputs, which loops with traced bounds fail.

    Args: as for `jax.shard_map`.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def device_kind() -> str:
    """The kind of device being compiled for: an abstract mesh's where one is set, else the host's.

    Returns:
        As `jax.Device.device_kind`: "TPU v6 lite", "NVIDIA H200", "cpu".
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return str(abstract.device_kind)
    return str(jax.devices()[0].device_kind)


def has_mosaic_gpu_kernels() -> bool:
    """Whether this JAX lowers Mosaic GPU kernels by warpgroup and interprets them (0.11 on)."""
    return jax.__version_info__ >= (0, 11)


def interprets_mosaic_gpu() -> bool:
    """Whether this JAX interprets every Mosaic GPU kernel (0.12 on). 0.11 raises where one ends
    with phases of a barrier that a warpgroup has not waited for, which a GPU does not mind."""
    return jax.__version_info__ >= (0, 12)


def multiplies_bfloat16() -> bool:
    """Whether a CPU's compiler has a library for products of bfloat16 (0.11 on): without one it
    widens them, and an output layer's bounds take three times as long as all logits."""
    return jax.__version_info__ >= (0, 11)


def mosaic_gpu_options(cost_estimate: Any, interpret: Any) -> dict[str, Any]:
    """Keywords of `plgpu.kernel`: what the kernel costs where JAX asks (0.12 on), and `interpret`
    where it is to be interpreted."""
    options = {"interpret": interpret} if interpret else {}
    if jax.__version_info__ >= (0, 12):
        options["cost_estimate"] = cost_estimate
    return options


def store_to_global(ref: Any, value: jax.Array) -> None:
    """Writes a kernel's array from registers to global memory, in whatever pieces its layout has:
    JAX 0.12 takes pieces below four bytes from its `store` alone, and 0.11 has none."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def jax_settings() -> dict[str, Any]:
    """All of JAX's settings by name, as this thread sees them."""
    return {name: getattr(jax.config, name, None) for name in jax.config.values}


@contextlib.contextmanager
def settings_of_this_thread(settings: Mapping[str, Any]) -> Iterator[None]:
    """JAX's settings by name, in the calling thread alone and until the context ends.

    A JAX without settings of a thread keeps those of the process: nothing is changed then.
    """
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            state = None if _config is None else _config.config_states.get(name)
            if state is not None:
                stack.enter_context(state(value))
        yield


def close_compilation_cache() -> None:
    """Has JAX open its persistent cache anew when it next compiles, if there is a folder for it.

    A JAX that cannot be told so keeps the one that it has opened.
    """
    if _cache is not None:
        _cache.reset_cache()


def in_memory_order(sharding: Sharding, order: tuple[int, ...]) -> Any:
    """A sharding of arrays whose dimensions lie in this order, the last one's numbers side by side.

    Where JAX cannot be told the order, the sharding itself: the device then chooses.
    """
    return sharding if _layout is None else _layout.Format(_layout.Layout(order), sharding)


def has_memory_order(placement: Any) -> bool:
    """Whether a placement of an array is more than its sharding: see `in_memory_order`."""
    return _layout is not None and isinstance(placement, _layout.Format)


def placement_of(array: jax.Array) -> Any:
    """Over which devices an array is laid, and in which order its numbers lie there, where JAX says
    so: what `jax.device_put` takes to make another one like it."""
    return getattr(array, "format", array.sharding)


def laid_out_row_major(x: jax.Array) -> jax.Array:
    """x, which lies in the order of its dimensions inside a compiled program; or as XLA likes,
    where JAX cannot be told."""
    if _layout is None:
        return x
    return _layout.with_layout_constraint(x, _layout.Layout(tuple(range(x.ndim))))


def as_one_function() -> contextlib.AbstractContextManager[Any]:
    """Calls of jitted functions in this context are compiled to one native function each on a CPU,
    loops and all. Where XLA cannot be told, it hands out their operations one by one."""
    if _metadata is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = _metadata.set_xla_metadata(
        xla_cpu_small_call="true", inlineable="false"
    )
    return context


def product_compiler_options(library: str) -> dict[str, str] | None:
    """Compiler options for float32 products of a CPU by this library.

    Args:
        library: "ynnpack", which XLA's CPU compiler takes unasked, or "eigen".
    """
    if library == "ynnpack":
        return None
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


def graph_compiler_options() -> dict[str, str]:
    """Compiler options that put a GPU program's loops and branches on device values into its graph.

    XLA leaves them to the host unless told, which then waits for the device in each iteration: the
    call of a program lasts as long as the program. None of them where XLA_FLAGS says what goes into
    graphs.
    """
    option = "xla_gpu_enable_command_buffer"
    if option in os.environ.get("XLA_FLAGS", ""):
        return {}
    # The first six are what XLA takes unasked (JAX 0.11).
    return {
        option: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    }


def compile_lowered(lowered: Any, options: Mapping[str, str] | None = None) -> Any:
    """`lowered.compile(options)`, without those of the options that this XLA does not know.

    Args:
        lowered: a `jax.stages.Lowered`.
        options: of this module.

    Returns: the `jax.stages.Compiled`.

    Raises: whatever the compiler says of anything but an option.
    """
    left = dict(options or {})
    while True:
        try:
            return lowered.compile(left or None)
        except jax.errors.JaxRuntimeError as error:
            refused = [name for name in left if _is_refused(name, str(error))]
            if not refused:
                raise
            _log.warning("this XLA does not know %s, and steps may take longer", refused)
            left = {name: value for name, value in left.items() if name not in refused}


def _is_refused(option: str, error: str) -> bool:
    return f"No such compile option: '{option}'" in error or f"setting option {option}" in error


def serialize_program(program: Any) -> tuple[Any, ...]:
    """What `deserialize_program` makes a `jax.stages.Compiled` from; it can be pickled.

    Raises: whatever a backend without serialization does.
    """
    return tuple(_known(_executables).serialize(program))


def deserialize_program(parts: tuple[Any, ...], devices: Sequence[jax.Device]) -> Any:
    """The `jax.stages.Compiled` of `serialize_program`, in another process.

    Args:
        parts: of a process of the same JAX on the same kind of devices; trusted, as it is code.
        devices: that it runs on, as many as it was compiled for.

    Raises: whatever JAX does with parts that do not fit.
    """
    data, in_tree, out_tree = parts
    if b"lapack_" in data:  # JAX looks for LAPACK as it lowers, which nobody does of this program
        _known(_lapack).prepare_lapack_call("trsm", np.dtype("float32"))
    return _known(_executables).deserialize_and_load(
        data, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
    )


def devices_of_topology(platform: str, **description: Any) -> Sequence[jax.Device]:
    """Devices that are not there, to compile for. Nothing takes its place in a JAX without it.

    Args:
        platform: "tpu" or "cuda".
        description: of `jax.experimental.topologies.get_topology_desc`.
    """
    topologies = _parts("jax.experimental.topologies", "get_topology_desc")
    return _known(topologies).get_topology_desc(platform=platform, **description).devices


def _known(parts: Any) -> Any:
    """Parts of a module that nothing takes the place of.

    Raises:
        NotImplementedError: this JAX lacks them.
    """
    if parts is None:
        raise NotImplementedError(f"JAX {jax.__version__} is not known how to be asked for this")
    return parts
