"""Submissions as the message that a server takes."""

from __future__ import annotations

from octavo.engine.input.input_processor import Submission
from octavo.engine.sampling_params import RequestOutputKind
from octavo.server.client_requests import generate_request
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

LEAST_TARGET_S = 0.001


def request_of(submission: Submission, now_s: float) -> pb.GenerateRequest:
    """The call that has a server generate what is left of a submission, as a stream of deltas.

    The seed is sent along: wherever a request goes on, the same tokens come.

    Args:
        now_s: on the clock of the submission's times: what is left of its targets is sent.
    """
    first = submission.sequences[0]
    params = submission.params.replace(
        seed=first.seed, max_tokens=first.max_tokens, output_kind=RequestOutputKind.DELTA
    )
    waited_s = now_s - first.arrival_s

    def left_ms(target_s: float | None, gone_s: float = waited_s) -> float | None:
        return None if target_s is None else 1e3 * max(target_s - gone_s, LEAST_TARGET_S)

    return generate_request(
        first.prompt_token_ids,
        params,
        request_id=first.label or None,
        priority=first.priority,
        tenant=first.tenant,
        cache_salt=first.cache_salt,
        ttft_target_ms=None if submission.generated else left_ms(first.ttft_target_s),
        tpot_target_ms=left_ms(first.tpot_target_s, 0.0),
        e2e_target_ms=left_ms(first.e2e_target_s),
        generated=submission.generated,
    )
