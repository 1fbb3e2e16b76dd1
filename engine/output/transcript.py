"""What a request has to tell, written by the engine's thread and read by whoever waits for it.

The reader may be in a thread of its own: an output is made when it is read, not at each commit.
(Making one takes three times as long as taking in a token.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.input.input_processor import Submission
from octavo.engine.output.outputs import CompletionOutput, Generated, RequestOutput, TokenLogprobs
from octavo.engine.request import Request
from octavo.engine.sampling_params import RequestOutputKind
from octavo.engine.text.detokenizer import IncrementalDetokenizer
from octavo.engine.text.stops import StopStringMatcher


@dataclass(slots=True)
class Draft:
    """One completion in the making."""

    request: Request
    index: int
    detokenizer: IncrementalDetokenizer | None
    matcher: StopStringMatcher | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_told_chars: int = 0
    num_told_tokens: int = 0
    told_end: bool = False

    def go_on_from(self, generated: Generated) -> None:
        """Takes up a completion where another engine left it: its reader has what came so far. The
        text is for the caller to add."""
        self.token_ids += generated.token_ids
        self.num_told_tokens, self.num_told_chars = len(self.token_ids), generated.num_chars
        if self.logprobs is not None:
            self.logprobs += [{}] * len(self.token_ids)  # nobody reads them again
            self.cumulative_logprob = generated.cumulative_logprob or 0.0
        self.finish_reason, self.stop_reason = generated.finish_reason, generated.stop_reason
        self.told_end = generated.finish_reason is not None

    @property
    def has_more(self) -> bool:
        """Whether there are tokens or text that were not read."""
        return len(self.token_ids) != self.num_told_tokens or len(self.text) != self.num_told_chars

    @property
    def has_news(self) -> bool:
        """Whether there is more, or it ended since."""
        return self.has_more or (self.finish_reason is not None and not self.told_end)


class Transcript:
    """What one submission has to tell. One thread writes it and one, perhaps another, reads it.

    The writer appends, and sets what says that something is whole after it is; the reader asks for
    that first: so nothing is read twice, left out, or read in part. A token may be read before its
    text, never after.

    Args:
        submission: whose.
        sequences: its completions, in index order.

    Attributes:
        engine_id: the submission's.
        finished: whether nothing more comes.
        prompt_logprobs: one entry a prompt token (None for the first), if asked for.
        pooled: the vector of a pooled request, once it is whole.
    """

    __slots__ = (
        *("engine_id", "finished", "kind", "pooled", "prompt_logprobs", "sequences", "submission"),
        *("_first", "_is_over"),
    )

    def __init__(self, submission: Submission, sequences: tuple[Draft, ...]) -> None:
        self.submission = submission
        self.sequences = sequences
        self.engine_id = submission.request_id
        self.kind = submission.params.output_kind
        self.finished = False
        asked = submission.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if asked else None
        self.pooled: NDArray[np.float32] | None = None
        self._first = sequences[0]
        self._is_over = False

    @property
    def has_news(self) -> bool:
        """Whether `read` gives anything that it did not give before."""
        if self.finished:
            return not self._is_over
        if not self._has_prompt:
            return False
        if self._first.has_more:
            return True
        return len(self.sequences) > 1 and any(each.has_news for each in self.sequences)

    @property
    def _has_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are whole, if they were asked for. Only the first
        of several completions gets them, and another may be ahead of it."""
        scores = self.prompt_logprobs
        return scores is None or len(scores) >= self._first.request.num_prompt_tokens

    def readings(self) -> Iterator[RequestOutput]:
        """The state as of now; and once more where an error comes after what came before it."""
        yield self.read()
        while self.finished and self.has_news:
            yield self.read()

    def read(self) -> RequestOutput:
        """The state as of now; of a stream of deltas, what came since the last reading.

        An error comes alone, after what came before it.
        """
        finished, error = self.finished, None
        submission, first = self.submission, self._first.request
        is_delta = self.kind is RequestOutputKind.DELTA
        if finished:
            errors = [s.request.error for s in self.sequences if s.request.error is not None]
            error = errors[0] if errors else None
            if error is not None and is_delta and any(s.has_more for s in self.sequences):
                finished, error = False, None
            self._is_over = finished
        return RequestOutput(
            request_id=submission.shown_id,
            prompt=submission.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[
                _completion(sequence, is_delta, finished or len(self.sequences) > 1)
                for sequence in self.sequences
            ],
            finished=finished,
            metrics=first.metrics,
            num_cached_tokens=first.num_cached_tokens,
            error=error,
            engine_id=self.engine_id,
            pooled=self.pooled,
        )


def _completion(sequence: Draft, is_delta: bool, may_end: bool) -> CompletionOutput:
    # In this order: who has ended has all its text, and text is there after its token.
    finish_reason = sequence.finish_reason if may_end else None
    sequence.told_end = finish_reason is not None
    text, token_ids, logprobs = sequence.text, sequence.token_ids, sequence.logprobs
    num_tokens = len(token_ids)
    if logprobs is not None:
        num_tokens = min(num_tokens, len(logprobs))
    chars, tokens = (sequence.num_told_chars, sequence.num_told_tokens) if is_delta else (0, 0)
    sequence.num_told_chars, sequence.num_told_tokens = len(text), num_tokens
    return CompletionOutput(
        index=sequence.index,
        text=text[chars:],
        token_ids=token_ids[tokens:num_tokens],
        cumulative_logprob=sequence.cumulative_logprob,
        logprobs=None if logprobs is None else logprobs[tokens:num_tokens],
        finish_reason=finish_reason,
        stop_reason=None if finish_reason is None else sequence.stop_reason,
    )
