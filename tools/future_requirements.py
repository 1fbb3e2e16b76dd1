"""Prints what Octavo needs, one requirement a line, without upper bounds: for `make future`."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

BOUND = re.compile(r"(<=?|==|~=)\s*[^,;\s\]]+")


def lifted(requirement: str) -> str:
    """A requirement with its least version alone: `jax>=0.10,<0.13` is `jax>=0.10`."""
    name, *bounds = re.split(r"(?=[<>=~!])", requirement, maxsplit=1)
    kept = [each.strip() for each in "".join(bounds).split(",") if not BOUND.match(each.strip())]
    return name.strip() + ",".join(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", help="comma-separated extras of pyproject.toml")
    args = parser.parse_args()
    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
    project = tomllib.loads(path.read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in args.extras.split(","):
        wanted += project["optional-dependencies"][extra]
    print("\n".join(dict.fromkeys(map(lifted, wanted))))


if __name__ == "__main__":
    main()
