"""What an engine is, decided once from its configuration, its model and the devices at hand.

Kernels, weight variants, the lattice of programs, context and pages stand in one `EngineSetup`
when `decide_setup` returns. Scheduler, executor, and processes that compile are told it, and ask no
device again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import Mesh

from octavo.engine.config import FEW_ROWS, FEW_TOKENS, SERVING_BATCHED_TOKENS, EngineConfig, Task
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.platform.buckets import Lattice, make_lattice
from octavo.engine.execution.platform.kernel_choice import Kernels, choose_attention, choose_experts
from octavo.engine.execution.platform.kv_memory import kv_budget_bytes, requested_kv_dtype
from octavo.engine.execution.platform.traits import PlatformTraits, traits_of
from octavo.engine.execution.state import kv_bytes_per_token, pool_layouts, recurrent_bytes
from octavo.engine.execution.step_spec import prefill_rows
from octavo.engine.execution.weights.weight_variants import WeightVariants
from octavo.engine.kv.page_needs import PageNeeds, page_needs
from octavo.engine.kv.state_snapshots import default_num_places
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.models.cache_spec import LatentCache
from octavo.models.config import ModelConfig
from octavo.pallas_kernels.cpu.native_attention import takes_pages
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import stored_dtype
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import default_page_size

DEFAULT_MAX_MODEL_LEN = 8192
TABLE_ALIGNMENT_PAGES = 8
"""A row of the block table is whole blocks of pages, so that attention never slices past it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What executor and scheduler are made from. Plain data, but for the mesh.

    Attributes:
        model: as sharded over the mesh, for the context that is served.
        mesh: the device mesh.
        limits: what plans may ask for.
        num_slots: rows that the device's state has places for, as many as another engine's whose
            programs it shares; at least those that plans may have.
        lattice: shapes to compile.
        kernels: implementations that programs are compiled with.
        kv_dtype: of the KV pools' arrays.
        variants: of the weights.
    """

    model: ModelConfig
    mesh: Mesh
    limits: StepLimits
    num_slots: int
    lattice: Lattice
    kernels: Kernels
    kv_dtype: jnp.dtype
    variants: WeightVariants

    @property
    def traits(self) -> PlatformTraits:
        """What follows from the kind of devices."""
        return traits_of(self.mesh)


def decide_setup(
    config: EngineConfig,
    model: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh,
    variants: WeightVariants,
    *,
    unread_bytes: int = 0,
    host_memory_bytes: int | None = None,
    task: Task = "generate",
) -> EngineSetup:
    """Resolves everything that depends on the model and the machine.

    Args:
        dtype: of activations.
        variants: of the weights.
        unread_bytes: of the host's memory, that weights will take and have not yet.
        host_memory_bytes: of the host's memory; None takes what is available.
        task: what requests ask for; not "auto".

    Raises:
        InvalidConfigError: the context exceeds the model's, or the pool cannot hold one page a
            sequence needs.
    """
    traits = traits_of(mesh)
    max_model_len = _max_model_len(config, model)
    model = model.for_context(max_model_len)
    page_size = config.block_size or default_page_size(mesh.devices.flat[0].platform)
    pages_per_seq = -(-max_model_len // page_size)
    config = config.with_token_budget(SERVING_BATCHED_TOKENS)
    max_tokens = config.max_num_batched_tokens
    assert max_tokens is not None
    if not config.enable_chunked_prefill:
        max_tokens = max(max_tokens, max_model_len)
    kv_dtype = requested_kv_dtype(config, dtype)
    attention = choose_attention(
        config.attention_backend,
        model,
        mesh,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        max_tokens=max_tokens,
    )
    if attention in ("xla", "reference"):
        kv_dtype = stored_dtype(kv_dtype)
    # A prompt that is not split wants a step of its own length.
    is_few = config.warm_up == "few" and config.enable_chunked_prefill
    lattice = make_lattice(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        num_steps=config.num_decode_steps,
        variants=traits.variants if task != "embed" else (),
        pools=task != "generate",
        block_quantized_rows=variants.block_quantized_rows,
        has_dear_rows=traits.has_dear_rows,
        for_few=is_few,
        has_quick=traits.has_quick_programs
        and attention == "xla"
        and any(
            takes_pages(cache.key_size, page_size, kv_dtype)
            for cache in model.cache_layout().arrays
            if not isinstance(cache, LatentCache)
        ),
    )
    num_rows, max_prefill_rows = config.max_num_seqs, lattice.max_prefill_rows
    token_edges = lattice.token_edges
    if is_few:
        num_rows, max_tokens = min(num_rows, FEW_ROWS), min(max_tokens, FEW_TOKENS)
        max_prefill_rows = prefill_rows(max_tokens, num_rows)
        token_edges = tuple(edge for edge in token_edges if edge <= max_tokens)
    windows = model.cache_layout().windows
    pools = pool_layouts(model, attention, page_size)
    page_bytes = page_size * kv_bytes_per_token(model, kv_dtype, pools)
    num_pages, num_snapshots = config.num_kv_pages, _num_snapshots(config, model)
    if num_pages is None:
        budget = kv_budget_bytes(config, mesh, unread_bytes, host_memory_bytes)
        states = recurrent_bytes(model, config.max_num_seqs + 1 + num_snapshots)
        if states >= budget:
            allowed = f"more than {states}, for which max_num_seqs and num_state_snapshots ask"
            raise InvalidConfigError("kv_cache_memory_bytes", budget, allowed)
        budget -= states
        needs = page_needs(page_size, windows, max_tokens)
        num_pages = _num_pages(budget, page_bytes, needs, max_model_len, config.max_num_seqs)
    return EngineSetup(
        model=model,
        mesh=mesh,
        limits=StepLimits(
            max_num_batched_tokens=max_tokens,
            max_num_seqs=num_rows,
            max_num_steps=config.num_decode_steps,
            max_prefill_rows=max_prefill_rows,
            max_pages_per_seq=-(-pages_per_seq // TABLE_ALIGNMENT_PAGES) * TABLE_ALIGNMENT_PAGES,
            page_size=page_size,
            num_pages=num_pages,
            max_model_len=max_model_len,
            token_edges=token_edges,
            num_host_pages=_num_host_pages(config, model, page_bytes),
            windows=windows,
            run_pages=max(1, traits.run_tokens // page_size),
            has_dear_rows=traits.has_dear_rows,
            has_states=bool(model.cache_layout().states),
            num_snapshots=num_snapshots,
            snapshot_tokens=math.lcm(
                page_size, *(state.chunk_tokens for state in model.cache_layout().states)
            ),
        ),
        num_slots=config.max_num_seqs,
        lattice=lattice,
        kernels=Kernels(attention=attention, experts=choose_experts(model, mesh, dtype=dtype)),
        kv_dtype=kv_dtype,
        variants=variants,
    )


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
    budget: int, page_bytes: int, needs: PageNeeds, max_model_len: int, num_rows: int
) -> int:
    """Pages in a pool of so many bytes, the trash page counted, and no more than rows can use."""
    useful = 1 + needs.to_compute(max_model_len) * num_rows
    least = 1 + needs.num_groups
    num_pages = min(useful, budget // page_bytes)
    if num_pages < least:
        raise InvalidConfigError(
            "kv_cache_memory_bytes", budget, f"at least {least * page_bytes}, {least} pages"
        )
    return int(num_pages)


def _num_snapshots(config: EngineConfig, model: ModelConfig) -> int:
    """Places for snapshots of recurrent states; 0 for none."""
    layout, wanted = model.cache_layout(), config.num_state_snapshots
    if wanted and not layout.states:
        raise InvalidConfigError("num_state_snapshots", wanted, "0 without recurrent layers")
    if wanted and layout.windows != (None,):
        raise InvalidConfigError("num_state_snapshots", wanted, "0 with windows")
    if not layout.states or layout.windows != (None,) or not config.enable_prefix_caching:
        return 0
    if wanted is not None:
        return wanted
    return default_num_places(config.max_num_seqs, recurrent_bytes(model, 1))


def _num_host_pages(config: EngineConfig, model: ModelConfig, page_bytes: int) -> int:
    """Pages of the host tier; 0 for none."""
    if not config.host_kv_memory_bytes:
        return 0
    if model.cache_layout().states:
        raise InvalidConfigError(
            "host_kv_memory_bytes",
            config.host_kv_memory_bytes,
            "0 with a model that has recurrent layers, whose states no page holds",
        )
    if config.host_kv_memory_bytes < page_bytes:
        raise InvalidConfigError(
            "host_kv_memory_bytes",
            config.host_kv_memory_bytes,
            f"0, or at least {page_bytes}, one page",
        )
    return config.host_kv_memory_bytes // page_bytes
