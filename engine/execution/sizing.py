"""How large an engine may be: context, pages, shapes, backend, from configuration and machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from octavo.engine.config import FEW_ROWS, FEW_TOKENS, SERVING_BATCHED_TOKENS, EngineConfig, Task
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.attention_choice import choose_attention
from octavo.engine.execution.available_memory import available_memory_bytes
from octavo.engine.execution.buckets import Lattice, make_lattice
from octavo.engine.execution.state import kv_bytes_per_token, pool_layouts
from octavo.engine.execution.step_spec import Variant, prefill_rows
from octavo.engine.kv.page_needs import PageNeeds, page_needs
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.models.config import ModelConfig
from octavo.pallas_kernels.cpu.native_attention import takes_pages
from octavo.pallas_kernels.ragged_paged_attention import Backend
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import KV_DTYPES, stored_dtype
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import default_page_size

DEFAULT_MAX_MODEL_LEN = 8192
TABLE_ALIGNMENT_PAGES = 8
"""A row of the block table is whole blocks of pages, so that attention never slices past it."""
BUDGET_BITS, CPU_BUDGET_BITS = 6, 2
"""Binary digits of a pool's size that free memory decides: on a CPU, whose memory others use too,
so few that a start finds its programs though somebody takes a tenth more."""
CPU_KV_BYTES = 2 << 30
"""Most bytes of KV taken unasked on a CPU, whose memory others use too."""
CPU_MEMORY_SHARE = 0.25
CPU_RUN_TOKENS = 64
"""A growing sequence's pages follow each other for so long: a CPU reads them up to a third faster
than pages here and there, others copy each page by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """What the configuration comes to on this machine; `kv_dtype` is that of the pool's arrays,
    `num_slots` the rows that the device's state has places for."""

    limits: StepLimits
    num_slots: int
    lattice: Lattice
    backend: Backend
    kv_dtype: jnp.dtype


