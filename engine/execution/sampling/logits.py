"""What requests do to logits before a token is chosen from them.

Small parameters travel as rows (`SamplingRows`). What is as wide as the vocabulary stays on the
device by slot (`LogitsState`), is written when a request that needs it is admitted, and is read
only in steps where an active row needs it: a slot nobody wrote for holds an earlier request's
values, so everything here is masked by the row's `flags`.

Order, as in vLLM: bias (with allowed ids and one-token bad words), penalties, then bans (bad words
of several tokens, stops that may not come yet), whose -inf no earlier stage could change.
Shapes: S rows of a step, V the vocabulary, K stop ids, W bad words of L tokens each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import MAX_BAD_WORD_TOKENS, MAX_STOP_IDS

NEEDS_PENALTIES = 1
"""Flag: a presence, frequency or repetition penalty is on; counts and prompt bits are set."""
HAS_BIAS = 2
"""Flag: the bias row is set (logit_bias, allowed_token_ids, one-token bad words)."""
HAS_BAD_WORDS = 4
"""Flag: bad words of two tokens or more, and the history, are set."""
HAS_MASK = 8
"""Flag: the token mask is set before each step (structured outputs)."""

MAX_BAD_SEQUENCES = 128
"""Token sequences banned for a request: a bad word is one with and one without a leading space."""
MAX_BAD_SEQUENCE_TOKENS = MAX_BAD_WORD_TOKENS

_WORD_BITS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Parameters of the S rows of a step (or of all slots, to gather rows from).

    Attributes:
        temperature: f32 `[S]`, 0 is greedy.
        top_k: i32 `[S]`, 0 is off.
        top_p: f32 `[S]`, 1 is off.
        min_p: f32 `[S]`, 0 is off.
        seed: u32 `[S, 2]`, high and low word.
        presence_penalty, frequency_penalty: f32 `[S]`, 0 is off.
        repetition_penalty: f32 `[S]`, 1 is off.
        stop_from: i32 `[S]`, first position of the sequence that may hold a stop token; see
            `Request.stop_from`.
        stop_ids: i32 `[S, K]`, tokens that stop the row, end of sequence included; -1 is empty.
        num_logprobs: i32 `[S]`, -1 is none asked.
        flags: i32 `[S]`, sum of `NEEDS_PENALTIES`, `HAS_BIAS`, `HAS_BAD_WORDS`, `HAS_MASK`.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    presence_penalty: Array
    frequency_penalty: Array
    repetition_penalty: Array
    stop_from: Array
    stop_ids: Array
    num_logprobs: Array
    flags: Array

    @classmethod
    def init(cls, num_rows: int, num_stop_ids: int = MAX_STOP_IDS) -> SamplingRows:
        """Greedy rows with everything else off."""
        zeros = jnp.zeros((num_rows,), jnp.float32)
        none = jnp.zeros((num_rows,), jnp.int32)
        return cls(
            temperature=zeros,
            top_k=none,
            top_p=zeros + 1.0,
            min_p=zeros,
            seed=jnp.zeros((num_rows, 2), jnp.uint32),
            presence_penalty=zeros,
            frequency_penalty=zeros,
            repetition_penalty=zeros + 1.0,
            stop_from=none,
            stop_ids=jnp.full((num_rows, num_stop_ids), -1, jnp.int32),
            num_logprobs=none - 1,
            flags=none,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsState:
    """State of the slots that processing logits needs, on the device.

    Attributes:
        token_counts: i32 `[slots, V]`, how often the row has generated each token.
        prompt_mask: u32 `[slots, ceil(V / 32)]`, tokens of the prompt, one bit each.
        logit_bias: f32 `[slots, V]`, added to the logits; -inf forbids.
        bad_words: i32 `[slots, W, L]`, banned sequences, at the right end; -1 before them.
        history: i32 `[slots, L - 1]`, the row's last generated tokens; -1 before the first.
        token_mask: u32 `[slots, ceil(V / 32)]`, tokens that may come next, one bit each.
    """

    token_counts: Array
    prompt_mask: Array
    logit_bias: Array
    bad_words: Array
    history: Array
    token_mask: Array

    @classmethod
    def init(
        cls,
        num_slots: int,
        vocab_size: int,
        num_bad_words: int = MAX_BAD_SEQUENCES,
        bad_word_tokens: int = MAX_BAD_SEQUENCE_TOKENS,
    ) -> LogitsState:
        """State in which no slot does anything; 8 bytes and 2 bits a slot and vocabulary entry."""
        return cls(
            token_counts=jnp.zeros((num_slots, vocab_size), jnp.int32),
            prompt_mask=jnp.zeros((num_slots, -(-vocab_size // _WORD_BITS)), jnp.uint32),
            logit_bias=jnp.zeros((num_slots, vocab_size), jnp.float32),
            bad_words=jnp.full((num_slots, num_bad_words, bad_word_tokens), -1, jnp.int32),
            history=jnp.full((num_slots, bad_word_tokens - 1), -1, jnp.int32),
            token_mask=jnp.zeros((num_slots, -(-vocab_size // _WORD_BITS)), jnp.uint32),
        )


@partial(jax.jit, donate_argnums=0)
def set_row(state: LogitsState, slot: Array | int, row: LogitsState) -> LogitsState:
    """Writes all of a slot when a request that needs it takes it. `state` is donated.

    Args:
        state: the state of all slots.
        slot: i32 scalar.
        row: the slot's values, without the slots' dimension (`logits_row`).

    Returns:
        The new state.
    """
    new: LogitsState = jax.tree.map(lambda old, value: old.at[slot].set(value), state, row)
    return new


@partial(jax.jit, donate_argnums=0)
def set_masks(token_mask: Array, slots: Array, masks: Array) -> Array:
    """Writes the token masks of some slots. `token_mask` is donated.

    Args:
        token_mask: u32 `[slots, W]`, of the state.
        slots: i32 `[M]`; those that do not exist are dropped.
        masks: u32 `[M, W]`.

    Returns:
        The new masks.
    """
    return token_mask.at[slots].set(masks, mode="drop")


@jax.named_scope("count_tokens")
def count_tokens(
    state: LogitsState, slots: Array, tokens: Array, active: Array, rows: SamplingRows
) -> LogitsState:
    """Adds the step's tokens to the counts and histories of the rows that keep them.

    Writes S entries, in place when `state` is donated; never reads or copies a vocabulary row.

    Args:
        state: the state of all slots.
        slots: i32 `[S]`, the rows' slots, different among active rows.
        tokens: i32 `[S]`, what the rows sampled.
        active: bool `[S]`, whether the row sampled.
        rows: the rows' parameters; rows without the flag are left alone.

    Returns:
        The new state.
    """
    nowhere = state.token_counts.shape[0]
    counted = jnp.where(active & _has(rows, NEEDS_PENALTIES), slots, nowhere)
    remembered = jnp.where(active & _has(rows, HAS_BAD_WORDS), slots, nowhere)
    history = jnp.concatenate([state.history[slots][:, 1:], tokens[:, None]], axis=1)
    return LogitsState(
        token_counts=state.token_counts.at[counted, tokens].add(1, mode="drop"),
        prompt_mask=state.prompt_mask,
        logit_bias=state.logit_bias,
        bad_words=state.bad_words,
        history=state.history.at[remembered].set(history, mode="drop"),
        token_mask=state.token_mask,
    )


def needs_processing(rows: SamplingRows, positions: Array) -> Array:
    """Which rows' logits `process` would change: bool `[S]`."""
    return (rows.flags != 0) | _no_stop_yet(rows, positions)


