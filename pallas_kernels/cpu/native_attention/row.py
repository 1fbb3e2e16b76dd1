"""One decode row on a CPU, in the loops of the native function.

- Products of queries and keys in vectors as long as `ones`, without sums: XLA would add up one
  number at a time, as the order of a sum is the program's. A product with a vector of ones, which
  XLA writes as vectors and shuffles, then sums up to `UNIT_KEYS` keys of a head, whose products
  are 6 KB: those of all heads would drive the pages out of a core's first cache. A key's queries
  lie side by side, so that the key is read, and widened, once for its group.
- Scores of a page as one flat vector, masked as it is: where the same numbers are a vector here and
  heads by keys there, XLA takes them apart number by number.
- Weights are exponentials of what a score exceeds its head's *reference* by, not the largest score
  so far: the largest of the row's first keys, which no page that follows changes, so nothing is
  scaled anew and keys and values of a page are read right after each other. A row whose scores
  exceed its reference by more than `MOST_RISE` is walked once more with its true peaks. (Source:
  a softmax's value does not depend on what is subtracted; rescaling only beyond a threshold is
  FlashAttention-4's.)
- Then values, `VALUES` keys at a time, which a core's registers hold. Each key's are a slice of
  their own: what one operation reads in several places is copied first, number by number, where
  what it reads once is not.

Heads are a loop, not written out: with each head's loads at their own places in the code a layer
takes 1.37 ms where it takes 1.02 (Zen 4, float32, 32 rows of 260 keys in order; why is not known).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from octavo.pallas_kernels.ragged_paged_attention.batch import AttentionParams
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import to_float32

UNIT_KEYS = 16
"""Keys of a head whose products are summed at once."""
SPAN_KEYS = 64
"""The most keys whose scores are computed before their values: a page's, or those of a part of a
longer page."""
VALUES = 4
"""Keys whose values are taken in at once."""
MOST_RISE = 60.0
"""By what a score may exceed its reference: e^60 times any count of keys fits float32."""
_MASKED = -1e30


class Pool(NamedTuple):
    """A layer's pool, in units of a head's `keys` keys that lie side by side."""

    pages: jax.Array  # [N, 2·Hkv, units of a page, keys·D]
    scales: jax.Array | None  # [N, 2·Hkv, units of a page, keys]
    keys: int

    @classmethod
    def of(cls, pages: jax.Array, scales: jax.Array | None) -> Pool:
        num_pages, _, heads, page_size, dim = pages.shape
        keys = min(page_size, UNIT_KEYS)
        units = (num_pages, 2 * heads, page_size // keys)
        return cls(
            pages.reshape(*units, keys * dim),
            None if scales is None else scales.reshape(*units, keys),
            keys,
        )

    @property
    def num_heads(self) -> int:
        return self.pages.shape[1] // 2

    @property
    def dim(self) -> int:
        return self.pages.shape[3] // self.keys

    def numbers(self, place: Place, head: jax.Array, first: int = 0, count: int = 0) -> jax.Array:
        """Float32 [count, D] of a unit's keys (all of them for 0) as they are stored."""
        count = count or self.keys
        at = (place.page_id, head, place.unit, np.uint32(first * self.dim))
        found = lax.dynamic_slice(self.pages, at, (1, 1, 1, count * self.dim))
        return to_float32(found.reshape(count, self.dim))

    def scales_of(self, place: Place, head: jax.Array) -> jax.Array:
        """[keys, 1]."""
        assert self.scales is not None
        at = (place.page_id, head, place.unit, np.uint32(0))
        return lax.dynamic_slice(self.scales, at, (1, 1, 1, self.keys)).reshape(self.keys, 1)


class Place(NamedTuple):
    """Where a unit is."""

    page_id: jax.Array
    unit: jax.Array  # of its page


