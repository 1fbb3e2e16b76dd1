"""From the sum of a request's hidden states to the vector that it asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.errors import InvalidRequestError
from octavo.engine.pooling.params import PoolingParams
from octavo.models.classification_head import ClassificationHead
from octavo.models.pooling_config import PoolingConfig

Prompt = str | Sequence[int]
"""As `input_processor.Prompt`."""

LEAST_LENGTH = 1e-12
"""A shorter vector is not made longer: it has no direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooler:
    """What a model's vectors are. It computes on the host, in float64, and moves between processes.

    Attributes:
        config: the model's own pooling.
        hidden_size: numbers of a hidden state.
        head: the model's classification head; None of most.
    """

    config: PoolingConfig
    hidden_size: int
    head: ClassificationHead | None = None

    def resolve(self, params: PoolingParams) -> PoolingParams:
        """The parameters with the model's own where they leave it to the model.

        Raises:
            InvalidRequestError: more dimensions than a hidden state has, or classes of a model that
                knows none.
        """
        if params.classify:
            self.head_or_refuse()
            for name, needed in (("pooling", "last"), ("normalize", False), ("dimensions", None)):
                if getattr(params, name) not in (None, needed):
                    allowed = f"{needed}, or not given, with classify"
                    raise InvalidRequestError(name, getattr(params, name), allowed)
            return PoolingParams(pooling="last", normalize=False, classify=True)
        if params.dimensions is not None and params.dimensions > self.hidden_size:
            raise InvalidRequestError(
                "dimensions", params.dimensions, f"1 to {self.hidden_size}, the model's own"
            )
        config = self.config
        return dataclasses.replace(
            params,
            pooling=params.pooling or config.pooling,
            normalize=config.normalize if params.normalize is None else params.normalize,
        )

    def head_or_refuse(self) -> ClassificationHead:
        """The classification head.

        Raises:
            InvalidRequestError: the model has none.
        """
        if self.head is None:
            raise InvalidRequestError(
                "classify", True, "false: the model has no classification head"
            )
        return self.head

    def prompted(self, text: Prompt, prompt_name: str | None) -> Prompt:
        """A text behind one of the model's prompts. Token ids are taken as they are.

        Args:
            prompt_name: which; None is the model's default, which may be none.

        Raises:
            InvalidRequestError: the model has no prompt of this name, or `text` is no text.
        """
        prompts = self.config.prompts
        name = self.config.default_prompt if prompt_name is None else prompt_name
        if name is None or (prompt_name is None and not isinstance(text, str)):
            return text
        if name not in prompts:
            known = ", ".join(map(repr, prompts)) or "None: the model has no prompts"
            raise InvalidRequestError("prompt_name", prompt_name, known)
        if not isinstance(text, str):
            raise InvalidRequestError("prompt_name", prompt_name, "None with token ids")
        return prompts[name] + text if text else text  # an empty one is refused as such

    def finish(
        self, params: PoolingParams, summed: NDArray[np.float64], num_tokens: int
    ) -> NDArray[np.float32]:
        """A request's vector.

        Args:
            params: as `resolve` returned them.
            summed: float64[hidden_size], the sum of the hidden states that it pools.
            num_tokens: of its prompt.

        Returns:
            float32[dimensions], or the classes' probabilities.
        """
        if params.classify:
            return self.head_or_refuse().probabilities(summed).astype(np.float32)
        vector = summed / num_tokens if params.pooling == "mean" else summed
        vector = vector[: params.dimensions]
        if params.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), LEAST_LENGTH)
        return vector.astype(np.float32)
