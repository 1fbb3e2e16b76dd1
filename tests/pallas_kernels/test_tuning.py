"""Measured block sizes are found by what they were measured for, and used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.ragged_paged_attention import AttentionParams, tiles_xla
from octavo.pallas_kernels.ragged_paged_attention import tune as tune_module
from octavo.pallas_kernels.ragged_paged_attention.backends import (
    AttentionShape,
    choose_backend,
)
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case
from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import (
    choose_decode_tiles,
    choose_prefill_tiles,
)
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import choose_tpu_tiles
from octavo.pallas_kernels.ragged_paged_attention.tiles_xla import (
    XlaTiles,
    choose_xla_tiles,
    default_xla_tiles,
    device_xla_tiles,
)
from octavo.pallas_kernels.ragged_paged_attention.tune import Workload, tune
from octavo.pallas_kernels.ragged_paged_attention.xla import attend_xla
from tests.pallas_kernels.reference import attend_reference

Q, POOL = (32, 9, 64), (40, 2, 3, 8, 64)
F32 = jnp.dtype("float32")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes one entry into a folder of its own, which is the only one read."""
    monkeypatch.setattr(tuning, "directories", lambda: (tmp_path,))
    tuning.forget_tables()

    def write(key: tuning.TuningKey, **tiles: int) -> Path:
        path = tmp_path / "table.json"
        entry = {**tuning.key_fields(key), "tiles": tiles}
        tuning.write_table(path, {"device": key.device, "date": "2026-11-21"}, [entry])
        return path

    yield write
    tuning.forget_tables()


def key(backend: str = "xla", part: str = "decode", **changes: Any) -> tuning.TuningKey:
    made = tuning.tuning_key(backend, part, Q, F32, POOL, F32)  # type: ignore[arg-type]
    return tuning.TuningKey(**{**tuning.key_fields(made), "device": made.device, **changes})


def test_without_a_table_sizes_are_computed(table: Any) -> None:
    assert choose_xla_tiles(Q, F32, POOL, F32) == XlaTiles() == default_xla_tiles(3, 64)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (8, 128), (32, 256)])
def test_a_computed_group_is_no_larger_than_the_cache(num_kv_heads: int, head_dim: int) -> None:
    tiles = default_xla_tiles(num_kv_heads, head_dim)
    block = 8 * tiles.row_group * tiles.decode_block * num_kv_heads * head_dim
    assert tiles.row_group == 1 or block <= 1 << 20


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(8, 1, 64), (32, 8, 128), (128, 1, 576), (64, 64, 512)],
)
def test_a_device_takes_large_blocks_that_fit(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """A GPU starts a kernel for each operation of a block."""
    shape = (1, num_heads, head_dim), "bfloat16", (9, 2, num_kv_heads, 64, head_dim), "bfloat16"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_xla, "tuning_device", lambda: "NVIDIA A100")
        tiles = choose_xla_tiles(*shape)
    assert tiles == device_xla_tiles(num_heads, num_kv_heads, head_dim)
    assert not tiles.native_decode
    assert tiles.decode_block >= 64 <= tiles.query_tile
    gathered = 8 * tiles.row_group * tiles.decode_block * num_kv_heads * head_dim
    scores = 4 * num_heads * tiles.query_tile * tiles.prefill_block
    assert max(gathered, scores) <= 128 << 20


CPUINFO = """processor\t: 0
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
cache size\t: 1024 KB

processor\t: 1
model name\t: another
"""


def test_a_cpu_is_named_with_its_family() -> None:
    """Generations of one name differ: half as wide vectors, no matrix unit."""
    name = tuning.cpu_name(CPUINFO, 1 << 20)
    assert name == "cpu AMD EPYC, family 25 model 17, L2 1024 KiB"
    assert tuning.cpu_name(CPUINFO.replace("model\t", "part\t"), 1 << 20) == (
        "cpu AMD EPYC, L2 1024 KiB"
    )
    assert tuning.cpu_name("", 2 << 20).endswith(", L2 2048 KiB")


def test_a_table_without_a_family_holds_for_all_of_the_name(table: Any) -> None:
    mine, other = (f"cpu X, family 25 model {model}, L2 1024 KiB" for model in (1, 17))
    table(key(device="cpu X, L2 1024 KiB", num_cores=0), row_group=3)
    assert tuning.tuned(key(device=mine)) == tuning.tuned(key(device=other)) == {"row_group": 3}
    assert tuning.tuned(key(device="cpu XY, family 25 model 1, L2 1024 KiB")) is None
    table(key(device=mine), row_group=5)
    assert tuning.tuned(key(device=mine)) == {"row_group": 5}
    assert tuning.tuned(key(device=other)) is None


