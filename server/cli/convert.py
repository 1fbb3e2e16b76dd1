"""`octavo convert`: any checkpoint to one that opens faster, or holds less, of the same numbers."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "convert",
        description="Write a checkpoint of the same numbers, with its tokenizer. What is stored in "
        "few bits stays as it is, without what nothing reads; any other becomes an Orbax "
        "checkpoint, which opens faster.",
    )
    parser.add_argument(
        "source", metavar="SRC",
        help="a Hugging Face directory, a GGUF file or a packaged model's name",
    )  # fmt: skip
    parser.add_argument("target", metavar="DST", help="a new or empty directory")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="of the weights; auto rounds none and keeps few bits few, another one makes an Orbax "
        "checkpoint of what they stand for",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Converts; 0."""
    from octavo.models.loading.convert import convert
    from octavo.models.loading.locate import locate

    # Of what fails, Orbax logs a stack trace for each of its threads.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    target = Path(args.target).expanduser()
    written = convert(args.source, target, args.dtype)
    path, kind = locate(args.source)
    if kind == "gguf":  # whose tokenizer is read as it is, and by nothing else
        from octavo.engine.text.tokenizer import Tokenizer

        Tokenizer.from_source(path).save(target)
    how = "an Orbax checkpoint" if written == "orbax" else f"{written}, as it was stored"
    print(f"wrote {target} ({how})")
    return 0
