"""The one place that knows how JAX versions differ (0.10.2 to 0.12)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh


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
            state = _states().get(name)
            if state is not None:
                stack.enter_context(state(value))
        yield


def _states() -> Mapping[str, Any]:
    """JAX's settings that a thread may have of its own."""
    try:
        from jax._src.config import config_states
    except ImportError:
        return {}
    return config_states


def close_compilation_cache() -> None:
    """Has JAX open its persistent cache anew when it next compiles, if there is a folder for it."""
    compilation_cache.reset_cache()


def product_compiler_options(library: str) -> dict[str, str] | None:
    """Options of `jax.stages.Lowered.compile`, for float32 products of a CPU by this library.

    Args:
        library: "ynnpack", which XLA's CPU compiler takes unasked, or "eigen".
    """
    if library == "ynnpack":
        return None
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


def serialize_program(program: Any) -> tuple[Any, ...]:
    """What `deserialize_program` makes a `jax.stages.Compiled` from; it can be pickled.

    Raises: whatever a backend without serialization does.
    """
    return tuple(serialize_executable.serialize(program))


def deserialize_program(parts: tuple[Any, ...], devices: Sequence[jax.Device]) -> Any:
    """The `jax.stages.Compiled` of `serialize_program`, in another process.

    Args:
        parts: of a process of the same JAX on the same kind of devices; trusted, as it is code.
        devices: that it runs on, as many as it was compiled for.

    Raises: whatever JAX does with parts that do not fit.
    """
    data, in_tree, out_tree = parts
    return serialize_executable.deserialize_and_load(
        data, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
    )
