"""Taking up what a lost replica had begun to tell.

Another replica computes it again from its beginning. A request's tokens depend on its seed and its
positions alone, so what was told comes again, and is left out; should it not, as reduced precision
may have it, the request cannot go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.input.input_processor import Submission
from octavo.engine.output.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from octavo.engine.output.transcript import Draft, Transcript


class DivergedError(Exception):
    """What comes is not what was told before."""


@dataclass(slots=True)
class _Again:
    """What has come again of a completion."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Narrator:
    """Writes a replica's outputs into the transcript that this process's readers read.

    Args:
        transcript: to be written; its submission's requests stand for those of the replica.
    """

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self._again: dict[int, _Again] = {}

    @property
    def has_told(self) -> bool:
        """Whether anything was generated."""
        return any(draft.token_ids or draft.text for draft in self.transcript.sequences)

    def begin_again(self) -> None:
        """Says that what follows comes from the beginning."""
        drafts = self.transcript.sequences
        self._again = {draft.index: _Again() for draft in drafts if draft.token_ids or draft.text}

    def take(self, output: RequestOutput) -> None:
        """Takes in what is new: all of it deltas, but for the error.

        Raises:
            DivergedError: it comes again, and differs from the first time.
        """
        transcript = self.transcript
        first = transcript.sequences[0].request
        first.metrics, first.num_cached_tokens = output.metrics, output.num_cached_tokens
        if output.prompt_logprobs is not None:
            transcript.prompt_logprobs = output.prompt_logprobs
        for completion in output.outputs:
            draft = transcript.sequences[completion.index]
            if draft.finish_reason is None:
                self._take(draft, completion, is_last=completion.finish_reason is not None)
        if output.pooled is not None:
            transcript.pooled = output.pooled
        if output.error is not None:
            first.error = output.error
        if output.finished:
            transcript.finished = True  # last: see `Transcript`

    def _take(self, draft: Draft, new: CompletionOutput, *, is_last: bool) -> None:
        token_ids, text, logprobs = new.token_ids, new.text, new.logprobs
        again = self._again.get(draft.index)
        if again is not None:
            again.token_ids += token_ids
            again.text += text
            again.logprobs += logprobs or []
            num_tokens, num_chars = len(draft.token_ids), len(draft.text)
            is_short = len(again.token_ids) < num_tokens or len(again.text) < num_chars
            if is_short and not is_last:
                return
            if again.token_ids[:num_tokens] != draft.token_ids or is_short:
                raise DivergedError
            if again.text[:num_chars] != draft.text:
                raise DivergedError
            token_ids, text = again.token_ids[num_tokens:], again.text[num_chars:]
            logprobs = None if draft.logprobs is None else again.logprobs[len(draft.logprobs) :]
            del self._again[draft.index]
        # Tokens before their text, and the end last: see `Transcript`.
        if draft.logprobs is not None and logprobs is not None:
            draft.logprobs += logprobs
        draft.cumulative_logprob = new.cumulative_logprob
        draft.token_ids += token_ids
        draft.text += text
        draft.stop_reason = new.stop_reason
        draft.finish_reason = new.finish_reason


def transcript_of(submission: Submission) -> Transcript:
    """Of a submission whose text is made elsewhere."""
    params = submission.params
    drafts = tuple(
        Draft(
            request=request,
            index=index,
            detokenizer=None,
            matcher=None,
            logprobs=[] if params.logprobs is not None else None,
            cumulative_logprob=0.0 if params.logprobs is not None else None,
        )
        for index, request in enumerate(submission.sequences)
    )
    return Transcript(submission, drafts)