def test_what_was_measured_is_used(table: Any) -> None:
    table(key(), row_group=3, decode_block=32)
    table(key(part="prefill"), query_tile=16, prefill_block=128)
    assert choose_xla_tiles(Q, F32, POOL, F32) == XlaTiles(
        row_group=3, decode_block=32, query_tile=16, prefill_block=128
    )


def test_sizes_for_as_many_cores_come_before_those_for_any(table: Any) -> None:
    cores = tuning.num_cores()
    table(key(num_cores=0), row_group=3)
    assert choose_xla_tiles(Q, F32, POOL, F32).row_group == 3
    table(key(num_cores=cores), row_group=5)
    table(key(num_cores=cores + 1), row_group=6)
    assert choose_xla_tiles(Q, F32, POOL, F32).row_group == 5


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another"},
        {"num_heads": 8},
        {"num_kv_heads": 1},
        {"head_dim": 128},
        {"page_size": 16},
        {"dtype": "bfloat16"},
        {"kv_dtype": "bfloat16"},
        {"backend": "mosaic_tpu"},
    ],
)
def test_what_was_measured_for_something_else_is_not(table: Any, change: dict[str, Any]) -> None:
    table(key(**change), row_group=3, decode_block=32)
    assert choose_xla_tiles(Q, F32, POOL, F32) == XlaTiles()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"device": "x", "entries": [{}]}', "KeyError"),
        ("no JSON", "JSONDecodeError"),
        ('{"device": "x"}', "KeyError: 'entries'"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(
    table: Any, tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "broken.json").write_text(text)
    for ask in (tuning.check_tables, lambda: choose_xla_tiles(Q, F32, POOL, F32)):
        with pytest.raises(InvalidConfigError, match=r"broken\.json.*octavo tune") as caught:
            ask()
        assert why in str(caught.value)


def test_sizes_that_a_kernel_does_not_have_are_refused(table: Any) -> None:
    table(key(part="prefill"), warp_groups=2)
    with pytest.raises(InvalidConfigError, match=r"warp_groups.*sizes named row_group"):
        choose_xla_tiles(Q, F32, POOL, F32)
    table(key(part="prefill"), query_tile=16)
    table(key(), row_group=0)
    with pytest.raises(InvalidConfigError, match="row_group = 0 in tiles: want an integer"):
        choose_xla_tiles(Q, F32, POOL, F32)


def test_kernels_for_tpus_and_gpus_find_theirs(table: Any) -> None:
    q, pool, bf16 = (64, 32, 128), (9, 2, 8, 64, 128), jnp.dtype("bfloat16")
    v6e = tuning.tuning_key("mosaic_tpu", "decode", q, bf16, pool, bf16, "TPU v6 lite")
    computed = choose_tpu_tiles(q, bf16, pool, bf16, "TPU v6 lite")
    table(v6e, decode_pages=4)
    tiles = choose_tpu_tiles(q, bf16, pool, bf16, "TPU v6 lite")
    assert (computed.decode_pages, tiles.decode_pages) == (8, 4)
    assert tiles.prefill_tile == computed.prefill_tile
    table(v6e, decode_pages=1000)
    with pytest.raises(InvalidConfigError, match=r"'pages': 1000.*bytes of VMEM hold"):
        choose_tpu_tiles(q, bf16, pool, bf16, "TPU v6 lite")

    h200 = tuning.tuning_key("mosaic_gpu", "decode", q, bf16, pool, bf16, "NVIDIA H200")
    table(h200, tile=64, num_stages=3, num_programs=264, min_tiles=2, num_warpgroups=1)
    decode = choose_decode_tiles(128, 2, 2, h200)
    assert (decode.num_stages, decode.num_programs, decode.min_tiles) == (3, 264, 2)
    for sizes in ({"num_warpgroups": 2, "num_stages": 3}, {"num_warpgroups": 3, "num_stages": 3}):
        table(h200, tile=64, **sizes)
        with pytest.raises(InvalidConfigError, match="1, or 2 for heads of up to 128 and an even"):
            choose_decode_tiles(128, 2, 2, h200)
    chunk = tuning.tuning_key("mosaic_gpu", "prefill", q, bf16, pool, bf16, "NVIDIA H200")
    table(chunk, tile=64, num_stages=30)
    with pytest.raises(InvalidConfigError, match="at most 4 stages, which shared memory holds"):
        choose_prefill_tiles(128, 2, 2, chunk)
    table(chunk, tile=48, num_stages=2)
    with pytest.raises(InvalidConfigError, match="a multiple of 64 keys"):
        choose_prefill_tiles(128, 2, 2, chunk)


def test_a_shape_whose_table_is_bad_is_not_called_unsupported(table: Any) -> None:
    bf16 = jnp.dtype("bfloat16")
    shape = AttentionShape(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=64,
        max_tokens=64,
        q_dtype=bf16,
        kv_dtype=bf16,
    )
    q, pool = (64, 32, 128), (2, 2, 8, 64, 128)
    key = tuning.tuning_key("mosaic_tpu", "decode", q, bf16, pool, bf16, "TPU v6 lite")
    path = table(key, lanes=3)
    for requested in ("auto", "mosaic_tpu"):
        with pytest.raises(InvalidConfigError, match=f"tuning table {re.escape(str(path))}"):
            choose_backend(requested, shape, platform="tpu", device_kind="TPU v6 lite")


def test_a_table_keeps_what_was_not_measured_anew(table: Any) -> None:
    table(key(), row_group=3)
    table(key(page_size=16), row_group=2)
    path = table(key(), row_group=4)
    entries = json.loads(path.read_text())["entries"]
    assert [entry["tiles"]["row_group"] for entry in entries] == [2, 4]


@pytest.mark.parametrize(
    "tiles",
    [
        XlaTiles(row_group=1, decode_block=32, query_tile=16, prefill_block=32),
        XlaTiles(row_group=5, decode_block=256, query_tile=128, prefill_block=128),
        XlaTiles(row_group=4, decode_block=32, score_sums=1),
        device_xla_tiles(4, 2, 16),
    ],
)
def test_block_sizes_do_not_change_what_is_computed(tiles: XlaTiles) -> None:
    rows = [(1, 70), (1, 9), (1, 100), (40, 90), (3, 3)]
    q, _, _, kv, batch = make_case(
        np.random.default_rng(0), rows, num_tokens=48, num_rows=6, table=16
    )
    params = AttentionParams(scale=0.25)
    out = jax.jit(lambda q, kv, batch: attend_xla(q, kv, batch, params, tiles=tiles))(q, kv, batch)
    expected = attend_reference(q, kv, batch, params)
    np.testing.assert_allclose(out[:46], expected[:46], atol=2e-5)


def test_tuning_measures_on_this_device_and_never_takes_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = tune_module._candidates
    monkeypatch.setattr(tune_module, "_candidates", lambda *args: every(*args)[:3])
    shape = AttentionShape(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        page_size=64,
        max_tokens=16,
        q_dtype=F32,
        kv_dtype=F32,
    )
    told: list[tuple[int, int]] = []
    result = tune(
        "xla",
        shape,
        "prefill",
        Workload(chunk=16, chunk_context=64),
        rounds=1,
        on_candidate=lambda done, total: told.append((done, total)),
    )
    assert told[-1] == (3, 3)
    assert result.num_candidates == 3
    assert set(result.tiles) == {"query_tile", "prefill_block"}
    assert all(ms > 0 for ms in result.ms)
    assert result.score <= 1
    assert (result.tiles == result.default) == (result.ms == result.default_ms)


def test_what_is_measured_is_long_and_short() -> None:
    sizes = Workload(rows=2, row_context=64, chunk=32, chunk_context=128)
    assert sizes.cases("decode") == ([(1, 16), (1, 64)], [(1, 2), (1, 8)])
    assert sizes.cases("prefill") == ([(32, 128)], [(2, 2)] * 16)


def test_shipped_tables_are_whole() -> None:
    for path in tuning.SHIPPED.glob("*.json"):
        table = json.loads(path.read_text())
        assert table["date"]
        assert table["command"].startswith("octavo tune")
        assert dict(tuning._tiles(table))
        for entry in table.get("products", ()):
            assert entry["num_cores"] >= 1
            assert len(entry["rows"]) == len(entry["eigen_ms"]) == len(entry["ynnpack_ms"])
        dict(tuning._products(table))
