"""What lives on the device between steps; donated to each step and returned by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from octavo.engine.errors import UnsupportedModelError
from octavo.engine.execution.sampling.logits import LogitsState, SamplingRows
from octavo.models.cache_spec import LatentCache, PagedCache, StateArray
from octavo.models.config import ModelConfig
from octavo.pallas_kernels.ragged_paged_attention import Backend, PagedKV
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import bytes_per_head
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import PoolLayout, pool_layout
from octavo.sharding.mesh import TENSOR_AXIS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """KV pool and row state. The last slot is the trash row that padding rows use.

    Attributes:
        kv: one pool for each array of `ModelConfig.cache_layout()`, never stacked:
            [N, 2, Hkv, P, D], and scales [N, 2, Hkv, P] if any; `PoolLayout` says where a backend
            has it otherwise, and latents are [N, 1, 1, P, D] everywhere.
        block_table: int32[G, slots, M], a table for each cache group.
        num_computed_tokens: int32[slots] positions whose KV is written.
        max_total_tokens: int32[slots] prompt and output tokens at which the row stops.
        last_token: int32[slots] newest token, not yet computed.
        stopped: bool[slots] the row met a stop token or its limit; it idles.
        sampling: every slot's sampling parameters.
        logits: vocabulary-sized state of the slots that need it.
        recurrent: of each recurrent layer, its arrays [slots + snapshots, ...], float32. A row that
            begins is read as zeros, whatever lies in its slot. Snapshots come behind the trash row.
    """

    kv: tuple[PagedKV, ...]
    block_table: jax.Array
    num_computed_tokens: jax.Array
    max_total_tokens: jax.Array
    last_token: jax.Array
    stopped: jax.Array
    sampling: SamplingRows
    logits: LogitsState
    recurrent: tuple[tuple[jax.Array, ...], ...] = ()


def head_axis(num_kv_heads: int, mesh: Mesh) -> str | None:
    """The mesh axis that splits a layer's heads; None when they do not divide, and all run
    everywhere."""
    return TENSOR_AXIS if num_kv_heads % mesh.shape[TENSOR_AXIS] == 0 else None


def query_axis(num_heads: int, num_kv_heads: int, mesh: Mesh) -> str | None:
    """The mesh axis that splits a layer's query heads: they go with the KV heads that they read,
    but for one KV head, which every device has."""
    return head_axis(num_heads if num_kv_heads == 1 else num_kv_heads, mesh)


def pool_layouts(config: ModelConfig, backend: Backend, page_size: int) -> tuple[PoolLayout, ...]:
    """How an attention backend lays out each array of `config.cache_layout()`.

    Raises:
        UnsupportedModelError: a cache whose keys and values differ in size and lie apart, which no
            pool holds.
    """

    def layout(cache: PagedCache) -> PoolLayout:
        if isinstance(cache, LatentCache):
            return pool_layout(backend, cache.key_size, page_size, cache.value_size)
        if cache.key_size != cache.value_size:
            raise UnsupportedModelError(
                f"value_size = {cache.value_size} is not supported: {cache.key_size}, as wide as "
                "keys"
            )
        return pool_layout(backend, cache.key_size, page_size)

    return tuple(map(layout, config.cache_layout().arrays))


def kv_bytes_per_token(
    config: ModelConfig, dtype: jnp.dtype, pools: tuple[PoolLayout, ...] | None = None
) -> int:
    """Bytes of a token of a page over all arrays and devices, scales counted. A page is of one
    cache group; each group keeps its own of a token.

    Args:
        dtype: of the pools.
        pools: how they lie, padding counted; None counts the model's own numbers.
    """
    caches = config.cache_layout().arrays
    if pools is None:
        return sum(_bytes_per_token(cache, dtype) for cache in caches)
    return sum(
        cache.num_kv_heads * pool.bytes_per_token(dtype)
        for cache, pool in zip(caches, pools, strict=True)
    )


def _bytes_per_token(cache: PagedCache, dtype: jnp.dtype) -> int:
    """Bytes of the numbers that a cache keeps of a token, scales counted."""
    if isinstance(cache, LatentCache):
        return bytes_per_head(dtype, cache.key_size, num_scales=2)
    sizes = (cache.key_size, cache.value_size)
    return cache.num_kv_heads * sum(bytes_per_head(dtype, size) for size in sizes)


def recurrent_bytes(config: ModelConfig, num_slots: int) -> int:
    """Bytes of so many recurrent states of all layers, over all devices."""
    return num_slots * sum(state.num_bytes for state in config.cache_layout().states)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Shapes of the device state, and where it lives.

    Attributes:
        config: the model, as sharded.
        mesh: the device mesh.
        num_slots: rows, the trash row not counted.
        num_snapshots: places for snapshots of recurrent states.
        num_pages, page_size: the pool, page 0 (trash) counted.
        table_pages: M, entries of a row of a block table.
        dtype: of KV.
        pools: how the attention backend lays out each pool, see `pool_layouts`; None is plain XLA's
            way.
    """

    config: ModelConfig
    mesh: Mesh
    num_slots: int
    num_pages: int
    page_size: int
    table_pages: int
    dtype: jnp.dtype
    pools: tuple[PoolLayout, ...] | None = None
    num_snapshots: int = 0

    def abstract(self) -> DeviceState:
        """The state as `jax.ShapeDtypeStruct`s with shardings."""
        shapes = jax.eval_shape(self._build)
        shardings = state_shardings(shapes, self.config, self.mesh)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            shardings,
        )

    def init(self) -> DeviceState:
        """Zeroed pools and no rows, on the devices of the mesh."""
        return jax.block_until_ready(self.maker()())

    def maker(self) -> Callable[[], DeviceState]:
        """As `init`, without waiting; compiled at its first call, for whoever calls it again."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract())
        return jax.jit(self._build, out_shardings=shardings)

    def _build(self) -> DeviceState:
        config, slots = self.config, self.num_slots + 1
        layout = config.cache_layout()
        pools = self.pools or pool_layouts(config, "xla", self.page_size)

        def zeros(*tail: int) -> jax.Array:
            return jnp.zeros((slots, *tail), jnp.int32)

        return DeviceState(
            kv=tuple(
                pool.zeros(self.num_pages, cache.num_kv_heads, self.dtype)
                for cache, pool in zip(layout.arrays, pools, strict=True)
            ),
            block_table=jnp.zeros((len(layout.groups), slots, self.table_pages), jnp.int32),
            num_computed_tokens=zeros(),
            max_total_tokens=zeros(),
            last_token=zeros(),
            stopped=jnp.ones((slots,), jnp.bool_),
            sampling=SamplingRows.init(slots),
            logits=LogitsState.init(slots, config.vocab_size),
            recurrent=tuple(
                tuple(
                    jnp.zeros((slots + self.num_snapshots, *array.shape), jnp.float32)
                    for array in state.arrays
                )
                for state in layout.states
            ),
        )


def state_shardings(state: DeviceState, config: ModelConfig, mesh: Mesh) -> DeviceState:
    """The sharding of every array of a state: pools over heads, the rest on every device."""
    whole = NamedSharding(mesh, P())
    shardings = jax.tree.map(lambda _: whole, state)
    pools = []
    for kv, cache in zip(state.kv, config.cache_layout().arrays, strict=True):
        axis = head_axis(cache.num_kv_heads, mesh)  # of a pool [N, 2, Hkv, P, D]
        pool = whole if axis is None else NamedSharding(mesh, P(None, None, axis))
        pools.append(jax.tree.map(lambda _, pool=pool: pool, kv))
    recurrent = tuple(
        tuple(_state_sharding(array, mesh) for array in one.arrays)
        for one in config.cache_layout().states
    )
    return replace(shardings, kv=tuple(pools), recurrent=recurrent)


def _state_sharding(array: StateArray, mesh: Mesh) -> NamedSharding:
    """Where rows' states lie: split, if that dimension divides over the devices."""
    axis = head_axis(array.shape[array.split], mesh)
    lead = (None,) * (1 + array.split)
    return NamedSharding(mesh, P() if axis is None else P(*lead, axis))
