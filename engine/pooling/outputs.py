"""What a pooled request gives back: names as vLLM knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.errors import StepFailedError
from octavo.engine.output.outputs import RequestMetrics, RequestOutput
from octavo.engine.pooling.scoring import Scoring


def vector_of(output: RequestOutput) -> NDArray[np.float32]:
    """The vector that a pooled request ended with.

    Raises:
        OctavoError: it did not end well: its own error, or one that says how it ended.
    """
    if output.error is not None:
        raise output.error
    if output.pooled is None:
        reason = output.outputs[0].finish_reason
        raise StepFailedError(f"request {output.request_id} ended without a vector: {reason}")
    return output.pooled


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """The vector of one text.

    Attributes:
        data: float32[dimensions].
    """

    data: NDArray[np.float32]

    @property
    def embedding(self) -> list[float]:
        """The same as a list of numbers."""
        numbers: list[float] = self.data.tolist()
        return numbers


@dataclass(frozen=True, slots=True, eq=False)
class ScoringOutput:
    """How well two texts go together.

    Attributes:
        score: a reranker's odds that the second answers the first, from 0 to 1; of other models,
            the cosine of the angle between their embeddings, from -1 to 1.
    """

    score: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingRequestOutput:
    """An embedded text.

    Attributes:
        request_id: the client's own id, or the engine's where the client gave none.
        outputs: its vector.
        prompt: the text, if it was given as text.
        prompt_token_ids: its token ids.
        num_cached_tokens: tokens that the prefix cache held.
        metrics: when things happened.
        finished: always true: there is one output.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """From the engine's own output of a pooled request. Raises as `vector_of`."""
        return cls(
            request_id=output.request_id,
            outputs=EmbeddingOutput(vector_of(output)),
            prompt=output.prompt,
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
            metrics=output.metrics,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoringRequestOutput:
    """A scored pair of texts.

    Attributes:
        request_id: of the request that ended the pair.
        outputs: their score.
        prompt_token_ids: token ids that were computed for it.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]


def scored(
    scoring: Scoring, outputs: Sequence[EmbeddingRequestOutput]
) -> list[ScoringRequestOutput]:
    """The scores of all pairs, from the outputs of the requests that they took."""
    vectors = [output.outputs.data for output in outputs]
    return [
        ScoringRequestOutput(
            request_id=outputs[places[-1]].request_id,
            outputs=ScoringOutput(scoring.score(index, vectors)),
            prompt_token_ids=[id for place in places for id in outputs[place].prompt_token_ids],
        )
        for index, places in enumerate(scoring.pairs)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """The classes of one text.

    Attributes:
        probs: the probability of each class, in the order of the model's head.
        labels: the classes' names.
    """

    probs: list[float]
    labels: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.labels[self.probs.index(max(self.probs))]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassificationRequestOutput:
    """A classified text.

    Attributes:
        request_id: the client's own id, or the engine's where the client gave none.
        outputs: its classes.
        prompt_token_ids: its token ids.
    """

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]

    @classmethod
    def of(
        cls, output: EmbeddingRequestOutput, labels: tuple[str, ...]
    ) -> ClassificationRequestOutput:
        """From a request whose vector holds probabilities."""
        return cls(
            request_id=output.request_id,
            outputs=ClassificationOutput(output.outputs.data.tolist(), labels),
            prompt_token_ids=output.prompt_token_ids,
        )
