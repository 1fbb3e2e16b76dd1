"""The few numbers that make scores of a hidden state: they stay on the host. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassificationHead:
    """A linear layer behind the final norm, and the names of its outputs.

    Attributes:
        weight: float32[classes, hidden size].
        labels: a name a class.
        template: of the prompt that judges a pair of texts; None where the head is not for pairs.
    """

    weight: NDArray[np.float32]
    labels: tuple[str, ...]
    template: PairTemplate | None = None

    def probabilities(self, hidden: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of each class, given a hidden state float64[hidden size]: by softmax, and of a single
        class by the logistic function."""
        logits: NDArray[np.float64] = self.weight.astype(np.float64) @ hidden
        if len(logits) == 1:
            odds: NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * logits))
            return odds
        weights = np.exp(logits - np.max(logits))
        shares: NDArray[np.float64] = weights / weights.sum()
        return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTemplate:
    """The prompt in which a reranker judges a pair of texts.

    Attributes:
        text: with the fields {instruction}, {query} and {document}.
        instruction: what is asked for where a request does not say.
    """

    text: str
    instruction: str

    def render(self, query: str, document: str, instruction: str | None = None) -> str:
        """The prompt of one pair."""
        asked = self.instruction if instruction is None else instruction
        return self.text.format(instruction=asked, query=query, document=document)


QWEN3_RERANKER = PairTemplate(
    text=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
"""Source: the model card of Qwen/Qwen3-Reranker-0.6B."""