class Row(NamedTuple):
    """A row, and what of it is to be seen.

    A lane is one of the scores of some keys, of all heads: [Hkv, keys, G] as a vector.
    """

    pool: Pool
    params: AttentionParams
    ones: jax.Array  # [lanes of products]
    query: jax.Array  # [Hkv, 1, G, D]
    num_keys: jax.Array
    oldest: jax.Array  # first key to be seen

    @property
    def group(self) -> int:
        return self.query.shape[2]

    def by_lane(self, by_head: jax.Array, num_keys: int) -> jax.Array:
        """[Hq] for each of so many keys."""
        heads = self.pool.num_heads
        wide = by_head.reshape(heads, 1, self.group)
        wide = jnp.broadcast_to(wide, (heads, num_keys, self.group))
        return lax.optimization_barrier(wide).reshape(-1)

    def unit_scores(self, place: Place, head: jax.Array) -> jax.Array:
        """[keys·G] of a head's unit."""
        theirs = self.pool.numbers(place, head)[:, None]
        zero = np.uint32(0)
        _, _, *rest = self.query.shape
        mine = lax.dynamic_slice(self.query, (head, zero, zero, zero), (1, 1, *rest))[0]
        lanes, dim = self.ones.shape[0], self.pool.dim
        products = mine[..., :lanes] * theirs[..., :lanes]
        for at in range(lanes, dim, lanes):
            products = products + mine[..., at : at + lanes] * theirs[..., at : at + lanes]
        if self.pool.scales is not None:
            products = products * self.pool.scales_of(place, head)[..., None]
        return _sums(lax.optimization_barrier(products), self.ones)  # of [keys, G, lanes]

    def seen(self, scores: jax.Array, first: jax.Array, key_of_lane: jax.Array) -> jax.Array:
        """Scores as they are weighed: capped, and masked where their key is not to be seen."""
        scores = _soft_cap(scores.reshape(-1), self.params)
        at = first + key_of_lane
        visible = at < self.num_keys
        if not self.params.sees_all:
            visible &= at >= self.oldest
        return lax.optimization_barrier(jnp.where(visible, scores, np.float32(_MASKED)))

    def weighted(
        self, place: Place, head: jax.Array, weights: jax.Array, acc: jax.Array
    ) -> jax.Array:
        """`acc` [G, D] with a unit's values, weighed by [keys, G], added."""
        pool = self.pool
        of_values = head + np.uint32(pool.num_heads)
        values = None
        if pool.pages.dtype != jnp.float32:  # widened once, not once for each query of the group
            values = pool.numbers(place, of_values)
            if pool.scales is not None:
                values = values * pool.scales_of(place, of_values)
            values = lax.optimization_barrier(values)

        def product(key: int) -> jax.Array:
            value = pool.numbers(place, of_values, key, 1) if values is None else values[key][None]
            return weights[key][:, None] * value

        for key in range(0, pool.keys, VALUES):
            if key:
                acc = lax.optimization_barrier(acc)
            total = product(key)
            for more in range(1, VALUES):
                total = total + product(key + more)
            acc = acc + total
        return acc


Walked: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Whether scores rose too far, the reference [Hq], sums of weights [Hq] and values [Hkv, G, D]."""


class _Sums(NamedTuple):
    """Of the spans of a row so far."""

    peaks: jax.Array  # [lanes of a span] largest scores
    totals: jax.Array  # [lanes of a span] sums of weights
    acc: jax.Array  # [Hkv, G, D] sum of weighted values


def _span(page_size: int) -> int:
    """Keys of a span: what a page divides into, `SPAN_KEYS` at most."""
    sizes = range(UNIT_KEYS, min(page_size, SPAN_KEYS) + 1, UNIT_KEYS)
    return max((size for size in sizes if page_size % size == 0), default=page_size)


def walk_row(
    row: Row, place_of: Callable[[jax.Array], Place], page_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A row's reference [Hq], and sums of its weights [Hq] and weighted values [Hkv, G, D].

    Args:
        place_of: the unit that a key, counted from the row's first, is in.
        page_size: tokens.
    """
    span = _span(page_size)
    heads, unit = row.pool.num_heads, row.pool.keys
    key_of_lane = _constant(np.tile(np.repeat(np.arange(span), row.group), heads))
    first_unit = lax.div(row.oldest, np.uint32(unit)) * np.uint32(unit)
    first_span = lax.div(row.oldest, np.uint32(span))
    spans = lax.div(row.num_keys + np.uint32(span - 1), np.uint32(span))

    def look(head: jax.Array, scores: jax.Array) -> jax.Array:
        found = row.unit_scores(place_of(first_unit), head)
        return lax.dynamic_update_slice(scores, found[None], (head, np.uint32(0)))

    def walk(state: Walked) -> Walked:
        _, reference, _, _ = state
        subtracted = row.by_lane(reference, span)

        def one_span(index: jax.Array, so_far: _Sums) -> _Sums:
            first = index * np.uint32(span)
            left = lax.div(row.num_keys - first + np.uint32(unit - 1), np.uint32(unit))
            return _add_span(row, place_of(first), first, left, key_of_lane, subtracted, so_far)

        lanes = key_of_lane.shape
        sums = _Sums(
            jnp.full(lanes, _MASKED, jnp.float32),
            jnp.zeros(lanes, jnp.float32),
            jnp.zeros((heads, row.group, row.pool.dim), jnp.float32),
        )
        sums = lax.fori_loop(first_span, spans, one_span, sums)
        peak = _over_keys(jnp.maximum, sums.peaks, heads, span)
        rose = jnp.max(peak - reference) > np.float32(MOST_RISE)
        reference = jnp.where(rose, peak, reference)
        return rose, reference, _over_keys(jnp.add, sums.totals, heads, span), sums.acc

    first_scores = jnp.zeros((heads, unit * row.group), jnp.float32)
    first_scores = lax.fori_loop(jnp.uint32(0), jnp.uint32(heads), look, first_scores)
    lanes_of_unit = _constant(np.tile(np.repeat(np.arange(unit), row.group), heads))
    first_scores = row.seen(first_scores, first_unit, lanes_of_unit)
    reference = _over_keys(jnp.maximum, first_scores, heads, unit)
    state = (
        jnp.asarray(True),
        reference,
        jnp.zeros_like(reference),
        jnp.zeros((heads, row.group, row.pool.dim), jnp.float32),
    )
    _, reference, total, acc = lax.while_loop(lambda state: state[0], walk, state)
    return reference, total, acc


