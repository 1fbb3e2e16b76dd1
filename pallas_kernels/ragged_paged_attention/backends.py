"""Which attention runs where: every implementation's limits, asked when an engine is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp

from octavo.engine.errors import InvalidConfigError
from octavo.pallas_kernels.compat import has_mosaic_gpu_kernels
from octavo.pallas_kernels.hopper import is_hopper
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import kv_quantization
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import LANES, choose_tpu_tiles

logger = logging.getLogger(__name__)

Backend = Literal["xla", "reference", "mosaic_tpu", "mosaic_gpu"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
HEAD_DIMS = {"mosaic_tpu": (64, 512), "mosaic_gpu": (64, 256)}
"""Least and most; those in between are padded as `pool_layout` says."""
PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_GROUP_GPU = 64
MIN_CHUNK = 512
"""Of attention in chunks: a tile of queries is no longer, so that it is of two chunks at most."""
PLATFORMS = {"mosaic_tpu": ("tpu",), "mosaic_gpu": ("gpu", "cuda")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What an engine asks of attention, on one device.

    Attributes:
        num_heads, num_kv_heads: on one device.
        page_size: tokens.
        max_tokens: most tokens of a step.
        q_dtype, kv_dtype: of queries and of the pool.
        value_size: where values are the first so many numbers of keys; None where they lie apart.
        attention_chunk: of `AttentionParams`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_tokens: int
    q_dtype: Any
    kv_dtype: Any
    value_size: int | None = None
    attention_chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an implementation cannot serve a shape: what was asked, and what it takes."""

    field: str
    value: Any
    allowed: str


def refusal(
    backend: Backend, shape: AttentionShape, *, platform: str, device_kind: str
) -> Refusal | None:
    """The first thing that a backend cannot take; None when it takes all.

    Args:
        platform, device_kind: of the device, as JAX names them.
    """
    if backend in ("xla", "reference"):
        return None
    if platform not in PLATFORMS[backend]:
        wants = "a TPU" if backend == "mosaic_tpu" else "an NVIDIA Hopper GPU"
        return Refusal("attention_backend", backend, f"{wants}; this device is {device_kind!r}")
    has_latents = shape.value_size is not None
    if has_latents and backend == "mosaic_gpu":
        return Refusal("kv_lora_rank", shape.value_size, "layers without latents")
    if shape.attention_chunk is not None and shape.attention_chunk < MIN_CHUNK:
        return Refusal("attention_chunk_size", shape.attention_chunk, f"at least {MIN_CHUNK}")
    least, most = HEAD_DIMS[backend]
    if not (least <= shape.head_dim <= most or has_latents):
        return Refusal("head_dim", shape.head_dim, f"{least} to {most}")
    if shape.page_size not in PAGE_SIZES:
        return Refusal("block_size", shape.page_size, _one_of(PAGE_SIZES))
    if backend == "mosaic_tpu":
        return _tpu_refusal(shape, device_kind)
    return _gpu_refusal(shape, device_kind)


def choose_backend(
    requested: str, shape: AttentionShape, *, platform: str, device_kind: str
) -> Backend:
    """The backend for `--attention-backend`.

    Args:
        requested: "auto" or a backend's name. "auto" takes the device's own kernel where it takes
            the shape, and XLA otherwise.

    Raises:
        InvalidConfigError: the named backend cannot serve the shape on this device.
    """
    if requested == "auto":
        for backend in ("mosaic_tpu", "mosaic_gpu"):
            if platform in PLATFORMS[backend]:
                why = refusal(backend, shape, platform=platform, device_kind=device_kind)
                if why is None:
                    return backend
                logger.warning(
                    "attention_backend=%s is not used, xla is: %s = %s, and it takes %s",
                    backend, why.field, why.value, why.allowed,
                )  # fmt: skip
                return "xla"
        return "xla"
    if requested not in BACKENDS:
        raise InvalidConfigError("attention_backend", requested, f"auto, {', '.join(BACKENDS)}")
    why = refusal(requested, shape, platform=platform, device_kind=device_kind)
    if why is not None:
        raise InvalidConfigError(
            why.field,
            why.value,
            f"{why.allowed} (with attention_backend={requested}; attention_backend=xla takes it)",
        )
    return requested


def _dtype_refusal(shape: AttentionShape, dtypes: tuple[str, ...]) -> Refusal | None:
    """Queries of `dtypes`; KV in the queries' dtype, int8 or fp8."""
    q_dtype, kv_dtype = jnp.dtype(shape.q_dtype), jnp.dtype(shape.kv_dtype)
    if q_dtype.name not in dtypes:
        return Refusal("dtype", q_dtype.name, _one_of(dtypes))
    if kv_dtype != q_dtype and kv_quantization(kv_dtype) is None:
        return Refusal("kv_cache_dtype", kv_dtype.name, f"that of dtype ({q_dtype}), int8 or fp8")
    return None


def _tpu_refusal(shape: AttentionShape, device_kind: str) -> Refusal | None:
    why = _dtype_refusal(shape, ("float32", "bfloat16"))
    if why is not None:
        return why
    is_narrow = kv_quantization(shape.kv_dtype) is not None
    if shape.value_size is not None and shape.value_size % LANES and is_narrow:
        return Refusal("kv_lora_rank", shape.value_size, f"multiples of {LANES} in int8 or fp8")
    pool = pool_layout("mosaic_tpu", shape.head_dim, shape.page_size, shape.value_size)
    q_shape = (shape.max_tokens, shape.num_heads, pool.head_dim)
    pool_shape = pool.shape(2, shape.num_kv_heads)
    try:
        choose_tpu_tiles(
            q_shape,
            shape.q_dtype,
            pool_shape,
            shape.kv_dtype,
            device_kind,
            value_size=shape.value_size,
        )
    except InvalidConfigError:
        raise
    except ValueError as error:
        return Refusal("num_kv_heads", shape.num_kv_heads, f"fewer on a device: {error}")
    return None


def _gpu_refusal(shape: AttentionShape, device_kind: str) -> Refusal | None:
    if not has_mosaic_gpu_kernels():
        return Refusal("attention_backend", "mosaic_gpu", "JAX 0.11 or newer, or another backend")
    if not is_hopper(device_kind):
        return Refusal("attention_backend", "mosaic_gpu", f"a Hopper GPU, not {device_kind!r}")
    why = _dtype_refusal(shape, ("bfloat16",))
    if why is not None:
        return why
    group = shape.num_heads // shape.num_kv_heads
    if group > MAX_GROUP_GPU:
        return Refusal("num_heads / num_kv_heads", group, f"at most {MAX_GROUP_GPU}")
    return None


def _one_of(values: tuple[Any, ...]) -> str:
    return f"one of {', '.join(str(v) for v in values)}"
