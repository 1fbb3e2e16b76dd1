"""What lives on the device between steps; donated to each step and returned by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from octavo.engine.execution.logits import LogitsState, SamplingRows
from octavo.models.config import ModelConfig
from octavo.pallas_kernels.ragged_paged_attention import PagedKV
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import bytes_per_head
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import PoolLayout, pool_layout
from octavo.sharding.mesh import TENSOR_AXIS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """KV pool and row state. The last slot is the trash row that padding rows use.

    Attributes:
        kv: one pool a layer, never stacked: [N, 2, Hkv, P, D], and scales [N, 2, Hkv, P] if any;
            `PoolLayout` says where a backend has it otherwise.
        block_table: int32[slots, M].
        num_computed_tokens: int32[slots] positions whose KV is written.
        max_total_tokens: int32[slots] prompt and output tokens at which the row stops.
        last_token: int32[slots] newest token, not yet computed.
        stopped: bool[slots] the row met a stop token or its limit; it idles.
        sampling: every slot's sampling parameters.
        logits: vocabulary-sized state of the slots that need it.
    """

    kv: tuple[PagedKV, ...]
    block_table: jax.Array
    num_computed_tokens: jax.Array
    max_total_tokens: jax.Array
    last_token: jax.Array
    stopped: jax.Array
    sampling: SamplingRows
    logits: LogitsState


def head_axis(config: ModelConfig, mesh: Mesh) -> str | None:
    """The mesh axis that splits heads; None when they do not divide, and all run everywhere."""
    return TENSOR_AXIS if config.num_kv_heads % mesh.shape[TENSOR_AXIS] == 0 else None


def kv_pool_sharding(config: ModelConfig, mesh: Mesh) -> NamedSharding:
    """Where a pool [N, 2, Hkv, P, D] lives: split over heads."""
    axis = head_axis(config, mesh)
    return NamedSharding(mesh, P() if axis is None else P(None, None, axis))


def kv_bytes_per_token(
    config: ModelConfig, dtype: jnp.dtype, pool: PoolLayout | None = None
) -> int:
    """Bytes of KV for one token over all layers and devices, scales counted.

    Args:
        dtype: of the pool.
        pool: how it lies, padding counted; None counts the model's own numbers.
    """
    per_head = bytes_per_head(dtype, config.head_dim)
    if pool is not None:
        per_head = pool.bytes_per_head(dtype)
    return 2 * config.num_layers * config.num_kv_heads * per_head


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Shapes of the device state, and where it lives.

    Attributes:
        config: the model, as sharded.
        mesh: the device mesh.
        num_slots: rows, the trash row not counted.
        num_pages, page_size: the pool, page 0 (trash) counted.
        table_pages: M.
        dtype: of KV.
        pool: how the attention backend lays a pool out; None is plain XLA's way.
    """

    config: ModelConfig
    mesh: Mesh
    num_slots: int
    num_pages: int
    page_size: int
    table_pages: int
    dtype: jnp.dtype
    pool: PoolLayout | None = None

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
        pool = self.pool or pool_layout("xla", config.head_dim, self.page_size)
        shape = pool.shape(self.num_pages, config.num_kv_heads)

        def zeros(*tail: int) -> jax.Array:
            return jnp.zeros((slots, *tail), jnp.int32)

        return DeviceState(
            kv=tuple(
                PagedKV.zeros(shape, self.dtype, pool.scale_width) for _ in range(config.num_layers)
            ),
            block_table=zeros(self.table_pages),
            num_computed_tokens=zeros(),
            max_total_tokens=zeros(),
            last_token=zeros(),
            stopped=jnp.ones((slots,), jnp.bool_),
            sampling=SamplingRows.init(slots),
            logits=LogitsState.init(slots, config.vocab_size),
        )


def state_shardings(state: DeviceState, config: ModelConfig, mesh: Mesh) -> DeviceState:
    """The sharding of every array of a state: pools over heads, the rest on every device."""
    whole, pool = NamedSharding(mesh, P()), kv_pool_sharding(config, mesh)
    shardings = jax.tree.map(lambda _: whole, state)
    return replace(shardings, kv=jax.tree.map(lambda _: pool, state.kv))