def _add_span(
    row: Row,
    begin: Place,
    first: jax.Array,
    num_units: jax.Array,
    key_of_lane: jax.Array,
    subtracted: jax.Array,
    so_far: _Sums,
) -> _Sums:
    """Takes in a span's keys.

    Args:
        begin, first: where its first key is, and which key of the row that is.
        num_units: units that the row has from there on, in this span and after it.
        key_of_lane: uint32[lanes] which of the span's keys a lane is of.
        subtracted: float32[lanes] the reference of a lane's head.
    """
    heads, unit = row.pool.num_heads, row.pool.keys
    units = key_of_lane.shape[0] // (heads * unit * row.group)  # of a head in a span
    zero, width = np.uint32(0), unit * row.group
    used = jnp.minimum(num_units, np.uint32(units))

    def of_units(step: Callable[[jax.Array, Place, Any], Any], state: Any) -> Any:
        """Each unit of a head, in the order of memory."""
        if units == 1:
            return step(jnp.uint32(0), begin, state)
        return lax.fori_loop(
            jnp.uint32(0),
            used,
            lambda index, state: step(index, Place(begin.page_id, begin.unit + index), state),
            state,
        )

    def score(head: jax.Array, scores: jax.Array) -> jax.Array:
        def one_unit(index: jax.Array, place: Place, scores: jax.Array) -> jax.Array:
            at = (head * np.uint32(units) + index, zero)
            found = row.unit_scores(place, head)[None]
            return lax.dynamic_update_slice(scores, found, at)

        return of_units(one_unit, scores)

    def weigh(head: jax.Array, acc: jax.Array) -> jax.Array:
        def one_unit(index: jax.Array, place: Place, mine: jax.Array) -> jax.Array:
            at = (head * np.uint32(units) + index, zero)
            theirs = lax.dynamic_slice(by_unit, at, (1, width)).reshape(unit, row.group)
            return row.weighted(place, head, theirs, mine)

        at = (head, zero, zero)
        mine = lax.dynamic_slice(acc, at, (1, *acc.shape[1:]))[0]
        return lax.dynamic_update_slice(acc, of_units(one_unit, mine)[None], at)

    scores = jnp.zeros((heads * units, width), jnp.float32)
    scores = lax.fori_loop(jnp.uint32(0), jnp.uint32(heads), score, scores)
    scores = row.seen(scores, first, key_of_lane)
    weights = lax.optimization_barrier(jnp.exp(scores - subtracted))
    by_unit = weights.reshape(heads * units, width)
    return _Sums(
        jnp.maximum(so_far.peaks, scores),
        so_far.totals + weights,
        lax.fori_loop(jnp.uint32(0), jnp.uint32(heads), weigh, so_far.acc),
    )


def _over_keys(
    operation: Callable[[jax.Array, jax.Array], jax.Array],
    by_lane: jax.Array,
    heads: int,
    num_keys: int,
) -> jax.Array:
    """[Hq] of [Hkv·keys·G], by halves as far as that goes: XLA reduces number by number."""
    found = by_lane.reshape(heads, num_keys, -1)
    while num_keys > UNIT_KEYS and num_keys % 2 == 0:
        num_keys //= 2
        found = lax.optimization_barrier(operation(found[:, :num_keys], found[:, num_keys:]))
    total = found[:, 0]
    for key in range(1, num_keys):
        total = operation(total, found[:, key])
    return total.reshape(-1)


def _constant(numbers: np.ndarray) -> jax.Array:
    """uint32, not counted from an index: each number's place would be counted apart."""
    return lax.optimization_barrier(jnp.asarray(numbers.astype(np.uint32)))


def _sums(products: jax.Array, ones: jax.Array) -> jax.Array:
    """[keys·G] of [keys, G, lanes]."""
    return lax.dot_general(
        products.reshape(-1, ones.shape[0]),
        ones,
        dimension_numbers=(((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )


def _soft_cap(scores: jax.Array, params: AttentionParams) -> jax.Array:
    if params.logit_softcap is None:
        return scores
    cap = np.float32(params.logit_softcap)
    return cap * jnp.tanh(scores / cap)
