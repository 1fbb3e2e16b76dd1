"""What replicas told of a request, so that another goes on where one was lost."""

from __future__ import annotations

from octavo.engine.input.input_processor import Submission
from octavo.engine.output.outputs import CompletionOutput, Generated, RequestOutput
from octavo.engine.output.transcript import Draft, Transcript


class Narrator:
    """Writes a replica's outputs into the transcript that this process's readers read.

    Args:
        transcript: to be written; its submission's requests stand for those of the replica.
    """

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript

    def generated(self) -> tuple[Generated, ...]:
        """What was told of each completion; nothing where none has begun."""
        drafts = self.transcript.sequences
        if not any(draft.token_ids or draft.finish_reason for draft in drafts):
            return ()
        return tuple(
            Generated(
                tuple(draft.token_ids),
                len(draft.text),
                draft.cumulative_logprob,
                draft.finish_reason,
                draft.stop_reason,
            )
            for draft in drafts
        )

    def take(self, output: RequestOutput) -> None:
        """Takes in what is new: all of it deltas, but for the error."""
        transcript = self.transcript
        first = transcript.sequences[0].request
        first.metrics, first.num_cached_tokens = output.metrics, output.num_cached_tokens
        if output.prompt_logprobs is not None:
            transcript.prompt_logprobs = output.prompt_logprobs
        for completion in output.outputs:
            draft = transcript.sequences[completion.index]
            if draft.finish_reason is None:
                _take(draft, completion)
        if output.pooled is not None:
            transcript.pooled = output.pooled
        if output.error is not None:
            first.error = output.error
        if output.finished:
            transcript.finished = True  # last: see `Transcript`


def _take(draft: Draft, new: CompletionOutput) -> None:
    # Tokens before their text, and the end last: see `Transcript`.
    if draft.logprobs is not None and new.logprobs is not None:
        draft.logprobs += new.logprobs
    draft.cumulative_logprob = new.cumulative_logprob
    draft.token_ids += new.token_ids
    draft.text += new.text
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
    for draft, generated in zip(drafts, submission.generated, strict=False):
        draft.text = " " * generated.num_chars  # whoever gave it has the text
        draft.go_on_from(generated)
    return Transcript(submission, drafts)
