"""Prompts from options, standard input, or a file with one JSON value a line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import SamplingParams

Prompt = str | list[int]
_PARAMS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {"output_kind"}


def add_prompt_args(parser: argparse.ArgumentParser) -> None:
    """Adds prompts as words of their own, --prompt, --prompts-file and --input."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("words", nargs="*", default=[], metavar="PROMPT", help="prompts")
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="the same, as an option (repeatable)"
    )
    source.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="JSON lines: a string, or an object with prompt or prompt_token_ids and any sampling "
        "parameters; - is standard input. With no option standard input is one prompt",
    )
    source.add_argument(
        "--input", metavar="FILE",
        help="a batch of any size: JSON lines as in --prompts-file, or in OpenAI's batch format; "
        "results go to --output",
    )  # fmt: skip


def read_prompts(
    args: argparse.Namespace, params: SamplingParams, stdin: TextIO | None = None
) -> list[tuple[Prompt, SamplingParams]]:
    """Every prompt with its sampling parameters.

    Raises:
        InvalidRequestError: a line is malformed, or there is no prompt at all.
        OSError: the file cannot be read.
    """
    stdin = sys.stdin if stdin is None else stdin
    if args.words or args.prompt is not None:
        return [(prompt, params) for prompt in args.words or args.prompt]
    try:
        if args.prompts_file == "-":
            return _read_lines(stdin, params)
        if args.prompts_file is not None:
            with open(args.prompts_file, encoding="utf-8") as file:
                return _read_lines(file, params)
        text = "" if stdin.isatty() else stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError("prompt", error.object[:40], "text in UTF-8") from None
    if not text:
        raise InvalidRequestError(
            "prompt", text, "a prompt, --prompts-file, or text on standard input"
        )
    return [(text.removesuffix("\n"), params)]


def _read_lines(
    lines: Iterable[str], params: SamplingParams
) -> list[tuple[Prompt, SamplingParams]]:
    found = [
        _read_line(number, line, params)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise InvalidRequestError("prompts_file", "no lines", "at least one line")
    return found


def _read_line(number: int, line: str, params: SamplingParams) -> tuple[Prompt, SamplingParams]:
    where = f"prompts_file line {number}"
    try:
        value: Any = json.loads(line)
    except ValueError:
        raise InvalidRequestError(where, line.strip(), "JSON") from None
    if isinstance(value, str):
        return value, params
    if not isinstance(value, dict):
        raise InvalidRequestError(where, value, "a string or an object")
    prompts = [value.pop(name) for name in ("prompt", "prompt_token_ids") if name in value]
    if len(prompts) != 1:
        raise InvalidRequestError(
            where, line.strip(), "exactly one of prompt (text) and prompt_token_ids"
        )
    unknown = sorted(value.keys() - _PARAMS)
    if unknown:
        raise InvalidRequestError(
            where, unknown[0], "prompt, prompt_token_ids or a sampling parameter"
        )
    return _check_prompt(where, prompts[0]), params.replace(**value)


def _check_prompt(where: str, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt):
        return prompt
    raise InvalidRequestError(where, prompt, "a string, or a list of token ids")
