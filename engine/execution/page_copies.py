"""Moves KV pages between the device and the host tier, while steps run.

Out: one gather of the pages, queued before the step that may overwrite them (device order makes
them free at once), then a copy to host memory in a thread. In: the thread assembles the pages and
hands them to the device; when they are there, a scatter into the donated pools is queued, and every
later step sees them. Copies inside a step's program would end within the program, and the next step
wait for them; these do not.

Pools whose pages have the same shape move together, as one array of all of them. Where several
hosts share the mesh, the host tier lies in shards: each host keeps the heads of its own devices.

Shapes: N pages a program, L pools of a group, a page [2, Hkv, P, D] and its scales [2, Hkv, P] if
any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from octavo.engine.execution.state import StateLayout, head_axis
from octavo.engine.executor import TransferDone
from octavo.engine.scheduler.step_plan import PageCopy
from octavo.pallas_kernels.ragged_paged_attention import PagedKV

logger = logging.getLogger(__name__)

SIZES = (8, 64)
"""Pages that the compiled copies move at once; longer ones go in pieces."""

_HEADS = 3
"""Dimension of a block that devices share."""

KV = tuple[PagedKV, ...]
Block = tuple[jax.Array, ...]
"""Some pages of all pools: of each group, for each array of a pool, one [pages, L, ...]."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Pools whose pages have the same shape.

    Attributes:
        members: which of the state's.
        parts: of each array of a pool (its pages, and scales if any): shape and dtype of a page,
            and how blocks of pages of all members are sharded.
    """

    members: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], Any, NamedSharding], ...]


@dataclass(slots=True, eq=False)
class _Pending:
    """A copy on its way; the future gives its seconds and, of one in, the device's blocks."""

    copy: PageCopy
    future: Future[tuple[float, list[Block]]]
    is_in: bool

    def end(self) -> TransferDone | None:
        """How it ended; None while it is on its way."""
        if not self.future.done():
            return None
        error = self.future.exception()
        if error is not None:
            return TransferDone(self.copy.transfer_id, ok=False)
        seconds, blocks = self.future.result()
        if not all(_is_ready(array) for array in jax.tree.leaves(blocks)):
            return None
        return TransferDone(self.copy.transfer_id, ok=True, seconds=seconds)


