"""How a model's hidden states become an embedding, unless a request says otherwise. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Pooling = Literal["last", "mean", "cls"]
"""Of which tokens the hidden states are taken: the last one, the mean of all, the first one."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """A model's own pooling. The defaults are those of a causal model that says nothing.

    Attributes:
        pooling: see `Pooling`.
        normalize: whether vectors have length 1.
        is_declared: whether the checkpoint says that it is made for embeddings.
        generates: whether the model has an output layer, so that it can generate, too.
        prompts: texts to put before a text, by name, such as "query".
        default_prompt: the name of the prompt that is used where none is named; None for none.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    is_declared: bool = False
    generates: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


DEFAULT_POOLING = PoolingConfig()
