"""What `AsyncEngine` gives besides text: embeddings, scores and classes, each a request of its own.

All of them are `generate` with pooling parameters: its one output holds the pooled hidden states.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from octavo.engine.any_engine import AnyEngine
from octavo.engine.input.input_processor import PromptLike, text_or_ids
from octavo.engine.input.tokenization import AS_THE_MODEL_WANTS, Tokenization
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
    scored,
)
from octavo.engine.pooling.params import PoolingParams, as_pooling_params
from octavo.engine.pooling.pooler import Pooler
from octavo.engine.pooling.scoring import plan_scores
from octavo.models.pooling_config import Pooling


class AsyncPooling:
    """The pooled requests of an engine in a thread of its own: `AsyncEngine` inherits them.

    Attributes:
        engine: that serves them.
        generate: serves one request; see `AsyncEngine.generate`.
    """

    engine: AnyEngine
    generate: Callable[..., AsyncGenerator[RequestOutput, None]]

    def pooler_or_refuse(self) -> Pooler:
        """What makes vectors of hidden states; see `InputProcessor.pooler_or_refuse`."""
        return self.engine.inputs.pooler_or_refuse()

    async def encode(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> EmbeddingRequestOutput:
        """The pooled hidden states of one prompt, just as it is given.

        Args:
            pooling_params: None is the model's own pooling.
            **options: the other arguments of `generate`.

        Raises: as `generate`; also
            InvalidRequestError: the engine was started with `task="generate"`.
        """
        params = as_pooling_params(pooling_params)
        stream = self.generate(prompt, None, request_id, pooling=params, **options)
        async with contextlib.aclosing(stream) as outputs:
            return EmbeddingRequestOutput.of(await anext(outputs))

    async def embed(
        self,
        prompt: PromptLike,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        **options: Any,
    ) -> EmbeddingRequestOutput:
        """The embedding of one prompt, behind the model's own instruction if it has one.

        `pooling`, `normalize`, `dimensions` and `prompt_name` are as for `LLM.embed`.

        Args:
            prompt: text or token ids.
            **options: the other arguments of `generate`.

        Raises: as `encode`.
        """
        pooler = self.pooler_or_refuse()
        params = PoolingParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        return await self.encode(
            pooler.prompted(text_or_ids(prompt), prompt_name), params, **options
        )

    async def score(
        self,
        text_1: PromptLike,
        text_2: PromptLike,
        *,
        instruction: str | None = None,
        tokenization: Tokenization = AS_THE_MODEL_WANTS,
        **options: Any,
    ) -> ScoringRequestOutput:
        """How well two texts go together; see `LLM.score`.

        Args:
            instruction: as there.
            **options: the other arguments of `generate`.

        Raises: as `encode`.
        """
        pair = text_or_ids(text_1), text_or_ids(text_2)
        scoring = plan_scores(self.pooler_or_refuse(), pair[:1], pair[1:], instruction)
        options["tokenization"] = scoring.tokenization(tokenization)
        texts = [self.encode(text, scoring.params, **options) for text in scoring.texts]
        [score] = scored(scoring, await asyncio.gather(*texts))
        return score

    async def classify(self, prompt: PromptLike, **options: Any) -> ClassificationRequestOutput:
        """The probabilities of the classes that the model's head knows; see `LLM.classify`.

        Args:
            **options: the other arguments of `generate`.

        Raises: as `encode`; also
            InvalidRequestError: the model has no classification head.
        """
        labels = self.pooler_or_refuse().head_or_refuse().labels
        output = await self.encode(prompt, PoolingParams(classify=True), **options)
        return ClassificationRequestOutput.of(output, labels)
