"""Going on with what another engine began.

Its tokens are computed again as a prompt's are, or found in the prefix cache, as after a
preemption. What comes next depends on seed, positions and tokens alone, wherever it is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from octavo.engine.input.input_processor import Generated, Submission
from octavo.engine.request import Request, RequestStatus, no_counts
from octavo.engine.sampling_params import SamplingParams


def rest_of(submission: Submission, generated: Sequence[Generated]) -> Submission:
    """What is left of a submission, for an engine that goes on with it.

    Args:
        submission: as it was first given.
        generated: of each sequence, what its reader has; empty where no reader has anything.
    """
    if not generated:
        return submission
    # Log-probabilities of the prompt are told before any token.
    params = submission.params.replace(prompt_logprobs=None)
    first_token_s = submission.sequences[0].metrics.first_token_s
    return replace(
        submission,
        params=params,
        sequences=tuple(
            _rest(request, params, each, first_token_s)
            for request, each in zip(submission.sequences, generated, strict=True)
        ),
        generated=tuple(generated),
    )


def _rest(
    request: Request, params: SamplingParams, generated: Generated, first_token_s: float | None
) -> Request:
    rest = copy.copy(request)
    rest.sampling_params, rest.counts = params, no_counts()
    rest.output_token_ids = [*generated.token_ids]
    if generated.token_ids and rest.metrics.first_token_s is None:
        rest.metrics = replace(rest.metrics, first_token_s=first_token_s)
    if generated.finish_reason is not None:
        rest.status, rest.stop_reason = (
            RequestStatus(generated.finish_reason),
            generated.stop_reason,
        )
    return rest
