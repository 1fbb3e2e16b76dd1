"""Checks the Kubernetes manifests against the schemas of their kinds.

    python tools/check_manifests.py [--crds FOLDER] [FILE ...]

Kubernetes' own kinds are checked with `kubernetes-validate`, which brings their schemas. Other
kinds are checked with the CustomResourceDefinitions that lie in FOLDER, at any depth: clone
LeaderWorkerSet, the Gateway API, its inference extension and KServe there. Fields that a schema
does not have are errors. A kind without a schema is named, and is no error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import yaml

MANIFESTS = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"
KUBERNETES = "1.37"
"""Whose schemas are taken of Kubernetes' own kinds."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast where it is there; schemas of KServe have 100,000 lines."""
_OWN_GROUPS = ("apps", "policy", "batch", "autoscaling", "")
_LEFT_OPEN = "x-kubernetes-preserve-unknown-fields"
_FIELD_MAPS = ("properties", "patternProperties")


class Verdict(NamedTuple):
    """What was found of one object.

    Attributes:
        what: its file, kind and name.
        errors: what is wrong with it.
        is_known: whether there was a schema.
    """

    what: str
    errors: list[str]
    is_known: bool


def check(paths: Iterable[Path], schemas: Mapping[tuple[str, str], Any]) -> Iterator[Verdict]:
    """Checks every object of some files.

    Args:
        paths: of manifests.
        schemas: of other people's kinds, by apiVersion and kind; see `schemas_in`.
    """
    for path in paths:
        for made in yaml.load_all(path.read_text("utf-8"), _LOADER):
            what = f"{path.name}: {made['kind']} {made['metadata']['name']}"
            schema = schemas.get((made["apiVersion"], made["kind"]))
            errors = _own_errors(made) if schema is None else _errors(made, schema)
            yield Verdict(what, errors or [], errors is not None)


def schemas_in(folder: Path) -> dict[tuple[str, str], Any]:
    """Schemas of the CustomResourceDefinitions in a folder, by apiVersion and kind. They refuse
    fields that they do not have."""
    found = {}
    for path in sorted(folder.rglob("*.y*ml")):
        text = path.read_text("utf-8", errors="replace")
        if "CustomResourceDefinition" not in text:
            continue
        try:
            documents = list(yaml.load_all(text, _LOADER))
        except yaml.YAMLError:  # a template of one
            continue
        for document in documents:
            if not isinstance(document, dict) or document["kind"] != "CustomResourceDefinition":
                continue
            spec = document.get("spec", {})
            for version in spec.get("versions", ()):
                name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                if (schema := version.get("schema", {}).get("openAPIV3Schema")) is not None:
                    schema["properties"]["metadata"] = {_LEFT_OPEN: True}
                    found[name] = _closed(schema)
    return found


def _closed(schema: Any) -> Any:
    """A schema as JSON Schema reads it: what Kubernetes adds to it is written out."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _FIELD_MAPS:
            made[key] = {name: _closed(each) for name, each in value.items()}
        elif key not in ("default", "example", "enum", "format"):
            made[key] = _closed(value)
        elif key == "enum":
            made[key] = value
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if made.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    if "properties" in made and not made.get(_LEFT_OPEN):
        made.setdefault("additionalProperties", False)
    return made


def _errors(made: Any, schema: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema)
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"
        for error in validator.iter_errors(made)
    ]


def _own_errors(made: Any) -> list[str] | None:
    """Errors of an object of Kubernetes' own kinds; None of any other, and without schemas."""
    group = made["apiVersion"].rpartition("/")[0]
    try:
        import kubernetes_validate
    except ImportError:
        return None
    try:
        kubernetes_validate.validate(made, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:300]}"]
    except kubernetes_validate.SchemaNotFoundError:
        if group in _OWN_GROUPS:
            return [f"Kubernetes {KUBERNETES} has no {made['apiVersion']} {made['kind']}"]
        return None
    return []


def main(argv: list[str] | None = None) -> int:
    """Prints what was found; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crds", type=Path, help="folder of CustomResourceDefinitions")
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help="all by default")
    args = parser.parse_args(argv)
    schemas = {} if args.crds is None else schemas_in(args.crds)
    wrong = False
    for verdict in check(args.files or sorted(MANIFESTS.glob("*.yaml")), schemas):
        told = "ok" if verdict.is_known else "no schema here"
        print(f"{verdict.what}: {'; '.join(verdict.errors) or told}")
        wrong |= bool(verdict.errors)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
