"""From committed tokens to what a user reads: text, stop strings, log-probabilities.

What a request has to tell is a `Transcript`, written by the engine's thread and read by whoever
waits for the request, in a thread of their own if they like: an output is made when it is read, not
at each commit. (Making one takes three times as long as taking in a token.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.engine.errors import StepFailedError
from octavo.engine.input_processor import Submission
from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from octavo.engine.request import Request, RequestStatus
from octavo.engine.sampling_params import RequestOutputKind
from octavo.engine.scheduler.committed import Committed, CommittedRows, News
from octavo.engine.scheduler.step_plan import TokenScore
from octavo.engine.text.detokenizer import IncrementalDetokenizer
from octavo.engine.text.stops import StopStringMatcher
from octavo.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EndByStopString = Callable[[Request, str], None]
"""Told of a request whose text met a stop string, so that the scheduler ends it."""


@dataclass(slots=True)
class _Sequence:
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

    @property
    def has_news(self) -> bool:
        return len(self.token_ids) != self.num_told_tokens or (
            self.finish_reason is not None and not self.told_end
        )


class Transcript:
    """What one submission has to tell. One thread writes it and one, perhaps another, reads it.

    The writer appends, and sets what says that something is whole after it is; the reader asks for
    that first: so nothing is read twice, left out, or read in part. The text of the newest token
    may come with the next one.

    Args:
        submission: whose.
        sequences: its completions, in index order.

    Attributes:
        finished: whether nothing more comes.
        prompt_logprobs: one entry a prompt token (None for the first), if asked for.
    """

    __slots__ = (
        *("finished", "kind", "prompt_logprobs", "request_id", "sequences", "submission"),
        *("_first", "_is_over"),
    )

    def __init__(self, submission: Submission, sequences: tuple[_Sequence, ...]) -> None:
        self.submission = submission
        self.sequences = sequences
        self.request_id = submission.request_id
        self.kind = submission.params.output_kind
        self.finished = False
        asked = submission.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if asked else None
        self._first = sequences[0]
        self._is_over = False

    @property
    def has_news(self) -> bool:
        """Whether `read` gives anything that it did not give before."""
        if len(self._first.token_ids) != self._first.num_told_tokens:
            return True
        if self.finished:
            return not self._is_over
        return len(self.sequences) > 1 and any(each.has_news for each in self.sequences)

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
            untold = [s for s in self.sequences if len(s.token_ids) != s.num_told_tokens]
            if error is not None and is_delta and untold:
                finished, error = False, None
            self._is_over = finished
        return RequestOutput(
            request_id=self.request_id,
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
        )


class OutputProcessor:
    """Keeps the text side of every live request. Driven by the engine's thread alone.

    Args:
        tokenizer: of the model.
        end_by_stop_string: called when text meets a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, end_by_stop_string: EndByStopString) -> None:
        self._tokenizer = tokenizer
        self._end_by_stop_string = end_by_stop_string
        self._parents: dict[str, Transcript] = {}
        self._sequences: dict[str, tuple[Transcript, _Sequence]] = {}
        self.num_generation_tokens = 0

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parents

    def add(self, submission: Submission) -> None:
        """Begins to follow a submission."""
        params = submission.params
        sequences = tuple(
            _Sequence(
                request=request,
                index=index,
                detokenizer=IncrementalDetokenizer(self._tokenizer, params.skip_special_tokens)
                if params.detokenize
                else None,
                matcher=StopStringMatcher(params.stop, params.include_stop_str_in_output)
                if params.stop
                else None,
                logprobs=[] if params.logprobs is not None else None,
                cumulative_logprob=0.0 if params.logprobs is not None else None,
            )
            for index, request in enumerate(submission.sequences)
        )
        parent = Transcript(submission, sequences)
        self._parents[submission.request_id] = parent
        for sequence in sequences:
            self._sequences[sequence.request.request_id] = (parent, sequence)

    def remove(self, request_id: str) -> tuple[Request, ...]:
        """Forgets a submission; returns its sequences."""
        parent = self._parents.pop(request_id, None)
        if parent is None:
            return ()
        for sequence in parent.sequences:
            self._sequences.pop(sequence.request.request_id, None)
        return parent.submission.sequences

    @property
    def live_ids(self) -> list[str]:
        """Ids of the submissions that have not ended."""
        return list(self._parents)

    def requests_of(self, request_id: str) -> tuple[Request, ...]:
        """The engine requests of a live submission."""
        parent = self._parents.get(request_id)
        return () if parent is None else parent.submission.sequences

    def take(self, news: Iterable[Committed]) -> list[Transcript]:
        """Takes in what a step committed.

        Returns:
            The submissions that have something to tell, as their output kind wants. Each may be
            read by one thread alone; those of `RequestOutputKind.CUMULATIVE` before the next step
            is taken in, if each state is to be seen.
        """
        touched: dict[Transcript, None] = {}
        if isinstance(news, News):
            for rows in news.rows:
                self._take_rows(rows, touched)
            news = news.items
        for item in news:
            found = self._sequences.get(item.request.request_id)
            if found is None or found[1].request is not item.request:
                continue
            parent, sequence = found
            if sequence.finish_reason is not None:
                continue
            self._take_safely(parent, sequence, item)
            touched[parent] = None
        told = []
        for parent in touched:
            if None not in [sequence.finish_reason for sequence in parent.sequences]:
                self.remove(parent.request_id)
                parent.finished = True
            elif parent.kind is RequestOutputKind.FINAL_ONLY:
                continue
            told.append(parent)
        return told

    def _take_rows(self, rows: CommittedRows, touched: dict[Transcript, None]) -> None:
        """Takes in a token for each of many sequences that go on: nearly all there is to do."""
        known = self._sequences
        for request, token_id in zip(rows.requests, rows.token_ids, strict=True):
            found = known.get(request.request_id)
            if found is None or found[1].request is not request:
                continue
            parent, sequence = found
            if sequence.finish_reason is not None:
                continue
            touched[parent] = None
            if sequence.matcher is not None or sequence.logprobs is not None:
                item = Committed(request, (token_id,), None, None, False)
                self._take_safely(parent, sequence, item)
                continue
            sequence.token_ids.append(token_id)
            self.num_generation_tokens += 1
            if sequence.detokenizer is not None:
                try:
                    sequence.text += sequence.detokenizer.append_one(token_id)
                except Exception as error:
                    self._failed(sequence, error, has_ended=False)

    def _take_safely(self, parent: Transcript, sequence: _Sequence, item: Committed) -> None:
        try:
            self._take(parent, sequence, item)
        except Exception as error:
            self._failed(sequence, error, has_ended=item.finished)

    def _take(self, parent: Transcript, sequence: _Sequence, item: Committed) -> None:
        request = sequence.request
        if item.prompt_logprobs and parent.prompt_logprobs is not None and sequence.index == 0:
            self._take_prompt_logprobs(parent, item.prompt_logprobs)
        status = request.status
        for place, token_id in enumerate(item.new_token_ids):
            sequence.token_ids.append(token_id)
            self.num_generation_tokens += 1
            if item.logprobs is not None and sequence.logprobs is not None:
                score = item.logprobs[place]
                sequence.logprobs.append(self._logprobs(parent, token_id, score))
                assert sequence.cumulative_logprob is not None
                sequence.cumulative_logprob += score.logprob
            is_last = item.finished and place == len(item.new_token_ids) - 1
            hidden = (
                is_last
                and status is RequestStatus.STOPPED
                and not parent.submission.params.include_stop_str_in_output
            )
            if sequence.detokenizer is None or hidden:
                continue
            stop = self._add_text(sequence, sequence.detokenizer.append((token_id,)))
            if stop is not None:
                sequence.stop_reason = stop
                sequence.finish_reason = RequestStatus.STOPPED.value
                if not item.finished:
                    self._end_by_stop_string(request, stop)
                return
        if item.finished:
            self._finish(sequence)

    def _failed(self, sequence: _Sequence, error: Exception, *, has_ended: bool) -> None:
        """A fault in one text is nobody else's."""
        logger.error("request %s could not be read", sequence.request.request_id, exc_info=error)
        sequence.finish_reason = RequestStatus.FAILED.value
        typed = StepFailedError(f"its output could not be read: {type(error).__name__}: {error}")
        if not has_ended:
            self._end_by_stop_string(sequence.request, "")
        sequence.request.error = typed

    def _finish(self, sequence: _Sequence) -> None:
        stop = None
        if sequence.detokenizer is not None:
            stop = self._add_text(sequence, sequence.detokenizer.flush())
            if stop is None and sequence.matcher is not None:
                sequence.text += sequence.matcher.flush()
        request = sequence.request
        sequence.stop_reason = request.stop_reason if stop is None else stop
        sequence.finish_reason = (
            request.status.value if stop is None else RequestStatus.STOPPED.value
        )

    @staticmethod
    def _add_text(sequence: _Sequence, text: str) -> str | None:
        """Adds what may be shown; returns the stop string it met, if any."""
        stop = None
        if text and sequence.matcher is not None:
            text, stop = sequence.matcher.feed(text)
        sequence.text += text
        return stop

    def _take_prompt_logprobs(self, parent: Transcript, scores: tuple[TokenScore, ...]) -> None:
        assert parent.prompt_logprobs is not None
        prompt = parent.submission.sequences[0].prompt_token_ids
        for score in scores:
            if len(parent.prompt_logprobs) < len(prompt):
                token_id = prompt[len(parent.prompt_logprobs)]
                parent.prompt_logprobs.append(self._logprobs(parent, token_id, score))

    def _logprobs(self, parent: Transcript, token_id: int, score: TokenScore) -> TokenLogprobs:
        def text(token: int) -> str | None:
            if not parent.submission.params.detokenize:
                return None
            return self._tokenizer.decode([token], skip_special_tokens=False)

        top = zip(score.top_token_ids, score.top_logprobs, strict=True)
        entries = {
            token: Logprob(logprob, rank, text(token))
            for rank, (token, logprob) in enumerate(top, 1)
        }
        entries.setdefault(token_id, Logprob(score.logprob, score.rank, text(token_id)))
        return entries


def _completion(sequence: _Sequence, is_delta: bool, may_end: bool) -> CompletionOutput:
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