def size_engine(
    config: EngineConfig,
    model: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh,
    *,
    unread_bytes: int = 0,
    block_quantized_rows: int = 0,
    host_memory_bytes: int | None = None,
    task: Task = "generate",
) -> EngineSize:
    """Resolves everything that depends on the model and the machine.

    Args:
        dtype: of activations.
        unread_bytes: memory that weights will take and have not yet.
        block_quantized_rows: of decode programs that read block-quantized weights; 0 where there
            are none.
        host_memory_bytes: of the host's memory; None takes what is available.
        task: what requests ask for; not "auto".

    Raises:
        InvalidConfigError: the context exceeds the model's, or the pool cannot hold one page a
            sequence needs.
    """
    platform = mesh.devices.flat[0].platform
    max_model_len = _max_model_len(config, model)
    page_size = config.block_size or default_page_size(platform)
    pages_per_seq = -(-max_model_len // page_size)
    table_pages = -(-pages_per_seq // TABLE_ALIGNMENT_PAGES) * TABLE_ALIGNMENT_PAGES
    config = config.with_token_budget(SERVING_BATCHED_TOKENS)
    max_tokens = config.max_num_batched_tokens
    assert max_tokens is not None
    if not config.enable_chunked_prefill:
        max_tokens = max(max_tokens, max_model_len)
    kv_dtype = requested_kv_dtype(config, dtype)
    backend = choose_attention(
        config.attention_backend,
        model,
        mesh,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        max_tokens=max_tokens,
    )
    if backend in ("xla", "reference"):
        kv_dtype = stored_dtype(kv_dtype)
    # A CPU branches for nothing, and one variant less halves what is compiled. Elsewhere a branch
    # on a device value costs a round trip.
    variants: tuple[Variant, ...] = ("general",) if platform == "cpu" else ("greedy", "general")
    # A prompt that is not split wants a step of its own length.
    is_few = config.warm_up == "few" and config.enable_chunked_prefill
    lattice = make_lattice(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        num_steps=config.num_decode_steps,
        variants=variants if task != "embed" else (),
        pools=task != "generate",
        block_quantized_rows=block_quantized_rows,
        has_dear_rows=platform == "cpu",
        for_few=is_few,
        has_quick=platform == "cpu"
        and backend == "xla"
        and any(takes_pages(cache.key_size, page_size, kv_dtype) for cache in model.own_caches()),
    )
    num_rows, max_prefill_rows = config.max_num_seqs, lattice.max_prefill_rows
    token_edges = lattice.token_edges
    if is_few:
        num_rows, max_tokens = min(num_rows, FEW_ROWS), min(max_tokens, FEW_TOKENS)
        max_prefill_rows = prefill_rows(max_tokens, num_rows)
        token_edges = tuple(edge for edge in token_edges if edge <= max_tokens)
    windows = model.cache_layout().windows
    pools = pool_layouts(model, backend, page_size)
    page_bytes = page_size * kv_bytes_per_token(model, kv_dtype, pools)
    needs = page_needs(page_size, windows, max_tokens)
    return EngineSize(
        limits=StepLimits(
            max_num_batched_tokens=max_tokens,
            max_num_seqs=num_rows,
            max_num_steps=config.num_decode_steps,
            max_prefill_rows=max_prefill_rows,
            max_pages_per_seq=table_pages,
            page_size=page_size,
            num_pages=_num_pages(
                config, mesh, page_bytes, needs, max_model_len, unread_bytes, host_memory_bytes
            ),
            max_model_len=max_model_len,
            token_edges=token_edges,
            num_host_pages=_num_host_pages(config, page_bytes),
            windows=windows,
            run_pages=max(1, CPU_RUN_TOKENS // page_size) if platform == "cpu" else 1,
            has_dear_rows=platform == "cpu",
        ),
        num_slots=config.max_num_seqs,
        lattice=lattice,
        backend=backend,
        kv_dtype=kv_dtype,
    )


def requested_kv_dtype(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of keys and values that a configuration asks for, with activations of `dtype`."""
    return dtype if config.kv_cache_dtype == "auto" else KV_DTYPES[config.kv_cache_dtype]


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        return min(longest, DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > longest:
        raise InvalidConfigError(
            "max_model_len", config.max_model_len, f"at most {longest}, the model's own context"
        )
    return config.max_model_len


def _num_pages(
    config: EngineConfig,
    mesh: Mesh,
    page_bytes: int,
    needs: PageNeeds,
    max_model_len: int,
    unread_bytes: int,
    host_memory_bytes: int | None,
) -> int:
    """Pages in the pool, the trash page counted."""
    if config.num_kv_pages is not None:
        return config.num_kv_pages
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = _free_bytes(config, mesh, unread_bytes, host_memory_bytes)
    useful = 1 + needs.to_compute(max_model_len) * config.max_num_seqs
    least = 1 + needs.num_groups
    num_pages = min(useful, budget // page_bytes)
    if num_pages < least:
        raise InvalidConfigError(
            "kv_cache_memory_bytes", budget, f"at least {least * page_bytes}, {least} pages"
        )
    return int(num_pages)


def _num_host_pages(config: EngineConfig, page_bytes: int) -> int:
    """Pages of the host tier; 0 for none."""
    if not config.host_kv_memory_bytes:
        return 0
    if jax.process_count() > 1:
        raise InvalidConfigError(
            "host_kv_memory_bytes",
            config.host_kv_memory_bytes,
            "0 where several hosts share a mesh",
        )
    if config.host_kv_memory_bytes < page_bytes:
        raise InvalidConfigError(
            "host_kv_memory_bytes",
            config.host_kv_memory_bytes,
            f"0, or at least {page_bytes}, one page",
        )
    return config.host_kv_memory_bytes // page_bytes


def _free_bytes(
    config: EngineConfig, mesh: Mesh, unread_bytes: int, host_memory_bytes: int | None
) -> int:
    """Bytes for KV over all devices of the mesh."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        free = int(CPU_MEMORY_SHARE * max(0, _host_bytes(host_memory_bytes) - unread_bytes))
        return CPU_KV_BYTES if free >= CPU_KV_BYTES else coarsely(free, CPU_BUDGET_BITS)
    stats = device.memory_stats() or {}
    limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    free = math.floor(limit * config.gpu_memory_utilization) - used - unread_bytes // mesh.size
    # Activations and logits of the largest step, generously.
    return coarsely(max(0, free - limit // 20)) * mesh.size


def has_room_for(num_bytes: int, host_memory_bytes: int | None = None) -> bool:
    """Whether a host that holds so many more bytes has room for a whole KV pool still.

    Args:
        host_memory_bytes: of the host's memory; None takes what is available.
    """
    free = _host_bytes(host_memory_bytes) - num_bytes
    return free >= 0 and int(CPU_MEMORY_SHARE * free) >= CPU_KV_BYTES


def coarsely(num_bytes: int, num_digits: int = BUDGET_BITS) -> int:
    """Rounded down to so many binary digits: with six, at most 3% less.

    The pool's size is part of every program: were it to follow free memory to the byte, no two
    starts would find each other's programs in the compile cache.
    """
    step = 1 << max(0, num_bytes.bit_length() - num_digits)
    return num_bytes // step * step


def _host_bytes(given: int | None) -> int:
    """Memory that the host has left; where it does not say, little is taken."""
    available = available_memory_bytes() if given is None else given
    return CPU_KV_BYTES if available is None else available
