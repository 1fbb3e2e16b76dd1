"""Who gives way: the cheapest to lose for the pages it holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.row_table import Floats
from octavo.engine.scheduler.rows import Slots

LOST_TARGET_S = 1e3
"""What a missed target weighs against seconds of the machine, when victims are compared."""


class RowPrices(NamedTuple):
    """Running rows as victims, by column.

    Attributes:
        num_pages: pages that giving way frees.
        resume_s: seconds of device time to bring the row back; 0 if its pages are swapped.
        delay_s: seconds until it goes on, once it is let in again.
        spare_s: seconds it could stand still and yet be in time; infinity without a target,
            below 0 if it is late already.
    """

    num_pages: Floats
    resume_s: Floats
    delay_s: Floats
    spare_s: Floats

    @property
    def keeps_target(self) -> NDArray[np.bool_]:
        """Whether a row loses nothing it could still have had: whoever is late has no more."""
        return (self.spare_s > self.delay_s) | (self.spare_s < 0)

    @property
    def loss_per_page(self) -> Floats:
        """What giving way costs for each page it frees, in seconds of the machine."""
        is_late = self.spare_s < 0
        loss = np.where(is_late, 0.0, self.resume_s)
        loss = loss + np.where(self.keeps_target, 0.0, LOST_TARGET_S)
        result: Floats = loss / np.maximum(self.num_pages, 1.0)
        return result


def price_rows(snapshot: Snapshot, slots: Slots, contexts: Floats) -> RowPrices:
    """What each row would lose.

    A row is brought back by a swap if there is a host tier and that is the faster way, else by
    computing it again; shared prefix pages are counted as if they were its own.

    Args:
        slots: the rows.
        contexts: tokens each holds.
    """
    forecast, rows, limits = snapshot.forecast, snapshot.rows, snapshot.limits
    num_pages: Floats = limits.needs.held_each(contexts)
    prefill_s = contexts * forecast.prefill_token_s
    if limits.num_host_pages:
        copy_s = 2 * num_pages * forecast.page_copy_s
        swaps = copy_s < prefill_s
        resume_s, delay_s = np.where(swaps, 0.0, prefill_s), np.minimum(copy_s, prefill_s)
    else:
        resume_s = delay_s = prefill_s
    emitted = contexts - rows.last_prompt[slots]
    remaining = np.maximum(rows.length[slots] - emitted, 1.0)
    spare_s = rows.end_due_s[slots] - remaining * forecast.step_s
    token_due_s = rows.base_s[slots] + rows.tpot_s[slots] * emitted
    # Who is a little behind its pace and gains on it with every step is not lost yet: its target
    # is a mean. Half of the tokens that are expected are counted on.
    gain_s = 0.5 * remaining * np.maximum(rows.tpot_s[slots] - forecast.step_s, 0.0)
    is_behind = (token_due_s < snapshot.now_s) & (token_due_s + gain_s >= snapshot.now_s)
    token_due_s = np.where(is_behind, snapshot.now_s, token_due_s)
    spare_s = np.minimum(spare_s, token_due_s) - snapshot.now_s
    return RowPrices(num_pages, resume_s, delay_s, spare_s)
