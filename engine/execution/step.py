"""The step: a pure function from weights, device state and one input vector to the next state.

``step(weights, state, vector) -> (state, output)``, state donated. A mixed program advances prefill
chunks and decodes in one iteration; a decode program loops on the device, each row with its own
stop tokens, length limit and page limit: a row that stops idles, it does not end the others.

Legend: T tokens, S rows, K iterations, U new rows, G cache groups, M entries in a row of a block
table, L top log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from octavo.engine.execution.attend import attend_over_heads
from octavo.engine.execution.platform.kernel_choice import Kernels
from octavo.engine.execution.pool_hidden import pool_hidden
from octavo.engine.execution.run_experts import experts_over_mesh
from octavo.engine.execution.sampling.logits import SamplingRows
from octavo.engine.execution.sampling.logprobs import MAX_LOGPROBS
from octavo.engine.execution.sampling.next_tokens import (
    Scores,
    logits_of,
    logits_of_first,
    next_tokens,
    or_drop,
    score_prompt,
)
from octavo.engine.execution.state import DeviceState
from octavo.engine.execution.step_spec import (
    NEW_ROW_FLOATS,
    NEW_ROW_INTS,
    StepSpec,
)
from octavo.engine.scheduler.step_plan import NO_TOKEN
from octavo.models import decoder
from octavo.models.blocks.state_rows import StateCopies, StateRows
from octavo.models.config import ModelConfig
from octavo.pallas_kernels.ragged_paged_attention import RaggedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What the host reads of a step.

    Attributes:
        tokens: int32[K, S]; `NO_TOKEN` where a row emitted nothing, `NOT_FINITE` where what it
            computed is infinite or not a number, `NOTHING_ALLOWED` where every token is forbidden.
        scores: of the emitted tokens, [K, S]; None in the greedy variant.
        prompt_scores: of the tokens in `score_ids`, [T]; None but in general mixed programs.
    """

    tokens: jax.Array
    scores: Scores | None
    prompt_scores: Scores | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PooledStepOutput(StepOutput):
    """What the host reads of a pooled step.

    Attributes:
        pooled: float32[U, E]; see `pool_hidden`.
    """

    pooled: jax.Array


StepFunction = Callable[[Any, DeviceState, jax.Array], tuple[DeviceState, StepOutput]]


def make_step(config: ModelConfig, spec: StepSpec, *, mesh: Mesh, kernels: Kernels) -> StepFunction:
    """The step of one shape, ready to be compiled.

    Args:
        config: the model, as sharded.
        spec: the input's layout.
        mesh: the device mesh weights and pools are sharded over.
        kernels: which attention and which experts to use.

    Returns:
        A pure function `(weights, state, int32[spec.size]) -> (state, output)`.
    """
    run = partial(_decode if spec.shape.is_decode else _mixed, config, spec, mesh, kernels)

    def step(weights: Any, state: DeviceState, vector: jax.Array) -> tuple[DeviceState, StepOutput]:
        fields = spec.unpack(vector)
        with jax.named_scope("set_rows"):
            if not spec.shape.is_decode:
                state = _set_rows(state, fields)
            slot, index, *pages = fields["page_updates"].T
            table = state.block_table.at[:, slot, index].set(jnp.stack(pages), mode="drop")
            state = replace(state, block_table=table)
        return run(weights, state, fields)

    return step


def _set_rows(state: DeviceState, fields: dict[str, jax.Array]) -> DeviceState:
    """Fills the slots of new rows; padding names a slot that does not exist and is dropped."""
    slot = fields["new_slot"]
    ints = dict(zip(NEW_ROW_INTS, fields["new_ints"].T, strict=True))
    floats = dict(zip(NEW_ROW_FLOATS, fields["new_floats"].T, strict=True))

    def put(rows: jax.Array, values: jax.Array) -> jax.Array:
        return rows.at[slot].set(values.astype(rows.dtype), mode="drop")

    seeds = jnp.stack([ints["seed_high"], ints["seed_low"]], axis=1)
    rows = state.sampling
    sampling = SamplingRows(
        **{name: put(getattr(rows, name), floats[name]) for name in NEW_ROW_FLOATS},
        **{
            name: put(getattr(rows, name), ints[name])
            for name in ("top_k", "stop_from", "num_logprobs", "flags")
        },
        seed=put(rows.seed, lax.bitcast_convert_type(seeds, jnp.uint32)),
        stop_ids=put(rows.stop_ids, fields["new_stop_ids"]),
    )
    return replace(
        state,
        block_table=state.block_table.at[:, slot].set(
            fields["new_table"].swapaxes(0, 1), mode="drop"
        ),
        num_computed_tokens=put(state.num_computed_tokens, ints["num_computed_tokens"]),
        max_total_tokens=put(state.max_total_tokens, ints["max_total_tokens"]),
        stopped=state.stopped.at[slot].set(False, mode="drop"),
        sampling=sampling,
    )


