"""The keys of one architecture in a GGUF file's metadata, each checked for its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import MAX_SIZE, is_integer


class Metadata:
    """A GGUF file's key-value section, read by keys without the architecture's prefix.

    Args:
        values: the section.
        architecture: `general.architecture`.
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], architecture: str, where: str) -> None:
        self.values = values
        self.architecture = architecture
        self.where = where

    def raw(self, key: str, default: Any = None) -> Any:
        """A value as it stands; `default` when absent."""
        return self.values.get(f"{self.architecture}.{key}", default)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of one type; `default` when absent.

        Raises:
            ModelLoadError: of another type.
        """
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelLoadError(
                f"{self.where}: {name} = {shorten(value)} is not allowed: one {kind.__name__}"
            )
        return value

    def decimal(self, key: str, default: float | None = None) -> float | None:
        """A float32, read as the short decimal that it was written from: 1e-5, not
        9.99999974738e-06; `default` when absent.

        Raises:
            ModelLoadError: of another type.
        """
        value = self.get(key, float)
        return default if value is None else float(f"{value:.7g}")

    def need(self, key: str, kind: type) -> Any:
        """A value of one type.

        Raises:
            ModelLoadError: of another type, or absent.
        """
        value = self.get(key, kind)
        if value is None:
            raise ModelLoadError(f"{self.where} lacks the key {self.architecture}.{key}")
        return value

    def size(self, key: str, default: int | None = None, high: int = MAX_SIZE) -> int:
        """An integer from 1 to `high`, which things may be built by.

        Raises:
            ModelLoadError: anything else, or absent without a default.
        """
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if value is None:
            raise ModelLoadError(f"{self.where} lacks the key {name}")
        if not is_integer(value, 1, high):
            raise ModelLoadError(
                f"{self.where}: {name} = {shorten(value)} is not allowed: "
                f"an integer from 1 to {high}"
            )
        return int(value)

    def layer_types(self, num_layers: int, every: int | None) -> dict[str, Any]:
        """Which layers slide, as fields of a config.json: flags layer by layer, or how often one is
        global; `every` where the key is absent.

        Raises:
            ModelLoadError: anything else.
        """
        key = "attention.sliding_window_pattern"
        pattern = self.raw(key, every)
        if isinstance(pattern, list) and len(pattern) == num_layers:
            names = ("full_attention", "sliding_attention")
            return {"layer_types": [names[bool(slides)] for slides in pattern]}
        if pattern is not None and not is_integer(pattern, 1, MAX_SIZE):
            raise ModelLoadError(
                f"{self.where}: {self.architecture}.{key} = {shorten(pattern)} is not allowed: an "
                f"integer of at least 1, or {num_layers} flags"
            )
        return {"sliding_window_pattern": pattern}

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Refuse any key of the architecture that is not known and not off.

        Raises:
            UnsupportedModelError: naming the key.
        """
        prefix = self.architecture + "."
        for name, value in self.values.items():
            if name.startswith(prefix) and name[len(prefix) :] not in known and value:
                raise UnsupportedModelError(
                    f"{self.where}: the key {name} = {shorten(value)} is not supported"
                )
