"""What requests take that do not say otherwise: the sampling parameters that come with a model."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError, InvalidRequestError
from octavo.engine.sampling_params import SamplingParams
from octavo.models.loading.json_file import read_json
from octavo.models.loading.locate import locate

FILE = "generation_config.json"
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What the file calls a parameter -> what `SamplingParams` calls it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's own sampling parameters.

    Attributes:
        values: name and value of those that it has; the others are those of `SamplingParams`.
    """

    values: tuple[tuple[str, float], ...] = ()

    def params(self, **said: Any) -> SamplingParams:
        """Parameters of a request that says so much.

        Raises:
            InvalidRequestError: a value is out of its range.
        """
        return SamplingParams(**(dict(self.values) | said))

    def of(self, given: object, allowed: str = "a SamplingParams, or None") -> SamplingParams:
        """Parameters that a caller of the Python API handed in; None takes the defaults.

        Args:
            allowed: what the caller may hand in, for the error.

        Raises:
            InvalidRequestError: anything else, such as a dict of them.
        """
        if given is None:
            return self.params()
        if not isinstance(given, SamplingParams):
            raise InvalidRequestError("sampling_params", given, allowed)
        return given

    @property
    def max_tokens(self) -> int | None:
        """Most tokens to generate, if the model has an opinion on it."""
        return next((int(value) for name, value in self.values if name == "max_tokens"), None)


NO_DEFAULTS = SamplingDefaults()


def sampling_defaults(config: EngineConfig) -> SamplingDefaults:
    """What `generation_config` and `override_generation_config` say; imports no JAX.

    A value of a file that no request may have is left out, with a warning.

    Raises:
        InvalidConfigError: there is no file where it was said to be, or an override cannot be.
        ModelLoadError: the file is none.
    """
    path = _file(config)
    values = {} if path is None else read_json(path)
    taken: dict[str, float] = {}
    for field, name in _FIELDS.items():
        if values.get(field) is None:
            continue
        try:
            taken[name] = getattr(SamplingParams(**{name: values[field]}), name)
        except InvalidRequestError as error:
            _warn(f"{path}: {field}: {error}: it is no default of requests")
    for field, value in _overrides(config.override_generation_config).items():
        try:
            if value is None:
                taken.pop(_FIELDS[field], None)
            else:
                taken[_FIELDS[field]] = getattr(
                    SamplingParams(**{_FIELDS[field]: value}), _FIELDS[field]
                )
        except InvalidRequestError as error:
            where = f"override_generation_config: {field}"
            raise InvalidConfigError(where, value, error.allowed) from None
    return SamplingDefaults(tuple(taken.items()))


def _file(config: EngineConfig) -> Path | None:
    if config.generation_config == "vllm":
        return None
    if config.generation_config == "auto":
        path, kind = locate(config.model)
        # A GGUF file stands for itself, whatever lies beside it.
        own = path / FILE
        return own if kind != "gguf" and own.is_file() else None
    named = Path(config.generation_config).expanduser() / FILE
    if not named.is_file():
        allowed = f"auto, vllm, or a folder with {FILE}"
        raise InvalidConfigError("generation_config", config.generation_config, allowed)
    return named


def _overrides(text: str) -> Mapping[str, Any]:
    name, allowed = "override_generation_config", f"a JSON object with {', '.join(_FIELDS)}"
    if not text:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidConfigError(name, text, allowed) from None
    if not isinstance(values, dict) or not values.keys() <= _FIELDS.keys():
        raise InvalidConfigError(name, values, allowed)
    return values


@functools.cache  # once, however often a configuration is looked at
def _warn(text: str) -> None:
    _log.warning("%s", text)
