"""Going on with what another engine began.

Its tokens are computed again as a prompt's are, or found in the prefix cache, as after a
preemption. What comes next depends on seed, positions and tokens alone, wherever it is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import Submission
from octavo.engine.output.outputs import Generated
from octavo.engine.request import Request, RequestStatus, no_counts
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams, are_plain_integers


def check_generated(
    submission: Submission, generated: Sequence[Generated], vocab_size: int
) -> None:
    """Refuses what no engine can have generated for a submission.

    Raises:
        InvalidRequestError: names the field.
    """
    if submission.params.output_kind is not RequestOutputKind.DELTA:
        kind = submission.params.output_kind.name.lower()
        raise InvalidRequestError("generated", kind, "given for streams of deltas alone")
    if len(generated) != len(submission.sequences):
        allowed = f"one for each completion, and n is {len(submission.sequences)}"
        raise InvalidRequestError("generated", f"{len(generated)} completions", allowed)
    most = submission.sequences[0].max_tokens
    for index, each in enumerate(generated):
        ends = each.finish_reason is not None
        if len(each.token_ids) > most - (not ends):
            allowed = f"at most {most - (not ends)}, as max_tokens is {most}"
            name = f"generated[{index}].token_ids"
            raise InvalidRequestError(name, f"{len(each.token_ids)} tokens", allowed)
        if not are_plain_integers(each.token_ids, 0, vocab_size - 1):
            name, allowed = f"generated[{index}].token_ids", f"token ids from 0 to {vocab_size - 1}"
            raise InvalidRequestError(name, list(each.token_ids)[:8], allowed)
    if all(each.finish_reason is not None for each in generated):
        raise InvalidRequestError("generated", "completions that have ended", "one that has not")


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
    first = submission.sequences[0]
    first_token_s = first.metrics.first_token_s or first.arrival_s
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
