"""From committed tokens to what a user reads: text, stop strings, log-probabilities."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from octavo.engine.errors import StepFailedError
from octavo.engine.input.input_processor import Submission
from octavo.engine.output.outputs import Generated, Logprob, TokenLogprobs
from octavo.engine.output.transcript import Draft, Transcript
from octavo.engine.pooling.pooler import Pooler
from octavo.engine.request import Request, RequestStatus
from octavo.engine.sampling_params import RequestOutputKind
from octavo.engine.scheduler.committer import Committed, CommittedRows, News
from octavo.engine.scheduler.step_plan import TokenScore
from octavo.engine.text.detokenizer import IncrementalDetokenizer
from octavo.engine.text.stops import StopStringMatcher
from octavo.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EndByStopString = Callable[[Request, str], None]
"""Told of a request whose text met a stop string, so that the scheduler ends it."""


class OutputProcessor:
    """Keeps the text side of every live request. Driven by the engine's thread alone.

    Args:
        tokenizer: of the model.
        end_by_stop_string: called when text meets a stop string.
        pooler: makes vectors of hidden states; None where no request is pooled.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_by_stop_string: EndByStopString,
        pooler: Pooler | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._pooler = pooler
        self._end_by_stop_string = end_by_stop_string
        self._parents: dict[str, Transcript] = {}
        self._sequences: dict[str, tuple[Transcript, Draft]] = {}
        self._token_texts: dict[int, str] = {}
        """Texts of tokens as log-probabilities show them: a long prompt asks for thousands."""
        self.num_generation_tokens = 0

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parents

    def add(self, submission: Submission) -> None:
        """Begins to follow a submission."""
        params = submission.params
        sequences = tuple(
            Draft(
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
        for sequence, generated in zip(sequences, submission.generated, strict=False):
            self._resume(sequence, generated, params.min_tokens)
        parent = Transcript(submission, sequences)
        self._parents[submission.request_id] = parent
        for sequence in sequences:
            self._sequences[sequence.request.request_id] = (parent, sequence)

    def _resume(self, sequence: Draft, generated: Generated, min_tokens: int) -> None:
        """Puts a sequence where another engine left it."""
        if sequence.detokenizer is not None:
            for num_before, token_id in enumerate(generated.token_ids):
                text = sequence.detokenizer.append_one(token_id)
                self._append_text(sequence, text, num_before < min_tokens)
        sequence.go_on_from(generated)

    def remove(self, request_id: str) -> Transcript | None:
        """Forgets a live submission; returns what it had to tell, None if there is none."""
        parent = self._parents.pop(request_id, None)
        for sequence in () if parent is None else parent.sequences:
            self._sequences.pop(sequence.request.request_id, None)
        return parent

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
            if found is None:
                continue
            parent, sequence = found
            if sequence.finish_reason is not None:
                continue
            self._take_safely(parent, sequence, item)
            touched[parent] = None
        told = []
        for parent in touched:
            if None not in [sequence.finish_reason for sequence in parent.sequences]:
                self.remove(parent.engine_id)
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
            if found is None:
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

    def _take_safely(self, parent: Transcript, sequence: Draft, item: Committed) -> None:
        try:
            self._take(parent, sequence, item)
        except Exception as error:
            self._failed(sequence, error, has_ended=item.finished)

    def _take(self, parent: Transcript, sequence: Draft, item: Committed) -> None:
        request = sequence.request
        if item.prompt_logprobs and parent.prompt_logprobs is not None and sequence.index == 0:
            self._take_prompt_logprobs(parent, item.prompt_logprobs)
        if item.pooled is not None and request.pooling is not None and self._pooler is not None:
            num_tokens = request.num_prompt_tokens
            parent.pooled = self._pooler.finish(request.pooling, item.pooled, num_tokens)
        if sequence.matcher is None and sequence.logprobs is None and not item.finished:
            sequence.token_ids += item.new_token_ids
            self.num_generation_tokens += len(item.new_token_ids)
            if sequence.detokenizer is not None:
                append_one = sequence.detokenizer.append_one
                sequence.text += "".join([append_one(token_id) for token_id in item.new_token_ids])
            return
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
            text = sequence.detokenizer.append_one(token_id)
            is_early = len(sequence.token_ids) <= parent.submission.params.min_tokens
            stop = self._append_text(sequence, text, is_early)
            if stop is not None:
                sequence.stop_reason = stop
                sequence.finish_reason = RequestStatus.STOPPED.value
                if not item.finished:
                    self._end_by_stop_string(request, stop)
                request.error = None  # what failed came after its text was over
                return
        if item.finished:
            self._finish(sequence)

    def _failed(self, sequence: Draft, error: Exception, *, has_ended: bool) -> None:
        """A fault in one text is nobody else's."""
        logger.error("request %s could not be read", sequence.request.request_id, exc_info=error)
        sequence.finish_reason = RequestStatus.FAILED.value
        typed = StepFailedError(f"its output could not be read: {type(error).__name__}: {error}")
        if not has_ended:
            self._end_by_stop_string(sequence.request, "")
        sequence.request.error = typed

    def _finish(self, sequence: Draft) -> None:
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

    def _append_text(self, sequence: Draft, text: str, is_early: bool) -> str | None:
        """Adds the text of the newest token; returns the stop string it met, if any. None ends a
        text that `min_tokens` keeps from ending: a string no more than a token."""
        if is_early:
            sequence.text += text
            return None
        return self._add_text(sequence, text)

    @staticmethod
    def _add_text(sequence: Draft, text: str) -> str | None:
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
            known = self._token_texts.get(token)
            if known is None:
                known = self._tokenizer.decode([token], skip_special_tokens=False)
                self._token_texts[token] = known
            return known

        top = zip(score.top_token_ids, score.top_logprobs, strict=True)
        entries = {
            token: Logprob(logprob, rank, text(token))
            for rank, (token, logprob) in enumerate(top, 1)
        }
        entries.setdefault(token_id, Logprob(score.logprob, score.rank, text(token_id)))
        return entries
