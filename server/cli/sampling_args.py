"""Sampling parameters as options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from octavo.engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from octavo.engine.sampling_params import SamplingParams

_NUMBERS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate"),
    "min_tokens": (int, "no stop before this many tokens"),
    "temperature": (float, "0 is greedy, at most 2"),
    "top_p": (float, "sample from the smallest set of tokens with this probability, (0, 1]"),
    "top_k": (int, "sample from this many tokens; 0 is off"),
    "min_p": (float, "drop tokens below this share of the top probability, [0, 1]"),
    "presence_penalty": (float, "[-2, 2]"),
    "frequency_penalty": (float, "[-2, 2]"),
    "repetition_penalty": (float, "above 0; 1 is off"),
    "seed": (int, "tokens depend only on it and their position"),
    "n": (int, "completions of each prompt"),
    "logprobs": (int, "top log-probabilities with each token"),
}
_REPEATED: dict[str, tuple[type, str]] = {
    "stop": (str, "end the text at this string (repeatable)"),
    "stop_token_ids": (int, "end the text at this token id (repeatable)"),
    "bad_words": (str, "never generate this string (repeatable)"),
}
_FLAGS = {
    "ignore_eos": "do not stop at the model's end of sequence",
    "include_stop_str_in_output": "keep the stop string in the text",
}
_SINGULAR = {"stop_token_ids": "stop-token-id", "bad_words": "bad-word"}


def add_sampling_args(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Adds the options.

    Args:
        defaults: values of this command where they are not those of SamplingParams.
    """
    group = parser.add_argument_group("sampling parameters")
    for name, (kind, text) in _NUMBERS.items():
        default = defaults.get(name, getattr(SamplingParams(), name))
        note = "" if default is None else f" (default: {default})"
        group.add_argument(
            _option(name), dest=name, type=kind, metavar=kind.__name__.upper(), help=text + note,
        )  # fmt: skip
    parser.set_defaults(sampling_defaults=defaults)
    for name, (kind, text) in _REPEATED.items():
        group.add_argument(
            _option(name), dest=name, type=kind, metavar=kind.__name__.upper(), help=text,
            action="append", default=[],
        )  # fmt: skip
    for name, text in _FLAGS.items():
        group.add_argument(_option(name), dest=name, action="store_true", help=text)


def sampling_params(
    args: argparse.Namespace, own: SamplingDefaults = NO_DEFAULTS
) -> SamplingParams:
    """What the options say.

    Args:
        own: of the model, which go before the command's.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    given = {name: getattr(args, name) for name in (*_NUMBERS, *_REPEATED, *_FLAGS)}
    said = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**(args.sampling_defaults | dict(own.values) | said))


def _option(name: str) -> str:
    return "--" + _SINGULAR.get(name, name).replace("_", "-")