class PageCopier:
    """The bytes of the host tier, and the copies to and from it. Driven by the engine's thread.

    Args:
        layout: the device state's layout.
        num_host_pages: pages of the host tier, ≥ 1. Their memory is touched when first used.
    """

    def __init__(self, layout: StateLayout, num_host_pages: int) -> None:
        self._kv = layout.abstract().kv
        self._groups = _groups(self._kv, layout)
        parts = [(group, part) for group in self._groups for part in group.parts]
        self._shardings = tuple(sharding for _, (_, _, sharding) in parts)
        self._page_shapes = tuple((len(group.members), *shape) for group, (shape, _, _) in parts)
        self.host: tuple[NDArray[Any], ...] = tuple(
            np.empty((num_host_pages, *_shape_here(shape, sharding)), np.dtype(dtype))
            for shape, sharding, (_, (_, dtype, _)) in zip(
                self._page_shapes, self._shardings, parts, strict=True
            )
        )
        """Of each group, for each array of a pool, this host's part of one of all members."""
        self._num_pages = layout.num_pages
        self._mesh = layout.mesh
        self._flat = layout.mesh.size == 1
        self._gathers: dict[int, Any] = {}
        self._scatters: dict[int, Any] = {}
        self._pending: list[_Pending] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-pages")

    def compile(self) -> None:
        """Compiles the copies, so that none waits for it."""
        whole = NamedSharding(self._mesh, P())
        kv_shardings = jax.tree.map(lambda x: x.sharding, self._kv)
        for size in SIZES:
            ids = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)
            block = tuple(
                jax.ShapeDtypeStruct((size, *shape), host.dtype, sharding=sharding)
                for host, shape, sharding in zip(
                    self.host, self._page_shapes, self._shardings, strict=True
                )
            )
            gather = jax.jit(self._gather, out_shardings=self._shardings)
            scatter = jax.jit(self._scatter, donate_argnums=0, out_shardings=kv_shardings)
            self._gathers[size] = gather.lower(self._kv, ids).compile()
            self._scatters[size] = scatter.lower(self._kv, ids, block).compile()

    def begin_out(self, kv: KV, copy: PageCopy) -> None:
        """Queues the gather of a copy's device pages; steps dispatched later may write to them."""
        blocks = []
        for start, size in pieces(len(copy.device_pages)):
            ids = np.zeros(size, np.int32)  # padding reads the trash page
            part = copy.device_pages[start : start + size]
            ids[: len(part)] = part
            blocks.append(self._gathers[size](kv, ids))
        for array in jax.tree.leaves(blocks):
            array.copy_to_host_async()
        future = self._thread.submit(self._store, blocks, copy.host_pages)
        self._pending.append(_Pending(copy, future, is_in=False))

    def begin_in(self, copy: PageCopy) -> None:
        """Begins to bring a copy's host pages to the device."""
        future = self._thread.submit(self._load, copy.host_pages)
        self._pending.append(_Pending(copy, future, is_in=True))

    @property
    def page_layout(self) -> str:
        """Shapes and dtypes of what a host page holds, in the order of `read`."""
        return ", ".join(f"{host.dtype}{list(host.shape[1:])}" for host in self.host)

    @property
    def page_bytes(self) -> int:
        """Of what `read` gives."""
        return sum(host[0].nbytes for host in self.host)

    def read(self, page: int) -> bytes:
        """What a host page holds: its part of each array, one after the other."""
        return b"".join(host[page].tobytes() for host in self.host)

    def write(self, page: int, content: bytes) -> None:
        """Fills a host page that no copy is at with what `read` gave."""
        assert len(content) == self.page_bytes, len(content)
        start = 0
        for host in self.host:
            into = host[page]
            end = start + into.nbytes
            into[...] = np.frombuffer(content[start:end], host.dtype).reshape(into.shape)
            start = end

    @property
    def is_busy(self) -> bool:
        """Whether a copy is on its way."""
        return bool(self._pending)

    def poll(self, kv: KV) -> tuple[KV, list[TransferDone]]:
        """Copies that ended, and the pools with those in that arrived."""
        ended = self.ended()
        for done in ended:
            kv = self.land(kv, done.transfer_id, ok=done.ok)
        return kv, ended

    def ended(self) -> list[TransferDone]:
        """Copies that ended on this host and were not landed yet."""
        return [end for pending in self._pending if (end := pending.end()) is not None]

    def land(self, kv: KV, transfer_id: int, *, ok: bool) -> KV:
        """Forgets a copy that ended; the pools, with its pages if it was one in.

        Args:
            ok: whether it ended well, on every host.
        """
        pending = next(each for each in self._pending if each.copy.transfer_id == transfer_id)
        self._pending.remove(pending)
        if not ok:
            logger.error("a copy of KV pages failed", exc_info=pending.future.exception())
        elif pending.is_in:
            kv = self._put(kv, pending.copy.device_pages, pending.future.result()[1])
        return kv

    def on_ended(self, tell: Callable[[TransferDone], None]) -> None:
        """Has the end of the copy that was begun last told from its thread, once pages are there
        where they go."""
        pending = self._pending[-1]

        def told(future: Future[tuple[float, list[Block]]]) -> None:
            if not future.cancelled() and future.exception() is None:
                jax.block_until_ready(future.result()[1])
            end = None if future.cancelled() else pending.end()
            if end is not None:
                tell(end)

        pending.future.add_done_callback(told)

    def time_round_trip(self, kv: KV, num_pages: int) -> tuple[KV, float]:
        """Seconds to copy so many pages out and back, idle before and after; for start-up alone.

        Device pages keep what they hold; the first host pages are overwritten.
        """
        copy = PageCopy(
            transfer_id=-1,
            request_id="",
            device_pages=tuple(range(1, num_pages + 1)),
            host_pages=tuple(range(num_pages)),
        )
        jax.block_until_ready(kv)
        begun_s = time.perf_counter()
        self.begin_out(kv, copy)
        self._pending[-1].future.result()
        kv, _ = self.poll(kv)
        self.begin_in(copy)
        jax.block_until_ready(self._pending[-1].future.result()[1])
        kv, _ = self.poll(kv)
        jax.block_until_ready(kv)
        return kv, time.perf_counter() - begun_s

    def reset(self) -> None:
        """Forgets every copy on its way: the device's memory was lost."""
        pending, self._pending = self._pending, []
        for item in pending:
            item.future.cancel()

    def close(self) -> None:
        """Ends the thread, after the copy at hand."""
        self._thread.shutdown(cancel_futures=True)

    def _put(self, kv: KV, device_pages: Sequence[int], blocks: list[Block]) -> KV:
        for (start, size), block in zip(pieces(len(device_pages)), blocks, strict=True):
            ids = np.full(size, self._num_pages, np.int32)  # padding is dropped
            part = device_pages[start : start + size]
            ids[: len(part)] = part
            kv = self._scatters[size](kv, ids, block)
        return kv

    # In the thread.

    def _store(self, blocks: list[Block], host_pages: Sequence[int]) -> tuple[float, list[Block]]:
        jax.block_until_ready(blocks)  # the steps before them are not the copy's own time
        begun_s = time.perf_counter()
        for (start, size), block in zip(pieces(len(host_pages)), blocks, strict=True):
            part = host_pages[start : start + size]
            for host, array in zip(self.host, block, strict=True):
                host[list(part)] = _part_here(array)[: len(part)]
        return time.perf_counter() - begun_s, []

    def _load(self, host_pages: Sequence[int]) -> tuple[float, list[Block]]:
        begun_s = time.perf_counter()
        blocks: list[Block] = []
        for start, size in pieces(len(host_pages)):
            part = host_pages[start : start + size]
            block = []
            for host, shape, sharding in zip(
                self.host, self._page_shapes, self._shardings, strict=True
            ):
                # An array of its own for every piece: a device may use the memory as it stands.
                array = np.zeros((size, *host.shape[1:]), host.dtype)
                array[: len(part)] = host[list(part)]
                block.append(_on_devices(array, (size, *shape), sharding))
            blocks.append(tuple(block))
        return time.perf_counter() - begun_s, blocks

    # Traced.

    def _gather(self, kv: KV, ids: jax.Array) -> Block:
        block = []
        for group in self._groups:
            members = (jax.tree.leaves(kv[index]) for index in group.members)
            for pools, (shape, _, _) in zip(zip(*members, strict=True), group.parts, strict=True):
                pages = jnp.stack([self._rows(pool)[ids] for pool in pools], axis=1)
                block.append(pages.reshape(ids.shape[0], len(pools), *shape))
        return tuple(block)

    def _scatter(self, kv: KV, ids: jax.Array, block: Block) -> KV:
        def put(pool: jax.Array, new: jax.Array) -> jax.Array:
            rows = self._rows(pool)
            new = new.reshape(ids.shape[0], *rows.shape[1:])
            return rows.at[ids].set(new, mode="drop").reshape(pool.shape)

        out, parts = list(kv), iter(block)
        for group in self._groups:
            pages = [next(parts) for _ in group.parts]
            for place, index in enumerate(group.members):
                pools, tree = jax.tree.flatten(kv[index])
                new = [put(pool, part[:, place]) for pool, part in zip(pools, pages, strict=True)]
                out[index] = jax.tree.unflatten(tree, new)
        return tuple(out)

    def _rows(self, pool: jax.Array) -> jax.Array:
        """A row a page. Flattened on one device, where that makes each a single copy; a flattened
        pool could not stay split over heads."""
        return pool.reshape(pool.shape[0], -1) if self._flat else pool


