"""`octavo convert`: any checkpoint to one that opens faster."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "convert",
        description="Write a sharded checkpoint that opens faster, with its tokenizer.",
    )
    parser.add_argument(
        "source", metavar="SRC",
        help="a Hugging Face directory, a GGUF file or a packaged model's name",
    )  # fmt: skip
    parser.add_argument("target", metavar="DST", help="a directory that does not exist yet")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="of the weights; auto is float32 on CPUs, the checkpoint's own elsewhere",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Converts; 0."""
    from octavo.models.loading.orbax import convert

    convert(args.source, args.target, dtype=args.dtype)
    print(f"wrote {args.target}")
    return 0
