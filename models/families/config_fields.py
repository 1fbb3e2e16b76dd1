"""The fields of a config.json, each checked for its type and crossed off once read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import MAX_NUMBER, MAX_SIZE, is_integer

HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "bad_words_ids",
        "cache_implementation",
        "chunk_size_feed_forward",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "embd_pdrop",
        "embedding_dropout",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "repetition_penalty",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Fields that say nothing about the mathematics of inference."""

MAX_LISTED = 4096
"""Longest list of numbers: one for each frequency of the widest head, or each layer."""
_MISSING: Any = object()


class ConfigFields:
    """A config.json being read.

    Attributes:
        where: the fields stand, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self.where = where
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        """The field as it stands; None when absent."""
        self._read.add(name)
        return self._values.get(name)

    def ignore(self, name: str) -> None:
        """Count a field as read whose value is known not to matter here."""
        self._read.add(name)

    def only(self, name: str, allowed: Any) -> None:
        """Refuse any value of a field but the one that is implemented; absent and null are it, too.

        Raises:
            UnsupportedModelError: naming the field.
        """
        value = self.raw(name)
        if value is not None and value != allowed:
            raise UnsupportedModelError(
                f"{self.where}: {name} = {shorten(value)} is not supported: {shorten(allowed)}"
            )

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers.

        Raises:
            ModelLoadError: anything else.
        """
        listed = self._value(name, _MISSING)
        if not isinstance(listed, list) or len(listed) > MAX_LISTED:
            raise self._malformed(name, listed, f"a list of at most {MAX_LISTED} numbers")
        return tuple(self._number(name, value) for value in listed)

    def integer(self, name: str, default: Any = _MISSING) -> Any:
        """An integer; `default` when absent or null.

        Raises:
            ModelLoadError: of another type, or absent with no default.
        """
        value = self._value(name, default)
        if value is default or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._malformed(name, value, "an integer")

    def size(self, name: str, default: Any = _MISSING, high: int = MAX_SIZE) -> Any:
        """An integer from 1 to `high`, which things may be built by; `default` as for `integer`.

        Raises:
            ModelLoadError: as for `integer`, or out of range.
        """
        value = self._value(name, default)
        if value is default or is_integer(value, 1, high):
            return value
        raise self._malformed(name, value, f"an integer from 1 to {high}")

    def number(self, name: str, default: Any = _MISSING, absent: Any = _MISSING) -> Any:
        """A number; `default` when absent, and `absent` (or else `default`) when null.

        Raises:
            ModelLoadError: as for `integer`.
        """
        if absent is not _MISSING and name in self._values and self._values[name] is None:
            self._read.add(name)
            return absent
        value = self._value(name, default)
        return value if value is default else self._number(name, value)

    def boolean(self, name: str, default: bool) -> bool:
        """A boolean; `default` when absent or null.

        Raises:
            ModelLoadError: of another type.
        """
        value = self._value(name, default)
        if isinstance(value, bool):
            return value
        raise self._malformed(name, value, "true or false")

    def text(self, name: str, default: Any = _MISSING) -> Any:
        """A string; `default` when absent or null.

        Raises:
            ModelLoadError: as for `integer`.
        """
        value = self._value(name, default)
        if value is default or isinstance(value, str):
            return value
        raise self._malformed(name, value, "a string")

    def token_id(self, name: str) -> int | None:
        """One token id (the first, of a list), or None."""
        return next(iter(self.token_ids(name)), None)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids, given as one, a list, or null.

        Raises:
            ModelLoadError: anything else.
        """
        value = self._value(name, None)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
            return tuple(listed)
        raise self._malformed(name, value, "a token id or a list of them")

    def refuse_unread(self) -> None:
        """Refuse any field that was not read, is not known to be harmless, and is not off.

        Raises:
            UnsupportedModelError: naming the field.
        """
        for name, value in self._values.items():
            if name in self._read or name in HARMLESS or not value:
                continue
            raise UnsupportedModelError(
                f"{self.where}: {name} = {shorten(value)} is not supported: "
                "it may change the mathematics, and nothing here implements it"
            )

    def _value(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelLoadError(f"{self.where} lacks {name}")
        return default

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            # Compared before it is converted: an integer of 400 digits is no float.
            if -MAX_NUMBER <= value <= MAX_NUMBER:
                return float(value)
            raise self._malformed(name, value, "a number that float32 holds")
        raise self._malformed(name, value, "a number")

    def _malformed(self, name: str, value: Any, allowed: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {name} = {shorten(value)} is not allowed: {allowed}")
