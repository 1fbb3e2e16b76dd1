"""RequestOutput to and from its message."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.engine.errors import InvalidRequestError
from octavo.engine.output.outputs import (
    CompletionOutput,
    Generated,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "failed": pb.FINISH_REASON_FAILED,
    "rejected": pb.FINISH_REASON_REJECTED,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}
FINISH_NAMES = {number: name for name, number in FINISH_REASONS.items()}
_MOMENTS = ("first_scheduled_s", "first_token_s", "last_token_s", "finished_s")


class OutputEncoder:
    """Turns the outputs of one request into messages: what is said once is said once.

    Args:
        model: the served model's name.
        is_delta: whether each output holds only what is new.
    """

    def __init__(self, model: str, *, is_delta: bool) -> None:
        self._model = model
        self._is_delta = is_delta
        self._num_tokens: dict[int, int] = {}
        self._prompt_sent = False
        self._prompt_logprobs_sent = False

    def encode(self, output: RequestOutput) -> pb.GenerateResponse:
        """The message of the request's next output."""
        message = pb.GenerateResponse(
            request_id=output.request_id, model=self._model, finished=output.finished
        )
        if not self._prompt_sent:
            message.prompt_token_ids.extend(output.prompt_token_ids)
            self._prompt_sent = True
        if output.prompt_logprobs is not None and not self._prompt_logprobs_sent:
            message.prompt_logprobs.extend(_logprobs(entry) for entry in output.prompt_logprobs)
            self._prompt_logprobs_sent = True
        for completion in output.outputs:
            message.outputs.append(_completion(completion))
            before = self._num_tokens.get(completion.index, 0) if self._is_delta else 0
            self._num_tokens[completion.index] = before + len(completion.token_ids)
        if output.finished:
            num_tokens = sum(self._num_tokens.values())
            message.usage.prompt_tokens = len(output.prompt_token_ids)
            message.usage.cached_tokens = output.num_cached_tokens
            message.usage.completion_tokens = num_tokens
            message.timings.CopyFrom(
                timings_message(output.metrics, num_tokens, len(self._num_tokens))
            )
        return message


class OutputDecoder:
    """Turns the messages of one request back into outputs.

    Args:
        prompt: the prompt's text, if it was sent as text.
    """

    def __init__(self, prompt: str | None) -> None:
        self._prompt = prompt
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def decode(self, message: pb.GenerateResponse) -> RequestOutput:
        """The next output; times are in seconds since the server accepted the request."""
        if message.prompt_token_ids:
            self._prompt_token_ids = list(message.prompt_token_ids)
        if message.prompt_logprobs:
            self._prompt_logprobs = [_read_logprobs(entry) for entry in message.prompt_logprobs]
        return RequestOutput(
            request_id=message.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[_read_completion(completion) for completion in message.outputs],
            finished=message.finished,
            metrics=read_timings(message.timings),
            num_cached_tokens=message.usage.cached_tokens,
        )


def generated_message(generated: Generated) -> pb.Generated:
    """The message of what was generated of a completion."""
    message = pb.Generated(
        token_ids=generated.token_ids,
        num_chars=generated.num_chars,
        cumulative_logprob=generated.cumulative_logprob,
    )
    if generated.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[generated.finish_reason]
    return message


def read_generated(message: pb.Generated) -> Generated:
    """The same, read.

    Raises:
        InvalidRequestError: it ended in a way that is none.
    """
    reason = FINISH_NAMES.get(message.finish_reason)
    is_wrong = reason is None and message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
    if is_wrong or reason == "tool_calls":  # how a chat's turn ends, not its completion
        allowed = "unspecified, while it runs, or how it ended (1 to 5)"
        raise InvalidRequestError("generated.finish_reason", message.finish_reason, allowed)
    scored = message.HasField("cumulative_logprob")
    return Generated(
        token_ids=tuple(message.token_ids),
        num_chars=message.num_chars,
        cumulative_logprob=message.cumulative_logprob if scored else None,
        finish_reason=reason,
    )


def _completion(completion: CompletionOutput) -> pb.Completion:
    message = pb.Completion(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        cumulative_logprob=completion.cumulative_logprob,
    )
    message.logprobs.extend(_logprobs(entry) for entry in completion.logprobs or ())
    if completion.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[completion.finish_reason]
    if isinstance(completion.stop_reason, str):
        message.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        message.stop_token_id = completion.stop_reason
    return message


def _read_completion(message: pb.Completion) -> CompletionOutput:
    has_logprobs = message.HasField("cumulative_logprob")
    stop_reason: int | str | None = None
    if message.HasField("stop_string"):
        stop_reason = message.stop_string
    elif message.HasField("stop_token_id"):
        stop_reason = message.stop_token_id
    return CompletionOutput(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        cumulative_logprob=message.cumulative_logprob if has_logprobs else None,
        logprobs=_read_all(message.logprobs) if has_logprobs else None,
        finish_reason=FINISH_NAMES.get(message.finish_reason),
        stop_reason=stop_reason,
    )


def _logprobs(entry: TokenLogprobs | None) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        entries=[
            pb.Logprob(
                token_id=token_id,
                logprob=score.logprob,
                rank=score.rank,
                decoded_token=score.decoded_token,
            )
            for token_id, score in (entry or {}).items()
        ]
    )


def _read_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs | None:
    return {
        entry.token_id: Logprob(
            logprob=entry.logprob,
            rank=entry.rank,
            decoded_token=entry.decoded_token if entry.HasField("decoded_token") else None,
        )
        for entry in message.entries
    } or None


def _read_all(messages: Iterable[pb.TokenLogprobs]) -> list[TokenLogprobs]:
    return [_read_logprobs(message) or {} for message in messages]


def timings_message(metrics: RequestMetrics, num_tokens: int, num_completions: int) -> pb.Timings:
    """When things happened, in seconds since the request was accepted."""
    message = pb.Timings(num_preemptions=metrics.num_preemptions)
    for name in _MOMENTS:
        moment = getattr(metrics, name)
        if moment is not None:
            setattr(message, name, moment - metrics.arrival_s)
    tpot_s = metrics.tpot_s(num_tokens // max(num_completions, 1))
    if tpot_s is not None:
        message.tpot_s = tpot_s
    return message


def read_timings(message: pb.Timings) -> RequestMetrics:
    """The same, read: the request arrived at 0."""
    metrics = RequestMetrics(arrival_s=0.0, num_preemptions=message.num_preemptions)
    for name in _MOMENTS:
        if message.HasField(name):
            setattr(metrics, name, getattr(message, name))
    return metrics
