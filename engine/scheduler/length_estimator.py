"""How long an answer will be: what requests of its class did before, given how far it has come."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Request

_BINS_PER_DOUBLING = 4
_HALF_LIFE = 2000.0
_FADE = 0.5 ** (1.0 / _HALF_LIFE)
_REFRESH_EVERY = 16
_PRIOR_LENGTH = 128
_PRIOR_WEIGHT = 2.0


class LengthEstimator:
    """Running quantiles of output length by class, conditioned on the tokens already emitted.

    Lengths are counted in bins that grow by 19%; old ones fade. The class of a request is its
    `output_len_class`, or else its priority and tenant. True lengths enter only by `observe`, when
    a request has ended by itself.

    Args:
        max_len: longest output, in tokens.
        quantiles: which quantiles of the remaining length are kept, ascending.
    """

    def __init__(self, max_len: int, quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)) -> None:
        num_bins = int(_BINS_PER_DOUBLING * np.log2(max(max_len, 2))) + 2
        uppers = 2.0 ** (np.arange(num_bins) / _BINS_PER_DOUBLING)
        self._bins = _Bins(uppers * 2.0 ** (-0.5 / _BINS_PER_DOUBLING))
        self._quantiles = quantiles
        self._classes: dict[str, _LengthClass] = {}

    def length_class(self, request: Request) -> str:
        """The class whose lengths speak for the request."""
        return request.output_len_class or f"{int(request.priority)}/{request.tenant}"

    def observe(self, request: Request) -> None:
        """Learns from a request that ended of its own accord."""
        self._class(request).observe(len(request.output_token_ids))

    def expected(self, request: Request) -> float:
        """Mean tokens still to come, ≥ 1, of a request that has emitted what it has."""
        num_emitted = len(request.output_token_ids)
        most = max(1, request.max_tokens - num_emitted)
        return min(self._class(request).expected(num_emitted), most)

    def expected_each(self, requests: Iterable[Request]) -> list[float]:
        """As `expected`, for several that are often of one class."""
        found: list[float] = []
        name = tenant = priority = length_class = None
        for request in requests:
            if (
                length_class is None
                or request.priority is not priority
                or request.tenant != tenant
                or request.output_len_class != name
            ):
                length_class = self._class(request)
                name, tenant = request.output_len_class, request.tenant
                priority = request.priority
            num_emitted = len(request.output_token_ids)
            most = max(1, request.max_tokens - num_emitted)
            found.append(min(length_class.expected(num_emitted), most))
        return found

    def quantile(self, request: Request, index: int) -> float:
        """The `index`-th of the kept quantiles of the tokens still to come, ≥ 1."""
        num_emitted = len(request.output_token_ids)
        most = max(1, request.max_tokens - num_emitted)
        return min(self._class(request).quantile(num_emitted, index), most)

    def _class(self, request: Request) -> _LengthClass:
        name = self.length_class(request)
        found = self._classes.get(name)
        if found is None:
            found = self._classes[name] = _LengthClass(self._bins, self._quantiles)
        return found


class _Bins:
    """The lengths that stand for the bins, as classes ask for them again and again.

    Args:
        lengths: float64[bins], ascending.
    """

    def __init__(self, lengths: NDArray[np.float64]) -> None:
        self._lengths = lengths
        self._remaining: list[NDArray[np.float64] | None] = [None] * len(lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def before(self, start: int) -> float:
        """The length that one who comes to a bin has emitted."""
        return self._lengths.item(start - 1) if start else 0.0

    def remaining(self, start: int) -> NDArray[np.float64]:
        """float64[bins - start], what is still to come if it ends in that bin or one after it."""
        found = self._remaining[start]
        if found is None:
            found = np.maximum(self._lengths[start:] - self.before(start), 1.0)
            self._remaining[start] = found
        return found


class _LengthClass:
    """One class's histogram, and tables made from it now and then."""

    def __init__(self, bins: _Bins, quantiles: tuple[float, ...]) -> None:
        self._bins = bins
        self._quantiles = quantiles
        self._levels = np.array(quantiles)
        self._counts = np.zeros(len(bins))
        self._counts[_bin(_PRIOR_LENGTH, len(bins))] = _PRIOR_WEIGHT
        self._num_new = 0
        self._is_young = True
        self._refresh()

    # Means and quantiles are worked out when asked for, from the counts of the newest refresh, by
    # the bin of the emitted length.

    def observe(self, length: int) -> None:
        self._counts *= _FADE
        self._counts[_bin(length, len(self._counts))] += 1.0
        self._num_new += 1
        if self._is_young:  # who has reached this weight never falls below it again
            self._is_young = bool(self._counts.sum() < 4 * _REFRESH_EVERY)
        if self._is_young or self._num_new >= _REFRESH_EVERY:
            self._refresh()

    def expected(self, num_emitted: int) -> float:
        start = _bin(num_emitted + 1, len(self._means))
        found = self._means[start]
        if found is None:
            found = self._means[start] = self._mean(start)
        return found

    def quantile(self, num_emitted: int, index: int) -> float:
        start = _bin(num_emitted + 1, len(self._at_levels))
        found = self._at_levels[start]
        if found is None:
            found = self._at_levels[start] = self._at_each_level(start)
        return found[index]

    def _refresh(self) -> None:
        """Takes in the lengths seen since the last time."""
        self._num_new = 0
        self._newest = self._counts.copy()
        self._means: list[float | None] = [None] * len(self._counts)
        self._at_levels: list[tuple[float, ...] | None] = [None] * len(self._counts)

    # Longer than nearly all before it: as long again as it has come, says the heavy tail of output
    # lengths.

    def _mean(self, start: int) -> float:
        counts = self._newest[start:]
        total = float(counts.sum())
        if total < 0.5:
            return max(1.0, self._bins.before(start))
        return float(counts.dot(self._bins.remaining(start)) / total)

    def _at_each_level(self, start: int) -> tuple[float, ...]:
        counts = self._newest[start:]
        total = float(counts.sum())
        if total < 0.5:
            emitted = self._bins.before(start)
            return tuple([max(1.0, emitted * q) for q in self._quantiles])
        remaining = self._bins.remaining(start)
        places = (np.cumsum(counts) / total).searchsorted(self._levels)
        return tuple(remaining[np.minimum(places, len(remaining) - 1)].tolist())


def _bin_of(length: int) -> int:
    return math.ceil(math.log2(length) * _BINS_PER_DOUBLING - 1e-9) if length > 1 else 0


_SHORT_BINS = [_bin_of(length) for length in range(2048)]


def _bin(length: int, num_bins: int) -> int:
    """The bin of a length ≥ 0: the first whose upper bound is not below it."""
    found = _SHORT_BINS[length] if length < len(_SHORT_BINS) else _bin_of(length)
    return min(num_bins - 1, found)
