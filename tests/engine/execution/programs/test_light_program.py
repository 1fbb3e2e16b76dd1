"""Programs without their text compute what they did with it, and whatever is not known stays."""

from __future__ import annotations

import pickletools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from octavo.engine.execution.programs.light_program import UnknownFormatError, _varint, lighten
from octavo.engine.execution.programs.xla_messages import CompilationResult
from octavo.pallas_kernels.compat import as_one_function, deserialize_program, serialize_program

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of CPUs' programs")

X = jnp.arange(64.0).reshape(8, 8) / 7
STATE = {"pool": jnp.arange(32.0), "count": jnp.zeros(4, jnp.int32)}


def loops_and_branches(state: Any, x: jax.Array) -> Any:
    def body(i: jax.Array, carry: Any) -> Any:
        pool, y = carry
        pool = pool.at[i].add(y[0, 0])
        return pool, lax.cond(y[0, 0] > 3, lambda z: z @ z / 64, lambda z: z + 1, y)

    pool, y = lax.fori_loop(0, 3 + state["count"][0], body, (state["pool"], x))
    return {"pool": pool, "count": state["count"] + 1}, (y, jnp.float32(2))


def sorts_and_products(state: Any, x: jax.Array) -> Any:
    top, at = lax.top_k(x, 3)
    order = jnp.argsort(-x, axis=1)
    products = [x @ (x + i) for i in range(4)]
    sums = jax.nn.softmax(sum(products), axis=-1)
    return dict(state), (top, at, order, sums, x[0].sum() * np.float32(0.25))


@jax.jit
def _native(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 8, lambda i, y: y.at[i].multiply(1.5), x)


def native_functions(state: Any, x: jax.Array) -> Any:
    with as_one_function():
        for _ in range(3):
            x = _native(x) + 1
    pool = lax.dynamic_update_slice(state["pool"], x[0], (jnp.int32(4),))
    return {"pool": pool, "count": state["count"]}, x


def what_it_was_given(state: Any, x: jax.Array) -> Any:
    return state, (x, x, state["count"])


def constants(state: Any, x: jax.Array) -> Any:
    table = jnp.asarray(np.arange(64, dtype=np.float32).reshape(8, 8))
    where = jnp.asarray(np.array([3, 1, 2, 0, 7, 5, 6, 4]))
    return dict(state), (x[where] + table, table, jnp.arange(5))


ALL = [loops_and_branches, sorts_and_products, native_functions, what_it_was_given, constants]


def _compiled(function: Callable[..., Any]) -> Any:
    # A program that no cache has: what was loaded cannot be written down.
    number = random.SystemRandom().randrange(1 << 20)
    return jax.jit(lambda s, x: function(s, x + number), donate_argnums=0).lower(STATE, X).compile()


def _run(program: Any) -> list[np.ndarray]:
    state = jax.tree.map(jnp.copy, STATE)
    outputs = []
    for factor in (1.0, -0.5, 3.0):
        state, output = program(state, X * factor)
        outputs += [np.asarray(leaf) for leaf in jax.tree.leaves((state, output))]
    return outputs


def _executable(parts: tuple[Any, ...]) -> bytes:
    found = (value for op, value, _ in pickletools.genops(parts[0]) if op.name == "BINBYTES")
    return max(found, key=len)


def _result(parts: tuple[Any, ...]) -> Any:
    data = _executable(parts)
    size, at = _varint(data, 0)
    rest = data[at + size :]
    size, at = _varint(rest, 1)
    return CompilationResult.FromString(rest[at : at + size])


def _num_operations(parts: tuple[Any, ...]) -> int:
    module = _result(parts).hlo_module.hlo_module
    return sum(len(each.instructions) for each in module.computations)


@pytest.mark.parametrize("function", ALL, ids=lambda each: each.__name__)
def test_a_program_without_its_text_computes_the_same(function: Callable[..., Any]) -> None:
    program = _compiled(function)
    parts = tuple(serialize_program(program))
    light = lighten(parts)
    loaded = deserialize_program(light, jax.devices()[:1])
    for mine, its in zip(_run(loaded), _run(program), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert _num_operations(light) <= _num_operations(parts)


def test_native_functions_and_loops_are_left_out() -> None:
    parts = tuple(serialize_program(_compiled(native_functions)))
    assert _num_operations(parts) > 2 * _num_operations(lighten(parts))


def test_a_light_program_is_as_light_as_can_be() -> None:
    whole = _compiled(loops_and_branches)
    light = lighten(tuple(serialize_program(whole)))
    again = lighten(light)
    assert _num_operations(again) == _num_operations(light)
    program = deserialize_program(again, jax.devices()[:1])
    for mine, its in zip(_run(program), _run(whole), strict=True):
        np.testing.assert_array_equal(mine, its)


def _with(parts: tuple[Any, ...], change: Callable[[bytes], bytes]) -> tuple[Any, ...]:
    data = _executable(parts)
    changed = change(data)
    stream = parts[0].replace(
        b"B" + len(data).to_bytes(4, "little") + data,
        b"B" + len(changed).to_bytes(4, "little") + changed,
    )
    return (stream, *parts[1:])


@pytest.mark.parametrize(
    "change",
    [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\x05" + data],
    ids=["cut", "empty", "shifted"],
)
def test_another_format_is_refused(change: Callable[[bytes], bytes]) -> None:
    parts = tuple(serialize_program(_compiled(native_functions)))
    with pytest.raises(UnknownFormatError):
        lighten(_with(parts, change))


def _with_result(parts: tuple[Any, ...], change: Callable[[Any], None]) -> tuple[Any, ...]:
    def changed(data: bytes) -> bytes:
        size, at = _varint(data, 0)
        head, rest = data[: at + size], data[at + size :]
        length, at = _varint(rest, 1)
        result = CompilationResult.FromString(rest[at : at + length])
        change(result)
        text = result.SerializeToString()
        number, out = len(text), bytearray()
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        return head + b"\x0a" + bytes([*out, number]) + text + rest[at + length :]

    return _with(parts, changed)


def _forget_kinds(result: Any) -> None:
    for step in result.thunk_sequence.thunks:
        step.ClearField("kernel")


def _add_field(result: Any) -> None:
    step = result.thunk_sequence.thunks[0]
    step.MergeFromString(b"\xfa\x3f\x01\x07")  # bytes, number 1023


def _end_early(result: Any) -> None:
    for each in result.buffer_assignment.buffer_allocations:
        each.maybe_live_out = False


@pytest.mark.parametrize("change", [_forget_kinds, _add_field, _end_early])
def test_what_a_later_xla_may_write_is_refused(change: Callable[[Any], None]) -> None:
    parts = tuple(serialize_program(_compiled(native_functions)))
    with pytest.raises(UnknownFormatError):
        lighten(_with_result(parts, change))
