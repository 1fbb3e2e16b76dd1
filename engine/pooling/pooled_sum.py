"""The sum of a pooled request's hidden states, chunk by chunk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.pooling.params import PoolingParams


class PooledSum(NamedTuple):
    """What committed steps have summed of one request. Immutable.

    Attributes:
        num_tokens: positions that it has come to.
        values: float64[hidden size]; None as long as nothing was pooled.
    """

    num_tokens: int = 0
    values: NDArray[np.float64] | None = None

    def plus(
        self, pooling: PoolingParams, start: int, end: int, values: NDArray[np.float32] | None
    ) -> PooledSum:
        """The sum after a chunk. A request that is computed again starts its sum again, too.

        Args:
            pooling: what the request asks for.
            start, end: positions of the chunk.
            values: what the step returned for it; None where it pools nothing of the chunk.
        """
        before = None if start == 0 else self.values
        if start and pooling.needs_every_token:
            assert start == self.num_tokens, (start, self.num_tokens)
        if values is not None:
            before = values.astype(np.float64) + (0.0 if before is None else before)
        return PooledSum(end, before)


NOTHING_POOLED = PooledSum()
