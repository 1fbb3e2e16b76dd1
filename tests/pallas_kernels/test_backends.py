"""Backends are chosen, and refused with a reason, before an engine relies on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.pallas_kernels.compat import has_mosaic_gpu_kernels
from octavo.pallas_kernels.ragged_paged_attention.backends import (
    AttentionShape,
    choose_backend,
    refusal,
)
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import (
    TpuTiles,
    choose_tpu_tiles,
    scratch_bytes,
    vmem_bytes,
)

LLAMA = AttentionShape(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=64,
    max_tokens=512,
    q_dtype=jnp.bfloat16,
    kv_dtype=jnp.bfloat16,
)
V6E = {"platform": "tpu", "device_kind": "TPU v6 lite"}
H200 = {"platform": "gpu", "device_kind": "NVIDIA H200"}
CPU = {"platform": "cpu", "device_kind": "cpu"}
needs_gpu_kernels = pytest.mark.skipif(
    not has_mosaic_gpu_kernels(), reason="this JAX has no Mosaic GPU kernels"
)


def test_auto_takes_the_devices_own_kernel() -> None:
    assert choose_backend("auto", LLAMA, **V6E) == "mosaic_tpu"
    assert choose_backend("auto", LLAMA, **CPU) == "xla"


LATENTS = dataclasses.replace(LLAMA, num_kv_heads=1, head_dim=576, value_size=512)


def test_latents_are_left_to_xla_on_a_gpu_and_refused_by_its_kernel_by_name() -> None:
    assert choose_backend("auto", LATENTS, **H200) == "xla"
    with pytest.raises(InvalidConfigError, match="kv_lora_rank = 512 is not allowed") as caught:
        choose_backend("mosaic_gpu", LATENTS, **H200)
    assert "attention_backend=xla takes it" in str(caught.value)


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("num_heads", [16, 64, 128])
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.int8])
def test_a_tpus_kernel_takes_latents_of_all_heads(kind: str, num_heads: int, kv_dtype: Any) -> None:
    latents = dataclasses.replace(LATENTS, num_heads=num_heads, kv_dtype=kv_dtype)
    assert choose_backend("auto", latents, platform="tpu", device_kind=kind) == "mosaic_tpu"


def test_narrow_latents_have_values_of_whole_lanes_on_a_tpu() -> None:
    latents = dataclasses.replace(LATENTS, head_dim=160, value_size=96)
    assert choose_backend("auto", latents, **V6E) == "mosaic_tpu"
    narrow = dataclasses.replace(latents, kv_dtype=jnp.int8)
    assert choose_backend("auto", narrow, **V6E) == "xla"
    with pytest.raises(InvalidConfigError, match=r"kv_lora_rank = 96.*multiples of 128 in int8"):
        choose_backend("mosaic_tpu", narrow, **V6E)


@pytest.mark.parametrize("device", [V6E, H200], ids=["tpu", "gpu"])
def test_chunks_shorter_than_a_tile_are_left_to_xla_and_refused_by_name(
    device: dict[str, str],
) -> None:
    chunks = dataclasses.replace(LLAMA, attention_chunk=511)
    assert choose_backend("auto", chunks, **device) == "xla"
    kernel = "mosaic_tpu" if device is V6E else "mosaic_gpu"
    with pytest.raises(InvalidConfigError, match=r"attention_chunk_size = 511.*at least 512"):
        choose_backend(kernel, chunks, **device)
    real = dataclasses.replace(LLAMA, attention_chunk=8192)
    assert refusal(kernel, real, **device) in (None, refusal(kernel, LLAMA, **device))


@needs_gpu_kernels
def test_auto_takes_the_hopper_kernel() -> None:
    assert choose_backend("auto", LLAMA, **H200) == "mosaic_gpu"


@pytest.mark.parametrize("kv_dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (96, 128), (128, 256)])
def test_kernels_take_eight_bit_kv(kv_dtype: Any, head_dim: int, page_size: int) -> None:
    shape = dataclasses.replace(LLAMA, kv_dtype=kv_dtype, head_dim=head_dim, page_size=page_size)
    for device, backend in ((V6E, "mosaic_tpu"), (H200, "mosaic_gpu")):
        if backend == "mosaic_tpu" or has_mosaic_gpu_kernels():
            assert choose_backend("auto", shape, **device) == backend


@needs_gpu_kernels
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (128, 16), (256, 64), (256, 16)])
def test_the_hopper_kernel_takes_eight_bit_kv_in_any_page_and_head(
    head_dim: int, page_size: int
) -> None:
    for kv_dtype in (jnp.int8, jnp.float8_e4m3fn):
        shape = dataclasses.replace(
            LLAMA, kv_dtype=kv_dtype, head_dim=head_dim, page_size=page_size
        )
        assert choose_backend("auto", shape, **H200) == "mosaic_gpu"


def test_auto_falls_back_to_xla_where_the_kernel_does_not_fit() -> None:
    odd = dataclasses.replace(LLAMA, head_dim=32)
    assert choose_backend("auto", odd, **V6E) == "xla"
    assert choose_backend("auto", odd, **H200) == "xla"


@pytest.mark.parametrize(
    ("device", "change", "message"),
    [
        (CPU, {}, "attention_backend = 'mosaic_tpu'.*a TPU; this device is 'cpu'"),
        (V6E, {"head_dim": 513}, "head_dim = 513.*64 to 512"),
        (V6E, {"page_size": 8}, "block_size = 8.*16, 32, 64, 128, 256"),
        (V6E, {"q_dtype": jnp.float16}, "dtype = 'float16'.*float32, bfloat16"),
        (V6E, {"kv_dtype": jnp.float32}, "kv_cache_dtype = 'float32'.*bfloat16.*, int8 or fp8"),
        (V6E, {"num_heads": 4096, "num_kv_heads": 4096}, "num_kv_heads = 4096.*VMEM"),
    ],
)
def test_a_shape_the_tpu_kernel_cannot_take_is_refused(
    device: dict[str, str], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfigError, match=message) as caught:
        choose_backend("mosaic_tpu", dataclasses.replace(LLAMA, **change), **device)
    assert "attention_backend=xla" in str(caught.value)


@needs_gpu_kernels
@pytest.mark.parametrize(
    ("device_kind", "change", "message"),
    [
        ("NVIDIA A100", {}, "a Hopper GPU, not 'NVIDIA A100'"),
        ("NVIDIA H100", {"head_dim": 257}, "head_dim = 257.*64 to 256"),
        ("NVIDIA H100", {"q_dtype": jnp.float32}, "dtype = 'float32'.*bfloat16"),
        ("NVIDIA H100", {"kv_dtype": jnp.float32}, "kv_cache_dtype = 'float32'.*int8 or fp8"),
        ("NVIDIA H100", {"num_heads": 128, "num_kv_heads": 1}, "at most 64"),
    ],
)
def test_a_shape_the_hopper_kernel_cannot_take_is_refused(
    device_kind: str, change: dict[str, Any], message: str
) -> None:
    shape = dataclasses.replace(LLAMA, **change)
    with pytest.raises(InvalidConfigError, match=message):
        choose_backend("mosaic_gpu", shape, platform="gpu", device_kind=device_kind)


@pytest.mark.parametrize("head_dim", [72, 80, 112, 160, 192, 256])
def test_heads_in_between_are_padded_and_taken(head_dim: int) -> None:
    shape = dataclasses.replace(LLAMA, head_dim=head_dim)
    assert choose_backend("auto", shape, **V6E) == "mosaic_tpu"
    if has_mosaic_gpu_kernels():
        assert choose_backend("auto", shape, **H200) == "mosaic_gpu"


def test_xla_takes_every_shape() -> None:
    odd = dataclasses.replace(LLAMA, head_dim=80, page_size=8, q_dtype=jnp.float16)
    for device in (CPU, V6E, H200):
        assert refusal("xla", odd, **device) is None


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="auto, xla, reference, mosaic_tpu, mosaic_gpu"):
        choose_backend("triton", LLAMA, **H200)


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x", "unheard of"])
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((8, 1), 256), ((64, 64), 128)])
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.int8])
def test_blocks_fit_the_devices_vmem(
    kind: str, heads: tuple[int, int], head_dim: int, page_size: int, kv_dtype: Any
) -> None:
    q, pool = (512, heads[0], head_dim), (9, 2, heads[1], page_size, head_dim)
    try:
        tiles = choose_tpu_tiles(q, jnp.bfloat16, pool, kv_dtype, kind)
    except ValueError:
        # 256 tokens of 64 heads, twice buffered, are 16 MiB: all of the smallest VMEM.
        assert (kind, heads[1]) == ("unheard of", 64)
        return
    sizes = {"page_size": page_size, "num_kv_heads": heads[1], "head_dim": head_dim}
    sizes |= {"q_itemsize": 2, "kv_itemsize": jnp.dtype(kv_dtype).itemsize}
    group = heads[0] // heads[1]
    for rows, pages in (
        (tiles.prefill_tile * group, tiles.prefill_pages),
        (group, tiles.decode_pages),
    ):
        needed = scratch_bytes(rows=rows, pages=pages, **sizes)
        assert needed <= tiles.vmem_bytes <= vmem_bytes(kind)


def test_block_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill_tile 0: want at least 1"):
        TpuTiles(decode_pages=1, prefill_pages=1, prefill_tile=0, vmem_bytes=1)


def test_the_check_finds_a_backend_that_computes_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from octavo.pallas_kernels.ragged_paged_attention import AttentionParams, self_check

    shape = dataclasses.replace(
        LLAMA, num_heads=4, num_kv_heads=2, head_dim=64, q_dtype=jnp.float32, kv_dtype=jnp.float32
    )
    params = AttentionParams(scale=0.125)
    assert self_check.check_backend("xla", shape, params) is None

    right = self_check.ragged_paged_attention

    def wrong(*args: Any, backend: str, **rest: Any) -> tuple[jax.Array, Any]:
        out, kv = right(*args, backend=backend, **rest)
        return (out * 1.01 if backend == "xla" else out), kv

    monkeypatch.setattr(self_check, "ragged_paged_attention", wrong)
    worst = self_check.check_backend("xla", shape, params)
    assert worst is not None
    assert np.isfinite(worst)
