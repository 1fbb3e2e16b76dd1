"""Tokens that grammars force: whether appending them at once saves time.

A row whose next tokens are known could decode on, a step for each. Or the tokens are appended
together, and the row computes them as a chunk, as a prompt is computed, beside the rows that
decode. A chunk makes its step longer for all rows: little where a step waits for weights, much on
a CPU, which pads the step to the next compiled size and computes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.engine.scheduler.committer import Committer, News
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.step_time_model import StepFeatures

STEPS_BESIDE_OTHERS = 2
"""Steps that a row with a grammar takes for a token beside rows without: it sits out the step that
is planned before its token is known. See ADR 5."""


class Unblocked(NamedTuple):
    """A request that its grammar lets go on.

    Attributes:
        request_id: which.
        num_tokens: prompt and output tokens that it goes on from.
        forced: tokens that must come next, in order, if they may be appended at once.
        num_appended: of these, how many were appended at once.
    """

    request_id: str
    num_tokens: int
    forced: tuple[int, ...] = ()
    num_appended: int = 0


def append_forced(
    table: RequestTable,
    committer: Committer,
    offers: Sequence[Unblocked],
    now_s: float,
    *,
    always: bool,
) -> News:
    """Appends the tokens that grammars force, where that saves time: see `Scheduler`.

    Args:
        table: the state; changed.
        committer: appends tokens to requests.
        offers: unblocked requests, each with its forced tokens. Those that went on meanwhile are
            left out.
        now_s: engine clock.
        always: append them whatever the steps take.
    """
    news = News()
    running: list[tuple[LiveRequest, tuple[int, ...]]] = []
    for offer in offers:
        entry = table.live.get(offer.request_id)
        if entry is None or entry.request.num_tokens != offer.num_tokens:
            continue
        if entry.request.slot is not None:
            running.append((entry, offer.forced))
        else:
            news.items.append(committer.append_forced(entry, offer.forced, now_s))
    sizes = [(entry, len(token_ids)) for entry, token_ids in running]
    if running and (always or are_worth_a_chunk(table, sizes)):
        for entry, token_ids in running:
            news.items.append(committer.append_forced(entry, token_ids, now_s))
    return news


def are_worth_a_chunk(table: RequestTable, rows: Sequence[tuple[LiveRequest, int]]) -> bool:
    """Whether rows should compute their forced tokens as chunks of the next step.

    Chunks are worth it if the steps that they save these rows take longer than the seconds that
    they add to one step, for each of the rows that wait for it. All rows are asked about together:
    one longer step serves them all.

    Args:
        table: the state.
        rows: running requests, and how many tokens are forced in each.
    """
    step_time, columns = table.forecast.step_time, table.rows
    starts = [entry.request.num_computed_tokens for entry, _ in rows]
    chunks = [count + 1 for _, count in rows]  # the newest token was never an input
    num_decode = max(columns.num_decoding, len(rows))
    decoding = columns.decode_rows()
    others = decoding.context - sum(starts)
    num_prompt = min(
        sum(entry.request.num_missing_tokens for entry in columns.prefilling),
        table.limits.max_num_batched_tokens - num_decode,
    )
    before = StepFeatures(num_decode, num_prompt, decoding.context)
    context = sum(start * size for start, size in zip(starts, chunks, strict=True))
    with_chunks = StepFeatures(
        num_decode - len(rows), num_prompt + sum(chunks), max(others, 0.0), float(context)
    )
    step_s = step_time.predict_s(before)
    added_s = max(0.0, step_time.predict_s(with_chunks) - step_s)
    is_beside_others = num_decode > table.live.num_with_grammar
    num_steps = sum(chunks) - len(chunks)
    saved_s = num_steps * step_s * (STEPS_BESIDE_OTHERS if is_beside_others else 1)
    return saved_s > added_s * num_decode
