"""What a policy was asked for by: its name, and parameters such as "dynamic:batch_size=4"."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler.policy import Snapshot, whole_budget


class Parameters:
    """Named values for a policy. Each is taken once; what is left in the end is an error.

    Args:
        name: the policy's name.
        values: texts by name, as the user wrote them.
    """

    def __init__(self, name: str, values: dict[str, str] | None = None) -> None:
        self.name = name
        self._values = dict(values or {})
        self._known: list[str] = []

    def number(self, key: str, default: float, *, least: float = 0.0) -> float:
        """A number ≥ `least`.

        Raises:
            InvalidConfigError: not such a number.
        """
        text = self._take(key)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            self._refuse(key, text, f"a number of at least {least:g}")
        if not value >= least:
            self._refuse(key, text, f"a number of at least {least:g}")
        return value

    def integer(self, key: str, default: int, *, least: int = 0) -> int:
        """An integer ≥ `least`.

        Raises:
            InvalidConfigError: not such a number.
        """
        text = self._take(key)
        if text is None:
            return default
        if not text.isdecimal() or int(text) < least:
            self._refuse(key, text, f"an integer of at least {least}")
        return int(text)

    def choice(self, key: str, default: str, *others: str) -> str:
        """One of the given words, `default` if there is none.

        Raises:
            InvalidConfigError: another word.
        """
        text = self._take(key)
        if text is None:
            return default
        if text not in (default, *others):
            self._refuse(key, text, " or ".join((default, *others)))
        return text

    def declared_lengths(self) -> bool:
        """Whether `lengths=declared` was asked for; `lengths=estimated` is the default."""
        return self.choice("lengths", "estimated", "declared") == "declared"

    def static_budget(self) -> Callable[[Snapshot], int]:
        """A budget function that always says `token_budget`, by default all a step can take."""
        tokens = self.integer("token_budget", 0, least=1)
        if not tokens:
            return whole_budget
        return lambda snapshot: min(tokens, snapshot.limits.max_num_batched_tokens)

    def check_all_taken(self) -> None:
        """Raises:
        InvalidConfigError: a parameter that the policy does not have.
        """
        if self._values:
            key, text = next(iter(self._values.items()))
            allowed = ", ".join(self._known) or "none"
            raise InvalidConfigError(
                f"scheduling_policy {self.name}: {key}", text, f"its parameters are {allowed}"
            )

    def _take(self, key: str) -> str | None:
        self._known.append(key)
        return self._values.pop(key, None)

    def _refuse(self, key: str, text: str, allowed: str) -> NoReturn:
        raise InvalidConfigError(f"scheduling_policy {self.name}: {key}", text, allowed)
