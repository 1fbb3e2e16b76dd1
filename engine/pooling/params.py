"""How one request wants its hidden states pooled: names and ranges as users know them."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.errors import InvalidRequestError
from octavo.models.pooling_config import POOLINGS, Pooling

_ALIASES = {"first": "cls", "lasttoken": "last"}
"""Other names of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What a pooled request wants. Validated on construction; immutable.

    Attributes:
        pooling: "last", "mean" or "cls" (also "first"), in capitals too; None is the model's own.
        normalize: scale the vector to length 1; None is the model's own.
        dimensions: numbers of the vector that are kept, its first ones, before it is normalized;
            None keeps all.
        classify: the probabilities of the classes that the model's head knows, in place of the
            vector. Such a head reads the last token, and all of its numbers.

    Raises:
        InvalidRequestError: a value is out of its range; names field, value and range.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    classify: bool = False

    def __post_init__(self) -> None:
        name: object = self.pooling
        if isinstance(name, str):
            name = _ALIASES.get(name.lower(), name.lower())
        if name is not None and name not in POOLINGS:
            raise InvalidRequestError("pooling", self.pooling, f"{', '.join(POOLINGS)}, or None")
        object.__setattr__(self, "pooling", name)
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise InvalidRequestError("normalize", self.normalize, "true, false, or None")
        most = self.dimensions
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise InvalidRequestError("dimensions", most, "an integer of at least 1, or None")
        if self.classify not in (True, False):
            raise InvalidRequestError("classify", self.classify, "true or false")

    @property
    def needs_every_token(self) -> bool:
        """Whether the request needs hidden states of tokens before its last, which the prefix cache
        does not hold."""
        return self.pooling != "last"


def as_pooling_params(given: object) -> PoolingParams:
    """What a caller of the Python API handed in.

    Args:
        given: parameters; None is the model's own pooling.

    Raises:
        InvalidRequestError: anything else, such as a dict of them.
    """
    if given is None:
        return PoolingParams()
    if not isinstance(given, PoolingParams):
        raise InvalidRequestError("pooling_params", given, "a PoolingParams, or None")
    return given
