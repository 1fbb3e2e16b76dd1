"""`octavo convert`: any checkpoint to one that opens faster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.engine.errors import InvalidConfigError


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
    parser.add_argument("target", metavar="DST", help="a new or empty directory")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="of the weights; auto is float32 on CPUs, the checkpoint's own elsewhere",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Converts; 0."""
    target = Path(args.target).expanduser()
    # Asked before the model is read, which takes a while.
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidConfigError("DST", str(target), "a new or empty directory")
    from octavo.models.loading.load import load_model, save_model

    model = load_model(args.source, args.dtype)
    save_model(model, target)
    if model.kind == "gguf":  # whose tokenizer is read as it is, and by nothing else
        from octavo.engine.text.tokenizer import Tokenizer

        Tokenizer.from_source(model.tokenizer_source).save(target)
    print(f"wrote {target}")
    return 0
