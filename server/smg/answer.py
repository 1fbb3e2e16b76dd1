"""The engine's outputs as smg reads them: chunks of tokens, and how each completion ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.engine.output.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from octavo.engine.sampling_params import SamplingParams
from octavo.server.proto.smg import vllm_engine_pb2 as pb

FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""The engine's word -> vLLM's; any other is "error"."""


class AnswerEncoder:
    """Turns the outputs of one request into messages.

    Args:
        params: of the request.
        stream: whether its outputs hold only what is new, each to be sent.
    """

    def __init__(self, params: SamplingParams, *, stream: bool) -> None:
        self._stream = stream
        self._num_top = params.logprobs or 0
        self._num_prompt_top = params.prompt_logprobs or 0
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def encode(self, output: RequestOutput) -> Iterator[pb.GenerateResponse]:
        """The messages of the request's next output."""
        for completion in output.outputs:
            if completion.index in self._ended:
                continue
            if self._stream and completion.token_ids:
                yield pb.GenerateResponse(chunk=self._chunk(output, completion))
                self._begun.add(completion.index)
            if completion.finish_reason is not None:
                yield pb.GenerateResponse(complete=self._complete(output, completion))
                self._ended.add(completion.index)

    def _chunk(self, output: RequestOutput, completion: CompletionOutput) -> pb.GenerateStreamChunk:
        is_first = completion.index not in self._begun
        return pb.GenerateStreamChunk(
            token_ids=completion.token_ids,
            input_logprobs=self._of_prompt(output) if is_first else None,
            **self._common(output, completion),
        )

    def _complete(self, output: RequestOutput, completion: CompletionOutput) -> pb.GenerateComplete:
        message = pb.GenerateComplete(
            output_ids=completion.token_ids,
            finish_reason=FINISH_REASONS.get(completion.finish_reason or "", "error"),
            input_logprobs=self._of_prompt(output),
            **self._common(output, completion),
        )
        if isinstance(completion.stop_reason, str):
            message.matched_stop_str = completion.stop_reason
        elif completion.stop_reason is not None:
            message.matched_token_id = completion.stop_reason
        return message

    def _common(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "output_logprobs": self._of_tokens(completion),
            "index": completion.index,
        }

    def _of_tokens(self, completion: CompletionOutput) -> pb.OutputLogProbs | None:
        if completion.logprobs is None:
            return None
        message = pb.OutputLogProbs()
        for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            message.token_ids.append(token_id)
            message.token_logprobs.append(entry[token_id].logprob)
        message.top_logprobs.extend(_top(completion.logprobs, self._num_top))
        return message

    def _of_prompt(self, output: RequestOutput) -> pb.InputLogProbs | None:
        if output.prompt_logprobs is None:
            return None
        message = pb.InputLogProbs(token_ids=output.prompt_token_ids)
        for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            value = None if entry is None else entry[token_id].logprob
            message.token_logprobs.append(pb.InputTokenLogProb(value=value))
        message.top_logprobs.extend(_top(output.prompt_logprobs, self._num_prompt_top))
        return message


def _top(entries: Sequence[TokenLogprobs | None], most: int) -> Iterator[pb.TopLogProbs]:
    """The likeliest tokens of each position; nothing where none were asked for."""
    if not most:
        return
    for entry in entries:
        best = sorted((entry or {}).items(), key=lambda item: item[1].rank)[:most]
        yield pb.TopLogProbs(
            token_ids=[token_id for token_id, _ in best],
            values=[score.logprob for _, score in best],
        )
