"""Turns a plan into the one vector its program reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.execution.pool_hidden import NO_ROW
from octavo.engine.execution.sampling.logits import (
    HAS_BAD_WORDS,
    HAS_BIAS,
    HAS_MASK,
    NEEDS_PENALTIES,
)
from octavo.engine.execution.step_spec import NEW_ROW_FLOATS, NEW_ROW_INTS, StepSpec
from octavo.engine.request import Request
from octavo.engine.scheduler.step_plan import PrefillRow, StepPlan

NO_SLOT = 2**31 - 1
"""A slot beyond every slot: writes to it are dropped."""


def decode_order(plan: StepPlan) -> NDArray[np.intp]:
    """Decode rows by falling length: rows that attend together are then about equally long."""
    return np.argsort(-plan.decode_rows.starts, kind="stable")


def pack(
    plan: StepPlan, spec: StepSpec, order: NDArray[np.intp], trash_slot: int
) -> NDArray[np.int32]:
    """The input vector of a plan.

    Args:
        plan: what to compute.
        spec: layout of the program that takes it.
        order: decode rows' order in the step, as indices into the plan.
        trash_slot: the slot of padding rows.

    Returns:
        int32[spec.size].
    """
    vector = np.zeros((spec.size,), np.int32)
    fields = spec.views(vector)
    num_decodes = len(plan.decode_rows)
    fields["num_decode_rows"][...] = num_decodes
    fields["num_rows"][...] = plan.num_rows
    fields["num_steps"][...] = plan.num_steps
    slots, max_new = fields["row_slot"], fields["row_max_new_tokens"]
    slots[plan.num_rows :] = trash_slot
    slots[:num_decodes] = plan.decode_rows.slots[order]
    max_new[:num_decodes] = plan.decode_rows.max_new_tokens[order]
    updates = fields["page_updates"]
    updates[len(plan.page_updates) :, 0] = NO_SLOT
    if plan.page_updates:
        updates[: len(plan.page_updates)] = plan.page_updates
    if not spec.shape.is_decode:
        _pack_prefill(plan, fields)
        if spec.has_snapshots:
            _pack_snapshots(plan, fields, first_slot=trash_slot + 1)
    return vector


def _pack_snapshots(plan: StepPlan, fields: dict[str, np.ndarray], first_slot: int) -> None:
    """Which states rows begin with, and which they leave: snapshots lie from `first_slot` on."""
    fields["state_source"][:] = fields["row_slot"]
    for index, row in enumerate(plan.prefill_rows, len(plan.decode_rows)):
        if row.restores is not None:
            fields["state_source"][index] = first_slot + row.restores
        for place, (position, snapshot) in enumerate(row.saves):
            fields["save_at"][index, place] = position
            fields["save_slot"][index, place] = first_slot + snapshot


def _pack_prefill(plan: StepPlan, fields: dict[str, np.ndarray]) -> None:
    num_decodes = len(plan.decode_rows)
    cu_q_lens, token_row = fields["cu_q_lens"], fields["token_row"]
    token_ids, score_ids = fields["token_ids"], fields["score_ids"]
    cu_q_lens[: num_decodes + 1] = np.arange(num_decodes + 1)
    token_row[:num_decodes] = np.arange(num_decodes)
    pool_row = fields.get("pool_row")
    score_ids[:] = -1
    if pool_row is not None:
        pool_row[:] = NO_ROW
    fields["new_slot"][:] = NO_SLOT
    token, num_new = num_decodes, 0
    for index, row in enumerate(plan.prefill_rows, num_decodes):
        stop = row.start + row.num_tokens
        span = slice(token, token + row.num_tokens)
        token_ids[span] = known_tokens(row.request, row.start, stop)
        token_row[span] = index
        token += row.num_tokens
        cu_q_lens[index + 1] = token
        fields["row_slot"][index] = row.slot
        fields["row_start"][index] = row.start
        if row.request.pooling is None:
            fields["row_max_new_tokens"][index] = row.samples
        elif pool_row is not None:
            pool_row[span][row.pooled_tokens] = index - num_decodes
        if row.request.sampling_params.prompt_logprobs is not None:
            scored = row.request.prompt_token_ids[row.start + 1 : stop + 1]
            score_ids[span.start : span.start + len(scored)] = scored
        if row.is_new:
            _pack_new_row(row, num_new, fields)
            num_new += 1
    cu_q_lens[plan.num_rows + 1 :] = token


def known_tokens(request: Request, start: int, stop: int) -> Sequence[int]:
    """Prompt and committed output tokens at positions [start, stop)."""
    num_prompt = request.num_prompt_tokens
    if stop <= num_prompt:
        return request.prompt_token_ids[start:stop]
    if start >= num_prompt:
        return request.output_token_ids[start - num_prompt : stop - num_prompt]
    return request.prompt_token_ids[start:] + request.output_token_ids[: stop - num_prompt]


def row_flags(request: Request) -> int:
    """Which vocabulary-sized state the request needs; see `execution/sampling/logits.py`."""
    params = request.sampling_params
    flags = 0
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        flags |= NEEDS_PENALTIES
    if params.logit_bias or params.allowed_token_ids is not None:
        flags |= HAS_BIAS
    if any(len(word) == 1 for word in request.bad_word_token_ids):
        flags |= HAS_BIAS
    if any(len(word) > 1 for word in request.bad_word_token_ids):
        flags |= HAS_BAD_WORDS
    if params.structured_outputs is not None:
        flags |= HAS_MASK
    return flags


def is_plain_greedy(request: Request) -> bool:
    """Whether the greedy variant of a step serves the request."""
    params = request.sampling_params
    return (
        params.is_greedy
        and params.logprobs is None
        and params.prompt_logprobs is None
        and params.min_tokens == 0
        and not row_flags(request)
    )


def _pack_new_row(row: PrefillRow, index: int, fields: dict[str, np.ndarray]) -> None:
    request, params = row.request, row.request.sampling_params
    values = {
        "slot": row.slot,
        "num_computed_tokens": row.start,
        "max_total_tokens": request.max_total_tokens,
        "top_k": params.top_k,
        "stop_from": request.stop_from,
        "num_logprobs": -1 if params.logprobs is None else params.logprobs,
        "flags": row_flags(request),
        "seed_high": _signed(request.seed >> 32),
        "seed_low": _signed(request.seed),
    }
    fields["new_slot"][index] = row.slot
    fields["new_ints"][index] = [values[name] for name in NEW_ROW_INTS]
    fields["new_floats"][index] = [getattr(params, name) for name in NEW_ROW_FLOATS]
    stops = fields["new_stop_ids"][index]
    stops[:] = -1
    stops[: len(request.stop_token_ids)] = request.stop_token_ids
    table = fields["new_table"][index]
    num_groups = len(table)
    table[:, : len(row.page_ids) // num_groups] = np.reshape(row.page_ids, (num_groups, -1))


def _signed(word: int) -> int:
    """The low 32 bits of an integer, as a signed one."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word