def _groups(kv: KV, layout: StateLayout) -> tuple[_Group, ...]:
    """The pools of a state, those whose pages have the same shape together."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for index, pool in enumerate(kv):
        leaves = jax.tree.leaves(pool)
        key = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        members.setdefault(key, []).append(index)

    def sharding(index: int) -> NamedSharding:
        axis = head_axis(layout.config.cache_layout().arrays[index].num_kv_heads, layout.mesh)
        return NamedSharding(layout.mesh, P(None, None, None, axis))

    return tuple(
        _Group(
            members=tuple(indexes),
            parts=tuple((shape, dtype, sharding(indexes[0])) for shape, dtype in key),
        )
        for key, indexes in members.items()
    )


def _shape_here(page: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    """The shape of this host's part of a page of all members."""
    whole = (1, *page)
    spans = sharding.addressable_devices_indices_map(whole).values()
    heads = {each[_HEADS].indices(whole[_HEADS])[:2] for each in spans if each is not None}
    return (*page[: _HEADS - 1], sum(end - first for first, end in heads), *page[_HEADS:])


def _part_here(block: jax.Array) -> NDArray[Any]:
    """What of a block lies on this host's devices, in the order of its heads."""
    if block.is_fully_addressable:
        return np.asarray(block)
    parts = {shard.index[_HEADS].start or 0: shard.data for shard in block.addressable_shards}
    return np.concatenate([np.asarray(parts[first]) for first in sorted(parts)], axis=_HEADS)


def _on_devices(part: NDArray[Any], shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """A block of a shape, of which this host has a part."""
    if part.shape == shape and sharding.is_fully_addressable:
        return jax.device_put(part, sharding)
    return jax.make_array_from_process_local_data(sharding, part, shape)


def _is_ready(block: Any) -> bool:
    """Whether the device has it. Such blocks are never donated, or this would crash on old JAX."""
    return bool(block.is_ready())


def pieces(num_pages: int) -> Iterator[tuple[int, int]]:
    """(first page, size of the program) of the pieces that a copy goes in."""
    start = 0
    while start < num_pages:
        left = num_pages - start
        size = next((size for size in SIZES if size >= left), SIZES[-1])
        yield start, size
        start += size
