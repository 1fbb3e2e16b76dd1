"""KV pages on their way to the host and back."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.page_copies import SIZES, PageCopier, pieces
from octavo.engine.execution.state import StateLayout
from octavo.engine.executor import TransferDone
from octavo.engine.scheduler.step_plan import PageCopy
from octavo.models.flat_config import flat_config
from octavo.pallas_kernels.ragged_paged_attention import PagedKV
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import KV_DTYPES, stored_dtype
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import PoolLayout
from octavo.sharding.mesh import make_mesh

NUM_PAGES, NUM_HOST_PAGES = 96, 80
# As a TPU has heads of 64: a key and its value in one row, scales in more places than tokens.
ONE_ROW = PoolLayout(halves=1, width=16, page_size=4, scale_width=8)


def layout(
    num_devices: int = 1,
    num_pages: int = NUM_PAGES,
    dtype: str = "float32",
    pool: PoolLayout | None = None,
) -> StateLayout:
    config = flat_config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    return StateLayout(
        config=config,
        mesh=make_mesh(num_devices),
        num_slots=2,
        num_pages=num_pages,
        page_size=4,
        table_pages=8,
        dtype=stored_dtype(KV_DTYPES[dtype]),
        pools=None if pool is None else (pool,) * config.num_layers,
    )


def random_pools(of: StateLayout, seed: int) -> tuple[PagedKV, ...]:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jax.device_put(
            (rng.standard_normal(x.shape, np.float32) * 40).astype(x.dtype), x.sharding
        ),
        of.abstract().kv,
    )


def finish(copier: PageCopier, kv: Any) -> tuple[Any, list[TransferDone]]:
    """Polls until a copy has ended."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        kv, ended = copier.poll(kv)
        if ended:
            return kv, ended
    raise TimeoutError


def values(kv: Any) -> list[np.ndarray]:
    return [np.array(pool) for pool in jax.tree.leaves(kv)]  # copies: a view would stop donation


@pytest.fixture(
    params=[
        (1, "float32", None),
        (2, "float32", None),
        (1, "int8", None),
        (1, "fp8", None),
        (2, "int8", ONE_ROW),
    ],
    ids=["one device", "two devices", "int8", "fp8", "int8 in one row on two devices"],
)
def copier(request: pytest.FixtureRequest) -> Any:
    num_devices, dtype, pool = request.param
    if jax.device_count() < num_devices:
        pytest.skip("needs two devices")
    copier = PageCopier(layout(num_devices, dtype=dtype, pool=pool), NUM_HOST_PAGES)
    copier.compile()
    yield copier
    copier.close()


def layout_of(copier: PageCopier) -> StateLayout:
    names = {stored_dtype(dtype): name for name, dtype in KV_DTYPES.items()}
    pool = ONE_ROW if copier.host[0].shape[2] == 1 else None
    return layout(copier._mesh.size, dtype=names[copier.host[0].dtype], pool=pool)


@pytest.mark.parametrize("num_pages", [1, 8, 9, 70])
def test_pages_come_back_as_they_went_to_wherever_they_are_sent(
    copier: PageCopier, num_pages: int
) -> None:
    rng = np.random.default_rng(num_pages)
    away = tuple(rng.permutation(np.arange(1, NUM_PAGES))[:num_pages].tolist())
    back = tuple(rng.permutation(np.arange(1, NUM_PAGES))[:num_pages].tolist())
    host = tuple(rng.permutation(NUM_HOST_PAGES)[:num_pages].tolist())
    kv = random_pools(layout_of(copier), 1)
    before = values(kv)
    copier.begin_out(
        kv, PageCopy(transfer_id=4, request_id="a", device_pages=away, host_pages=host)
    )
    kv, ended = finish(copier, kv)
    assert [done[:2] for done in ended] == [(4, True)]
    assert ended[0].seconds > 0
    assert copier.is_busy is False

    kv = random_pools(layout_of(copier), 2)
    others = values(kv)
    copier.begin_in(PageCopy(transfer_id=5, request_id="a", device_pages=back, host_pages=host))
    kv, ended = finish(copier, kv)
    assert [done[:2] for done in ended] == [(5, True)]
    assert ended[0].seconds > 0
    untouched = sorted(set(range(NUM_PAGES)) - set(back))
    for was, other, now in zip(before, others, values(kv), strict=True):
        np.testing.assert_array_equal(now[list(back)], was[list(away)])
        np.testing.assert_array_equal(now[untouched], other[untouched])


def test_what_is_dispatched_after_a_copy_out_may_overwrite_its_pages(copier: PageCopier) -> None:
    kv = random_pools(layout_of(copier), 1)
    before = values(kv)
    copier.begin_out(
        kv, PageCopy(transfer_id=0, request_id="a", device_pages=(3, 5), host_pages=(0, 1))
    )
    wipe = jax.jit(lambda kv: jax.tree.map(jnp.zeros_like, kv), donate_argnums=0)
    kv, _ = finish(copier, wipe(kv))
    copier.begin_in(PageCopy(transfer_id=1, request_id="a", device_pages=(3, 5), host_pages=(0, 1)))
    kv, _ = finish(copier, kv)
    for was, now in zip(before, values(kv), strict=True):
        np.testing.assert_array_equal(now[[3, 5]], was[[3, 5]])
        assert not now[[1, 2, 4]].any()


def test_a_timed_round_trip_leaves_the_device_as_it_was(copier: PageCopier) -> None:
    kv = random_pools(layout_of(copier), 1)
    before = values(kv)
    kv, seconds = copier.time_round_trip(kv, 70)
    assert seconds > 0
    assert copier.is_busy is False
    for was, now in zip(before, values(kv), strict=True):
        np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize("half", ["_store", "_load"])
def test_a_copy_that_fails_is_told_and_changes_nothing(
    copier: PageCopier, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(copier, half, broken)
    kv = random_pools(layout_of(copier), 1)
    before = values(kv)
    copy = PageCopy(transfer_id=7, request_id="a", device_pages=(3,), host_pages=(0,))
    if half == "_store":
        copier.begin_out(kv, copy)
    else:
        copier.begin_in(copy)
    kv, ended = finish(copier, kv)
    assert ended == [TransferDone(7, ok=False)]
    for was, now in zip(before, values(kv), strict=True):
        np.testing.assert_array_equal(now, was)


def test_after_a_reset_nothing_is_told_of_earlier_copies(copier: PageCopier) -> None:
    kv = random_pools(layout_of(copier), 1)
    copier.begin_out(
        kv, PageCopy(transfer_id=0, request_id="a", device_pages=(3,), host_pages=(0,))
    )
    copier.reset()
    assert not copier.is_busy
    assert copier.poll(kv)[1] == []


def test_bringing_pages_back_never_copies_the_pool() -> None:
    def temporary_bytes(num_pages: int) -> int:
        copier = PageCopier(layout(num_pages=num_pages), 8)
        copier.compile()
        copier.close()
        analysis = copier._scatters[SIZES[0]].memory_analysis()
        return int(analysis.temp_size_in_bytes)

    assert temporary_bytes(32 * NUM_PAGES) == temporary_bytes(NUM_PAGES)


def test_a_long_copy_goes_in_few_pieces() -> None:
    assert list(pieces(3)) == [(0, 8)]
    assert list(pieces(9)) == [(0, 64)]
    assert list(pieces(130)) == [(0, 64), (64, 64), (128, 8)]
