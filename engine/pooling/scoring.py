"""Scores of pairs of texts: which requests they take, and what is made of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import Prompt
from octavo.engine.input.tokenization import Tokenization
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.pooling.pooler import Pooler
from octavo.models.classification_head import PairTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Pairs of texts that are to be scored.

    Attributes:
        texts: prompts of the pooled requests that this takes.
        params: of all of them.
        pairs: for each pair, which of `texts` its score is made of: two, whose vectors are
            compared, or one that asks the model.
        names: for each of `texts` the field that holds it, for errors.
        is_judged: whether the model is asked.
    """

    texts: list[Prompt]
    names: list[str]
    params: PoolingParams
    pairs: list[tuple[int, ...]]
    is_judged: bool

    def score(self, pair: int, vectors: Sequence[NDArray[np.float32]]) -> float:
        """A pair's score: from -1 to 1 if vectors are compared, from 0 to 1 if it is judged.

        Args:
            pair: its index.
            vectors: that the requests for `texts` came to.
        """
        one, *other = [vectors[place] for place in self.pairs[pair]]
        return float(one @ other[0]) if other else float(one[0])

    def tokenization(self, asked: Tokenization) -> Tokenization:
        """How the prompts become tokens: a judged pair's stands as the model was trained on it."""
        if not self.is_judged:
            return asked
        if asked.truncate_prompt_tokens is not None:
            allowed = "not given: a cut prompt would ask another question"
            raise InvalidRequestError(
                "truncate_prompt_tokens", asked.truncate_prompt_tokens, allowed
            )
        return Tokenization(add_special_tokens=False)


def plan_scores(
    pooler: Pooler,
    first: Sequence[Prompt],
    second: Sequence[Prompt],
    instruction: str | None = None,
    *,
    names: tuple[str, str] = ("text_1", "text_2"),
) -> Scoring:
    """How pairs of texts are scored by a model.

    Args:
        first: one text for all of `second`, or one for each.
        second: the other texts.
        instruction: what a reranker is asked; None is its own.
        names: of the fields that hold the texts, for errors.

    Raises:
        InvalidRequestError: the two do not go together, an instruction for a model that takes none,
            or token ids for a model that is asked in words.
    """
    if len(first) not in (1, len(second)):
        allowed = f"one, or as many as {names[1]} ({len(second)})"
        raise InvalidRequestError(names[0], f"{len(first)} texts", allowed)
    template = None if pooler.head is None else pooler.head.template
    if template is not None:
        asked = [
            _judged(template, first[index % len(first)], text, instruction, names)
            for index, text in enumerate(second)
        ]
        pairs: list[tuple[int, ...]] = [(index,) for index in range(len(asked))]
        params = PoolingParams(classify=True)
        places = [names[1]] * len(asked)
        return Scoring(texts=[*asked], names=places, params=params, pairs=pairs, is_judged=True)
    if instruction is not None:
        raise InvalidRequestError("instruction", instruction, "not given: the model takes none")
    pairs = [(index % len(first), len(first) + index) for index in range(len(second))]
    return Scoring(
        texts=[*first, *second],
        names=[names[0]] * len(first) + [names[1]] * len(second),
        params=PoolingParams(normalize=True),
        pairs=pairs,
        is_judged=False,
    )


def _judged(
    template: PairTemplate,
    one: Prompt,
    other: Prompt,
    instruction: str | None,
    names: tuple[str, str],
) -> str:
    for name, text in zip(names, (one, other), strict=True):
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(name, text, "text that is not empty")
    return template.render(str(one), str(other), instruction)