@jax.named_scope("process_logits")
def process(
    logits_SV: Array, rows: SamplingRows, positions: Array, state: LogitsState, slots: Array
) -> Array:
    """Logits as the rows' parameters want them, up to temperature and truncation.

    Args:
        logits_SV: f32, raw.
        rows: the rows' parameters.
        positions: i32 `[S]`, the place in its sequence that each row's new token will take.
        state: the state of all slots; vocabulary rows are read only if a row has their flag.
        slots: i32 `[S]`.

    Returns:
        f32 `[S, V]`; rows for which `needs_processing` is false are unchanged.
    """
    is_wide = _has(rows, NEEDS_PENALTIES | HAS_BIAS).any().astype(jnp.int32)
    is_masked = _has(rows, HAS_MASK).any().astype(jnp.int32)

    def penalize(x: Array) -> Array:
        return _penalize(_add_bias(x, rows, state, slots), rows, state, slots)

    def mask(x: Array) -> Array:
        return _mask(x, rows, state, slots)

    # One switch, so that what no row needs is neither read nor copied.
    logits_SV = lax.switch(
        is_wide + 2 * is_masked,
        (lambda x: x, penalize, mask, lambda x: mask(penalize(x))),
        logits_SV,
    )
    no_token = logits_SV.shape[1]
    stops = jnp.where(
        _no_stop_yet(rows, positions)[:, None] & (rows.stop_ids >= 0), rows.stop_ids, no_token
    )
    banned = jnp.concatenate([stops, _completions(rows, state, slots, no_token)], axis=1)
    row = lax.broadcasted_iota(jnp.int32, banned.shape, 0)
    return logits_SV.at[row, banned].set(-jnp.inf, mode="drop")


def _add_bias(logits_SV: Array, rows: SamplingRows, state: LogitsState, slots: Array) -> Array:
    has_S = _has(rows, HAS_BIAS)
    return jnp.where(has_S[:, None], logits_SV + state.logit_bias[slots], logits_SV)


def _mask(logits_SV: Array, rows: SamplingRows, state: LogitsState, slots: Array) -> Array:
    allowed_SV = _bits(state.token_mask[slots], logits_SV.shape[1])
    return jnp.where(allowed_SV | ~_has(rows, HAS_MASK)[:, None], logits_SV, -jnp.inf)


def _bits(words_SW: Array, vocab_size: int) -> Array:
    """The first `vocab_size` bits of each row, lowest first: bool `[S, V]`."""
    bits = jnp.arange(_WORD_BITS, dtype=jnp.uint32)[None, None, :]
    bits_SWB = (words_SW[:, :, None] >> bits) & jnp.uint32(1)
    return bits_SWB.reshape(words_SW.shape[0], -1)[:, :vocab_size] != 0


