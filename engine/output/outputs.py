"""What a user gets back: names as the field knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.engine.text.assistant.message import AssistantMessage

if TYPE_CHECKING:  # the command line's help is shown without
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (natural log, before temperature and masks are applied).

    Attributes:
        logprob: the log-probability.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: its text, if the request asked for text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob at one position: the chosen (or prompt) token and the asked-for top ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request's prompt.

    Attributes:
        index: which of the `n` completions.
        text: generated text (empty if the request does not detokenize).
        token_ids: generated token ids.
        cumulative_logprob: sum of the chosen tokens' log-probabilities, if logprobs were asked for.
        logprobs: one entry a generated token, if asked for.
        finish_reason: None while running, then "stop", "length", "cancelled" or "failed".
        stop_reason: the stop string or stop token id that ended it; None for end of sequence.
        message: the text as an assistant's turn, with calls of tools and thoughts told apart; only
            of `LLM.chat`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: AssistantMessage | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request; seconds on the engine's clock.

    Attributes:
        arrival_s: accepted by the front.
        first_scheduled_s: first planned into a step.
        first_token_s: first token committed.
        last_token_s: newest token committed.
        finished_s: its terminal event.
        num_preemptions: how often it lost its pages.
        predicted_ttft_s: the time to its first token, in seconds, that was expected when the
            scheduler accepted it; None if no prediction was made.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    predicted_ttft_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, in seconds."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    def tpot_s(self, num_output_tokens: int) -> float | None:
        """Mean time per output token after the first, in seconds; None below two tokens."""
        if num_output_tokens < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Generated:
    """The part of a completion that its reader has.

    Attributes:
        token_ids: its tokens.
        num_chars: length of their text. The newest tokens' may be missing, as it depends on those
            to come.
        cumulative_logprob: log-probability of its tokens, if it was asked for.
        finish_reason, stop_reason: of a completion that has ended, how.
    """

    token_ids: tuple[int, ...]
    num_chars: int
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, as of one commit.

    Attributes:
        request_id: the client's own id, or the engine's where the client gave none.
        prompt: the prompt's text, if it was given as text.
        prompt_token_ids: the prompt's token ids.
        prompt_logprobs: one entry a prompt token (None for the first), if asked for.
        outputs: `n` completions, in index order.
        finished: whether all completions have ended.
        metrics: when things happened.
        num_cached_tokens: prompt tokens that the prefix cache held.
        error: the typed error that ended the request as failed, if any.
        engine_id: the engine's own id, which no other request has; empty in a client's process.
        pooled: float32[dimensions], the vector of a pooled request that has ended well.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    error: Exception | None = field(default=None)
    engine_id: str = ""
    pooled: NDArray[np.float32] | None = None
