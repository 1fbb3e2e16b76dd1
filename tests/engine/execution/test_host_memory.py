"""Memory that is given back comes back as it was."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from octavo.engine.execution.host_memory import (
    give_back_freed_memory,
    give_back_idle_code,
    give_back_zeros,
)

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or sys.platform != "linux", reason="of Linux hosts' memory"
)
NUMBERS = 3 << 20
STEP = jax.jit(lambda pool: pool.at[NUMBERS // 2].set(7.0), donate_argnums=0)


def resident_pages(array: jax.Array) -> int:
    page = mmap.PAGESIZE
    first = -(-array.unsafe_buffer_pointer() // page) * page
    count = (array.unsafe_buffer_pointer() + array.nbytes - first) // page
    told = ctypes.create_string_buffer(count)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    assert mincore(first, count * page, told) == 0
    return sum(each & 1 for each in told.raw)


def test_a_pool_takes_memory_as_it_is_used() -> None:
    before, pool, after = (jax.block_until_ready(jnp.full(NUMBERS, n)) for n in (1.0, 0.0, 2.0))
    assert resident_pages(pool) > 3000
    give_back_zeros([pool])
    assert resident_pages(pool) <= 1
    pool = jax.block_until_ready(STEP(pool))
    assert resident_pages(pool) < 1000  # in place, and one page of it
    assert float(pool.sum()) == 7.0  # all of it is read as zeros but that
    assert float(before.min()) == float(before.max()) == 1.0
    assert float(after.min()) == float(after.max()) == 2.0


def resident_code_bytes() -> int:
    """Of the library that compiles."""
    total, is_code = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_code = words[1] == "r-xp" and "jax" in Path(words[-1]).name
        elif words[0] == "Rss:" and is_code:
            total += int(words[1]) << 10
    return total


def test_code_is_given_back_until_it_is_run_again() -> None:
    def compiled(number: float) -> float:
        return float(jax.jit(lambda x: jnp.sin(x) * number)(jnp.float32(0.5)))

    wanted = compiled(3.25)
    before = resident_code_bytes()
    assert before > 10 << 20
    give_back_idle_code()
    assert resident_code_bytes() < before / 2
    assert compiled(3.25) == wanted
    assert compiled(-6.5) == -2 * wanted


def test_what_is_in_use_is_not_given_back() -> None:
    arrays = [jax.block_until_ready(jnp.full(NUMBERS, float(n))) for n in range(8)]
    del arrays[::2]
    give_back_freed_memory()
    assert [float(each.sum()) / NUMBERS for each in arrays] == [1.0, 3.0, 5.0, 7.0]