def _mixed(
    config: ModelConfig,
    spec: StepSpec,
    mesh: Mesh,
    kernels: Kernels,
    weights: Any,
    state: DeviceState,
    fields: dict[str, jax.Array],
) -> tuple[DeviceState, StepOutput]:
    num_rows, num_tokens = spec.shape.num_rows, spec.shape.num_tokens
    slot, cu_q_lens, token_row = fields["row_slot"], fields["cu_q_lens"], fields["token_row"]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    is_decode = row < fields["num_decode_rows"]
    in_use = row < fields["num_rows"]
    idle = ~in_use | (is_decode & state.stopped[slot])
    start = jnp.where(is_decode, state.num_computed_tokens[slot], fields["row_start"])
    q_len = cu_q_lens[1:] - cu_q_lens[:-1]
    tables = _tables(config, spec, state, slot, start)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    offset = token - cu_q_lens[:-1][token_row]
    decodes = is_decode[token_row]
    token_ids = jnp.where(decodes, state.last_token[slot][token_row], fields["token_ids"])
    live = (token < cu_q_lens[-1]) & ~idle[token_row]
    position = jnp.where(live, start[token_row] + offset, 0)
    kv_lens = jnp.where(idle, 0, start + q_len)
    batches = _batches(tables, kv_lens, cu_q_lens, token_row, position, live, spec, fields)
    rows = StateRows(
        slot=slot,
        start=start,
        live=~idle,
        cu_q_lens=cu_q_lens,
        token_row=token_row,
        num_decode_rows=fields["num_decode_rows"],
        num_rows=fields["num_rows"],
        decode_only=False,
        copies=StateCopies(
            source=fields["state_source"],
            save_at=fields["save_at"],
            save_slot=fields["save_slot"],
        )
        if spec.has_snapshots
        else None,
    )
    hidden, state = _forward(
        config, spec, mesh, kernels, weights, state, token_ids, position, live, batches, rows
    )
    last = jnp.clip(cu_q_lens[1:] - 1, 0, num_tokens - 1)
    # A chunk that does not end at the last known token samples nothing.
    samples = ~idle & (fields["row_max_new_tokens"] > 0)
    sampled = hidden[last]
    logits = partial(logits_of_first, config, mesh, weights, sampled, fields["num_rows"])
    state, tokens, scores = next_tokens(
        config, spec, weights, state, sampled, logits, slot, start + q_len, ~idle, samples
    )
    computed = state.num_computed_tokens.at[or_drop(slot, ~idle, state)].set(
        start + q_len, mode="drop"
    )
    state = replace(state, num_computed_tokens=computed)
    prompt_scores = None
    if not spec.shape.is_greedy:
        prompt_scores = score_prompt(config, mesh, weights, hidden, fields["score_ids"], tokens)
    output = StepOutput(
        tokens=tokens[None],
        scores=None if scores is None else jax.tree.map(lambda x: x[None], scores),
        prompt_scores=prompt_scores,
    )
    if not spec.shape.pools:
        return state, output
    pooled = pool_hidden(config, weights, hidden, fields["pool_row"], spec.shape.num_new_rows)
    return state, PooledStepOutput(
        tokens=output.tokens,
        scores=output.scores,
        prompt_scores=output.prompt_scores,
        pooled=pooled,
    )