def _penalize(logits_SV: Array, rows: SamplingRows, state: LogitsState, slots: Array) -> Array:
    """Repetition over prompt and output, then frequency and presence over the output."""
    counts_SV = state.token_counts[slots]
    in_prompt_SV = _bits(state.prompt_mask[slots], logits_SV.shape[1])
    factor_SV = jnp.where(
        in_prompt_SV | (counts_SV > 0), rows.repetition_penalty[:, None], jnp.float32(1.0)
    )
    x_SV = jnp.where(logits_SV > 0, logits_SV / factor_SV, logits_SV * factor_SV)
    x_SV = x_SV - rows.frequency_penalty[:, None] * counts_SV.astype(jnp.float32)
    x_SV = x_SV - jnp.where(counts_SV > 0, rows.presence_penalty[:, None], jnp.float32(0.0))
    return jnp.where(_has(rows, NEEDS_PENALTIES)[:, None], x_SV, logits_SV)


def _completions(rows: SamplingRows, state: LogitsState, slots: Array, no_token: int) -> Array:
    """Tokens i32 `[S, W]` that would complete a bad word now; `no_token` elsewhere."""
    words = state.bad_words[slots]
    begun = words[:, :, :-1]
    so_far = state.history[slots][:, None, :]
    matches = ((begun == -1) | (begun == so_far)).all(axis=-1)
    last = words[:, :, -1]
    return jnp.where(matches & (last >= 0) & _has(rows, HAS_BAD_WORDS)[:, None], last, no_token)


def _has(rows: SamplingRows, flag: int) -> Array:
    return (rows.flags & flag) != 0


def _no_stop_yet(rows: SamplingRows, positions: Array) -> Array:
    return positions < rows.stop_from


def logits_row(
    vocab_size: int,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    allowed: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    num_bad_words: int = MAX_BAD_SEQUENCES,
    bad_word_tokens: int = MAX_BAD_SEQUENCE_TOKENS,
) -> LogitsState:
    """A slot's values for `set_row`, without the slots' dimension.

    In NumPy: an operation of JAX here would be a call of the device, and let another thread take
    the interpreter, for each array of each new row.

    Args:
        vocab_size: V.
        prompt: tokens of the prompt.
        output: tokens generated so far (a request that comes back has some).
        logit_bias: token id -> number added to its logit.
        allowed: ids of the only tokens allowed; None allows all.
        bad_words: token sequences not to be generated; those of one token become biases.
        num_bad_words, bad_word_tokens: the sizes that `LogitsState.init` was given.

    Returns:
        The row.

    Raises:
        InvalidRequestError: a token id is outside the vocabulary, or a bad word does not fit.
    """
    counts = np.zeros((vocab_size,), np.int32)
    np.add.at(counts, _ids("output", output, vocab_size), 1)
    bits = np.zeros((-(-vocab_size // _WORD_BITS),), np.uint32)
    prompt_ids = np.unique(_ids("prompt", prompt, vocab_size))
    np.bitwise_or.at(
        bits, prompt_ids // _WORD_BITS, np.uint32(1) << (prompt_ids % _WORD_BITS).astype(np.uint32)
    )
    bias = np.zeros((vocab_size,), np.float32)
    if allowed is not None:
        bias[:] = -np.inf
        bias[_ids("allowed_token_ids", allowed, vocab_size)] = 0.0
    if logit_bias:
        added = np.fromiter(logit_bias.values(), np.float32, len(logit_bias))
        bias[_ids("logit_bias", tuple(logit_bias), vocab_size)] += added
    bias[[_ids("bad_words", w, vocab_size)[0] for w in bad_words if len(w) == 1]] = -np.inf
    words = np.full((num_bad_words, bad_word_tokens), -1, np.int32)
    long_words = [word for word in bad_words if len(word) > 1]
    if len(long_words) > num_bad_words:
        raise InvalidRequestError(
            "bad_words", f"{len(long_words)} sequences", f"at most {num_bad_words}"
        )
    for i, word in enumerate(long_words):
        if len(word) > bad_word_tokens:
            raise InvalidRequestError(
                "bad_words", f"{len(word)} tokens", f"words of at most {bad_word_tokens} tokens"
            )
        words[i, -len(word) :] = _ids("bad_words", word, vocab_size)
    history = np.full((bad_word_tokens - 1,), -1, np.int32)
    recent = list(output)[-len(history) :]
    history[len(history) - len(recent) :] = recent
    values: dict[str, Any] = {
        "token_counts": counts, "prompt_mask": bits, "logit_bias": bias,
        "bad_words": words, "history": history, "token_mask": np.zeros_like(bits),
    }  # fmt: skip
    return LogitsState(**values)


def _ids(field: str, token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    ids = np.asarray(token_ids, np.int64).reshape(-1)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise InvalidRequestError(field, int(outside[0]), f"token ids from 0 to {vocab_size - 1}")
    return ids
