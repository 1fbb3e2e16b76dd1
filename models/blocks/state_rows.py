"""Which tokens of a step change which row's recurrent state.

A recurrent layer keeps a state a row, in arrays [slots, ...] that live on the device from step to
step. A row that begins finds zeros, whatever was left in its place; a row that is idle, or padding,
leaves everything as it is.

Legend: T tokens, S rows, L slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopies:
    """Snapshots that a step begins with and leaves behind, in slots of no row.

    Attributes:
        source: int32[S], where each row's state is read: in its own slot, or in a snapshot's.
        save_at: int32[S, K], positions of a row's sequence before which all is computed that a
            snapshot stands for; 0 for none. A multiple of `RecurrentState.chunk_tokens`.
        save_slot: int32[S, K], where it is written.
    """

    source: jax.Array
    save_at: jax.Array
    save_slot: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """The rows of a step, as recurrent layers see them.

    Rows with one token may come in any place; `num_decode_rows` of them come first.

    Attributes:
        slot: int32[S], the place of each row's state.
        start: int32[S], the position of each row's first token; at 0 its state begins.
        live: bool[S], rows whose tokens count. The others' states stay as they are.
        cu_q_lens: int32[S + 1], where each row's tokens begin among all.
        token_row: int32[T], whose a token is.
        num_decode_rows: int32, rows that come first and have one token each.
        num_rows: int32, rows in use.
        copies: snapshots that are read and written; None for none. No row that decodes has any.
        decode_only: every row has one token, so that T = S.
    """

    slot: jax.Array
    start: jax.Array
    live: jax.Array
    cu_q_lens: jax.Array
    token_row: jax.Array
    num_decode_rows: jax.Array
    num_rows: jax.Array
    decode_only: bool = field(metadata={"static": True})
    copies: StateCopies | None = None

    def read(self, states: jax.Array) -> jax.Array:
        """Each row's state before the step.

        Args:
            states: [L, ...].

        Returns:
            [S, ...], zeros where a row begins.
        """
        source = self.slot if self.copies is None else self.copies.source
        found = states.at[source].get(mode="fill", fill_value=0)
        return jnp.where(_spread(begins(self.start), found.ndim), jnp.float32(0), found)

    def write(self, states: jax.Array, new: jax.Array, only: jax.Array | None = None) -> jax.Array:
        """The states [L, ...] with those of live rows replaced.

        Args:
            new: [S, ...].
            only: bool[S], which of the live rows; None is all.
        """
        is_written = self.live if only is None else self.live & only
        # Beyond every slot: such a write is dropped.
        slot = jnp.where(is_written, self.slot, states.shape[0])
        return states.at[slot].set(new, mode="drop")

    def save(self, states: jax.Array, state_at: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The states [L, ...] with the step's snapshots written.

        Args:
            state_at: from positions in the rows' sequences, int32[S], to the states there [S, ...].
        """
        if self.copies is None:
            return states
        for at, slot in zip(self.copies.save_at.T, self.copies.save_slot.T, strict=True):
            place = jnp.where(self.live & (at > self.start), slot, states.shape[0])
            states = states.at[place].set(state_at(at), mode="drop")
        return states


def begins(position: jax.Array) -> jax.Array:
    """Whether a token is the first of its sequence, whose state is zeros."""
    return position == 0


def _spread(per_row: jax.Array, ndim: int) -> jax.Array:
    return per_row.reshape(per_row.shape + (1,) * (ndim - per_row.ndim))


def causal_conv(
    x: jax.Array,
    taps: jax.Array,
    bias: jax.Array | None,
    window: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """A causal convolution of each channel over its row's tokens, in float32.

    Sums are formed in one order however a sequence is cut into steps.

    Args:
        x: [T, *C].
        taps: [*C, W], the newest token's last.
        bias: [*C]; None is none.
        window: float32 [L, W - 1, *C], the inputs before a step, oldest first.
        rows: whose tokens these are.

    Returns:
        float32 [T, *C], and the new window.
    """
    width = taps.shape[-1]
    x = x.astype(jnp.float32)
    weights = jnp.moveaxis(taps.astype(jnp.float32), -1, 0)[:, None]  # [W, 1, *C]
    before = rows.read(window)  # [S, W - 1, *C]
    if rows.decode_only:
        inputs = jnp.concatenate([before, x[:, None]], axis=1)
        out = jnp.zeros_like(x)
        for tap in range(width):
            out = out + inputs[:, tap] * weights[tap]
        after = inputs[:, 1:]
    else:
        num_tokens = x.shape[0]
        offset = jnp.arange(num_tokens, dtype=jnp.int32) - rows.cu_q_lens[rows.token_row]
        out = jnp.zeros_like(x)
        for tap in range(width - 1):
            lag = width - 1 - tap
            earlier = jnp.pad(x, ((lag, 0), *((0, 0),) * (x.ndim - 1)))[:num_tokens]
            kept = before[rows.token_row, jnp.clip(tap + offset, 0, width - 2)]
            inputs = jnp.where(_spread(offset >= lag, x.ndim), earlier, kept)
            out = out + inputs * weights[tap]
        out = out + x * weights[width - 1]
        first = rows.cu_q_lens[:-1]

        def inputs_before(last: jax.Array) -> jax.Array:
            """The window of the token at `last` int32[S] among all, one of each row's."""
            parts = []
            for index in range(width - 1):
                token = last - (width - 1 - index)
                own = x[jnp.clip(token, 0, num_tokens - 1)]
                row = jnp.arange(first.shape[0], dtype=jnp.int32)
                kept = before[row, jnp.clip(index + last - first, 0, width - 2)]
                parts.append(jnp.where(_spread(token >= first, own.ndim), own, kept))
            return jnp.stack(parts, axis=1)

        after = inputs_before(rows.cu_q_lens[1:])
        window = rows.save(window, lambda at: inputs_before(first + at - rows.start))
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None]
    return out, rows.write(window, after)