def _decode(
    config: ModelConfig,
    spec: StepSpec,
    mesh: Mesh,
    kernels: Kernels,
    weights: Any,
    state: DeviceState,
    fields: dict[str, jax.Array],
) -> tuple[DeviceState, StepOutput]:
    shape = spec.shape
    num_rows = shape.num_rows
    slot = fields["row_slot"]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    tables = _tables(config, spec, state, slot, state.num_computed_tokens[slot])
    cu_q_lens = jnp.arange(num_rows + 1, dtype=jnp.int32)

    def one_step(
        i: jax.Array, carry: tuple[DeviceState, StepOutput]
    ) -> tuple[DeviceState, StepOutput]:
        state, output = carry
        live = (
            (row < fields["num_rows"]) & ~state.stopped[slot] & (i < fields["row_max_new_tokens"])
        )
        position = jnp.where(live, state.num_computed_tokens[slot], 0)
        kv_lens = jnp.where(live, position + 1, 0)
        batches = _batches(tables, kv_lens, cu_q_lens, row, position, live, spec, fields)
        rows = StateRows(
            slot=slot,
            start=position,
            live=live,
            cu_q_lens=cu_q_lens,
            token_row=row,
            num_decode_rows=fields["num_rows"],
            num_rows=fields["num_rows"],
            decode_only=True,
        )
        token_ids = state.last_token[slot]
        hidden, state = _forward(
            config, spec, mesh, kernels, weights, state, token_ids, position, live, batches, rows
        )
        logits = partial(logits_of, config, mesh, weights, hidden)
        state, tokens, scores = next_tokens(
            config, spec, weights, state, hidden, logits, slot, position + 1, live, live
        )
        computed = state.num_computed_tokens.at[or_drop(slot, live, state)].set(
            position + 1, mode="drop"
        )
        output = jax.tree.map(
            lambda all_steps, new: lax.dynamic_update_index_in_dim(all_steps, new, i, 0),
            output,
            StepOutput(tokens=tokens, scores=scores, prompt_scores=None),
        )
        return replace(state, num_computed_tokens=computed), output

    def zeros(dtype: Any, *tail: int) -> jax.Array:
        return jnp.zeros((shape.num_steps, num_rows, *tail), dtype)

    scores = None
    if not shape.is_greedy:
        scores = Scores(
            logprob=zeros(jnp.float32),
            rank=zeros(jnp.int32),
            top_ids=zeros(jnp.int32, MAX_LOGPROBS),
            top_logprobs=zeros(jnp.float32, MAX_LOGPROBS),
        )
    output = StepOutput(tokens=zeros(jnp.int32) + NO_TOKEN, scores=scores, prompt_scores=None)
    if shape.num_steps == 1:
        return one_step(jnp.int32(0), (state, output))
    return lax.fori_loop(0, fields["num_steps"], one_step, (state, output))


def _tables(
    config: ModelConfig, spec: StepSpec, state: DeviceState, slot: jax.Array, start: jax.Array
) -> tuple[jax.Array, ...]:
    """The rows' block tables by group, int32[S, M], the trash page where no query looks.

    What lies behind a window may have been given to another sequence, and attention that walks
    pages block by block reads some of it: weighed with zero, which a number that is not finite
    survives. The trash page is always finite.

    Args:
        start: int32[S], the position of each row's first query; no earlier one comes after it.
    """
    tables = []
    entry = jnp.arange(spec.table_pages, dtype=jnp.int32)
    for group, window in enumerate(config.cache_layout().windows):
        table = state.block_table[group, slot]
        if window is not None:
            first_seen = jnp.maximum(start - (window - 1), 0) // spec.page_size
            table = jnp.where(entry < first_seen[:, None], 0, table)
        tables.append(table)
    return tuple(tables)


def _batches(
    tables: tuple[jax.Array, ...],
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    token_row: jax.Array,
    position: jax.Array,
    live: jax.Array,
    spec: StepSpec,
    fields: dict[str, jax.Array],
) -> tuple[RaggedBatch, ...]:
    """By group, where each token's KV goes: page 0 for padding and idle rows."""
    page_size = spec.page_size
    num_decode_rows = fields["num_rows" if spec.shape.is_decode else "num_decode_rows"]
    return tuple(
        RaggedBatch(
            block_table=table,
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            token_row=token_row,
            token_page=jnp.where(live, table[token_row, position // page_size], 0),
            token_offset=position % page_size,
            num_decode_rows=num_decode_rows,
            num_rows=fields["num_rows"],
        )
        for table in tables
    )


def _forward(
    config: ModelConfig,
    spec: StepSpec,
    mesh: Mesh,
    kernels: Kernels,
    weights: Any,
    state: DeviceState,
    token_ids: jax.Array,
    position: jax.Array,
    live: jax.Array,
    batches: tuple[RaggedBatch, ...],
    rows: StateRows,
) -> tuple[jax.Array, DeviceState]:
    """Hidden states [T, E] of the tokens, and the state with what layers keep of them.

    Args:
        live: bool [T], of tokens that are no padding.
        batches: by cache group.
        rows: for recurrent layers.
    """
    attend_all = attend_over_heads(
        mesh,
        backend=kernels.attention,
        decode_only=spec.shape.is_decode,
        quick=spec.shape.quick,
    )
    attend = [jax.tree_util.Partial(attend_all, batch) for batch in batches]
    x = decoder.embed(weights, config, token_ids)
    places = config.cache_layout().places()
    run_experts = jax.tree_util.Partial(experts_over_mesh(mesh, kernels.experts), live)
    caches: tuple[Any, ...] = (*state.kv, *state.recurrent)
    inputs = decoder.layer_inputs(weights, config, token_ids, x)
    hidden, caches = decoder.run_layers(
        weights, config, x, position, [*attend, rows], caches, places, run_experts, inputs
    )
    num_pools = len(state.kv)
    state = replace(state, kv=caches[:num_pools], recurrent=caches[num_pools:])
    return hidden, state
