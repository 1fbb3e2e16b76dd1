"""Beam search: the likeliest continuations of a prompt, over the engine's own log-probabilities.

Each round asks for the likeliest next tokens of every open beam of all prompts at once, one request
of one token a beam. The prefix cache holds what beams have in common, so that a round computes
little more than their newest tokens.

Source: vLLM's `LLM.beam_search`, whose names, scores and shapes these are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tqdm import tqdm

from octavo.engine.errors import InvalidRequestError
from octavo.engine.output.outputs import RequestOutput, TokenLogprobs
from octavo.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search. Validated on construction.

    Attributes:
        beam_width: beams that are kept, and sequences that are returned; 1 to 10.
        max_tokens: most tokens to generate, ≥ 1.
        ignore_eos: do not end beams at the model's end-of-sequence tokens.
        temperature: 0 alone: beams follow log-probabilities, and nothing is drawn.
        length_penalty: a sequence's score is its log-probability over its length, the prompt's
            tokens counted, to this power.
        include_stop_str_in_output: false alone: no stop strings are looked for.

    Raises:
        InvalidRequestError: a value is out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_LOGPROBS // 2), ("max_tokens", None)):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if not is_number or value < 1 or (most is not None and value > most):
                allowed = "an integer of at least 1" if most is None else f"1 to {most}"
                raise InvalidRequestError(name, value, allowed)
        if self.temperature != 0:
            raise InvalidRequestError("temperature", self.temperature, "0: nothing is drawn")
        if self.include_stop_str_in_output:
            allowed = "false: no stop strings are looked for"
            raise InvalidRequestError("include_stop_str_in_output", True, allowed)

    @property
    def sampling_params(self) -> SamplingParams:
        """What a round asks of each beam: twice as many tokens as beams, as some may end."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=2 * self.beam_width,
            ignore_eos=True,
            detokenize=False,
        )

    def score(self, sequence: BeamSearchSequence, eos_token_ids: Collection[int]) -> float:
        """A sequence's place among others: the higher, the better."""
        num_tokens = len(sequence.tokens) - (sequence.tokens[-1] in eos_token_ids)
        score: float = sequence.cum_logprob / max(num_tokens, 1) ** self.length_penalty
        return score


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    """A beam.

    Attributes:
        tokens: the prompt's tokens and the generated ones; an end-of-sequence token is the last.
        logprobs: for each generated token, the log-probabilities that it was chosen from.
        cum_logprob: the sum of the generated tokens' own.
        text: of all its tokens, special ones included; None until the search has ended.
        finish_reason: "stop" if it ended by itself, else "length".
        stop_reason: the token that ended it; None if none did.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    def followed_by(self, token_id: int, found: TokenLogprobs) -> BeamSearchSequence:
        """The beam with one token more."""
        return BeamSearchSequence(
            tokens=[*self.tokens, token_id],
            logprobs=[*self.logprobs, found],
            cum_logprob=self.cum_logprob + found[token_id].logprob,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What a search of one prompt found.

    Attributes:
        sequences: `beam_width` of them at most, the best one first.
    """

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search of one prompt.

    Args:
        params: of the search.
        prompt_token_ids: the prompt.
        eos_token_ids: tokens that end a beam.

    Attributes:
        open: beams that go on.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        prompt_token_ids: list[int],
        eos_token_ids: Collection[int],
    ) -> None:
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._ending = frozenset(() if params.ignore_eos else eos_token_ids)
        self._ended: list[BeamSearchSequence] = []
        self.open = [BeamSearchSequence(tokens=list(prompt_token_ids))]

    def extend(self, outputs: list[RequestOutput]) -> None:
        """Takes in a round: each open beam's likeliest next tokens, in the beams' order."""
        longer: list[BeamSearchSequence] = []
        for beam, output in zip(self.open, outputs, strict=True):
            [found] = output.outputs[0].logprobs or [{}]
            likeliest = sorted(found.items(), key=lambda item: item[1].rank)
            for token_id, _ in likeliest[: 2 * self._params.beam_width]:
                new = beam.followed_by(token_id, found)
                if token_id in self._ending:
                    new.finish_reason, new.stop_reason = "stop", token_id
                    self._ended.append(new)
                else:
                    longer.append(new)
        self.open = self._best(longer)

    def result(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        """The best sequences, those that are still open among them."""
        for beam in self.open:
            beam.finish_reason = "length"
        best = self._best([*self._ended, *self.open])
        for beam in best:
            beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=False)
        return BeamSearchOutput(best)

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        def score(beam: BeamSearchSequence) -> float:
            return self._params.score(beam, self._eos_token_ids)

        return heapq.nlargest(self._params.beam_width, beams, key=score)


Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
"""Generates for several prompts at once, as `LLM.generate`."""


def search_all(
    searches: Sequence[BeamSearch], params: BeamSearchParams, generate: Generate, bar: tqdm[None]
) -> None:
    """Runs searches side by side to their ends.

    Args:
        bar: goes on by a round.

    Raises: what ended a beam's request.
    """
    for _ in range(params.max_tokens):
        prompts = [beam.tokens for search in searches for beam in search.open]
        if not prompts:
            return
        outputs = generate(prompts, params.sampling_params)
        for output in outputs:
            if output.error is not None:
                raise output.error
        in_order = iter(outputs)
        for search in searches:
            search.extend(list(islice(in_order, len(search.open))))
        bar.update()