def decay_between(decay: jax.Array) -> jax.Array:
    """What is left at each token of a chunk of what an earlier one wrote.

    Each sum of decays is formed by itself: the difference of two long ones would have lost its
    digits where decays are strong.

    Args:
        decay: float32 [..., C], the logarithm of each token's.

    Returns:
        [..., C, C]: exp of the sum of decays of tokens j + 1 to i, at [i, j]; 0 for j > i.
    """
    place = jnp.arange(decay.shape[-1], dtype=jnp.int32)
    lead = (None,) * (decay.ndim - 1)
    is_after = (place[:, None] > place[None])[lead]
    is_seen = (place[:, None] >= place[None])[lead]
    sums = jnp.cumsum(jnp.where(is_after, decay[..., None], 0), axis=-2)
    return jnp.exp(jnp.where(is_seen, sums, -jnp.inf))


Tokens = tuple[jax.Array, ...]


def recur(
    inputs: Tokens,
    states: jax.Array,
    rows: StateRows,
    *,
    chunk_size: int,
    one_token: Callable[[Tokens, jax.Array], tuple[jax.Array, jax.Array]],
    one_chunk: Callable[[Tokens, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Runs a recurrence over the tokens of all rows.

    Rows that decode take one step each, all at once. Other rows go chunk by chunk. Chunks end at
    multiples of `chunk_size` of a sequence's own positions, so that two ways of cutting a prompt
    there compute the same sums.

    Args:
        inputs: arrays [T, ...].
        states: float32 [L, ...].
        rows: whose tokens these are.
        chunk_size: C.
        one_token: (inputs [S, ...], states [S, ...]) -> (out [S, ...], states).
        one_chunk: (inputs [C, ...], which of them count, bool [C], a prefix; one state)
            -> (out [C, ...], the state). What does not count changes nothing.

    Returns:
        float32 [T, ...], and the new states.
    """
    if rows.decode_only:
        out, after = one_token(inputs, rows.read(states))
        return out, rows.write(states, after)
    num_tokens, num_rows = inputs[0].shape[0], rows.slot.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    first = jnp.clip(rows.cu_q_lens[:-1], 0, num_tokens - 1)
    one_each = tuple(each[first] for each in inputs)
    out_shape = jax.eval_shape(one_token, one_each, rows.read(states))[0].shape
    # Room for a chunk that begins at the last token.
    out = jnp.zeros((num_tokens + chunk_size, *out_shape[1:]), jnp.float32)

    def decode(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        decoded, after = one_token(one_each, rows.read(states))
        decodes = row < rows.num_decode_rows
        place = jnp.where(decodes, first, out.shape[0])
        out = out.at[place].set(decoded, mode="drop")
        return out, rows.write(states, after, only=decodes)

    out, states = lax.cond(rows.num_decode_rows > 0, decode, lambda carry: carry, (out, states))
    padded = tuple(
        jnp.pad(each, ((0, chunk_size), *((0, 0),) * (each.ndim - 1))) for each in inputs
    )
    end_of_all = rows.cu_q_lens[rows.num_rows]
    place = jnp.arange(chunk_size, dtype=jnp.int32)

    def body(carry: Any) -> Any:
        token, index, out, states = carry
        end = rows.cu_q_lens[index + 1]
        position = rows.start[index] + token - rows.cu_q_lens[index]
        count = jnp.minimum(end - token, chunk_size - position % chunk_size)
        part = tuple(lax.dynamic_slice_in_dim(each, token, chunk_size) for each in padded)
        slot = source = rows.slot[index]
        if rows.copies is not None:
            is_first = token == rows.cu_q_lens[index]
            source = jnp.where(is_first, rows.copies.source[index], slot)
        state = states.at[source].get(mode="fill", fill_value=0)
        state = jnp.where(begins(position), jnp.float32(0), state)
        chunk_out, state = one_chunk(part, place < count, state)
        # What does not count here is written over by the chunks behind.
        out = lax.dynamic_update_slice_in_dim(out, chunk_out, token, 0)
        slot = jnp.where(rows.live[index], slot, states.shape[0])
        states = states.at[slot].set(state, mode="drop")
        if rows.copies is not None:
            is_saved = rows.live[index] & (rows.copies.save_at[index] == position + count)
            saved = jnp.where(is_saved, rows.copies.save_slot[index], states.shape[0])
            states = states.at[saved].set(state[None], mode="drop")
        token = token + count
        return token, index + (token == end).astype(jnp.int32), out, states

    begin = (rows.cu_q_lens[rows.num_decode_rows], rows.num_decode_rows, out, states)
    _, _, out, states = lax.while_loop(lambda carry: carry[0] < end_of_all, body, begin)
    return out[:num_tokens], states
