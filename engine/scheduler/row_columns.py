"""What policies price by the row, as arrays over device slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.scheduler.forecast import CAUTIOUS, Forecast
from octavo.engine.scheduler.live_request import LiveRequest

Floats = NDArray[np.float64]


class RowColumns:
    """Goals of the running rows by slot, so that a plan looks at hundreds of rows in a few calls.

    A row's token k (from 0) is due at `base_s + k · tpot_s`: early tokens bank slack. The base is
    set when the first token is committed; until then, and for a request without a goal, it is
    infinite and the row is in nobody's way.

    Args:
        num_slots: rows of the device state.

    Attributes:
        base_s: due time of output token 0.
        tpot_s: goal, seconds a token; 0 for none.
        num_prompt: prompt tokens.
        length: cautious guess at the output's final length, in tokens.
        urgency: the place in the policy's order that the row was admitted with.
    """

    def __init__(self, num_slots: int) -> None:
        self.base_s: Floats = np.full(num_slots, np.inf)
        self.tpot_s: Floats = np.zeros(num_slots)
        self.num_prompt: Floats = np.zeros(num_slots)
        self.length: Floats = np.zeros(num_slots)

    def enter(self, entry: LiveRequest) -> None:
        """A request takes its slot."""
        request, slot = entry.request, entry.request.slot
        assert slot is not None
        self.num_prompt[slot] = request.num_prompt_tokens
        self.length[slot] = 0.0
        self.tpot_s[slot] = request.tpot_target_s or 0.0
        self.base_s[slot] = np.inf
        if request.metrics.first_token_s is not None:
            self.begin_output(entry)

    def refresh_lengths(
        self, entries: Sequence[LiveRequest], starts: NDArray[np.int32], forecast: Forecast
    ) -> None:
        """Guesses anew where a row has come as far as was guessed.

        Args:
            entries: decode rows, in the order of `starts`.
            starts: positions of their inputs.
        """
        slots = [entry.request.slot for entry in entries]
        emitted = starts + 1 - self.num_prompt[slots]
        for index in np.nonzero(self.length[slots] == 0)[0].tolist():
            request = entries[index].request
            self.length[request.slot] = max(1.0, forecast.lengths._class(request).quantile(0, 0))

    def begin_output(self, entry: LiveRequest) -> None:
        """The request's first token is known to have come; later ones are due from here."""
        request, slot = entry.request, entry.request.slot
        if slot is None:
            return
        first_s = request.metrics.first_token_s
        assert first_s is not None
        if request.tpot_target_s is not None:
            self.base_s[slot] = first_s
        elif request.e2e_target_s is not None:
            # The end is due, and tokens before it evenly: a row that keeps pace is no one's worry.
            self.base_s[slot] = np.inf
