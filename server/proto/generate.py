"""Builds the committed protobuf and gRPC code from the `.proto` files, or checks it is current.

Run as ``python -m octavo.server.proto.generate [--check]``; needs grpcio-tools, which is in the
`test` extra.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.resources
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SOURCES = (
    "octavo/v1/octavo.proto",
    "octavo/v1/admin.proto",
    "kserve/v2/inference.proto",
    "smg/common.proto",
    "smg/vllm_engine.proto",
)
PACKAGE = "octavo.server.proto"
"""Where `ROOT` lies in the import namespace."""


def generate(out: Path) -> dict[str, str]:
    """Runs protoc with `out` as scratch space.

    Returns: generated file, relative to `ROOT`, -> its text.

    Raises:
        RuntimeError: protoc refused the source.
    """
    protoc = importlib.import_module("grpc_tools.protoc")
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *(str(ROOT / source) for source in SOURCES),
        ]
    )
    if code:
        raise RuntimeError(f"protoc ended with {code}")
    return {
        str(path.relative_to(out)): _rehome(path.read_text(encoding="utf-8"))
        for path in sorted(out.rglob("*.py*"))
    }


def _rehome(text: str) -> str:
    """protoc names modules by the file's path below its root; ours lie in `PACKAGE`."""
    for source in SOURCES:
        folder, _, file = source.removesuffix(".proto").rpartition("/")
        package = folder.replace("/", ".")
        for name in (f"from {package} import", f"'{package}.{file}_pb2'"):
            text = text.replace(name, name.replace(package, f"{PACKAGE}.{package}"))
    return text


def main(argv: list[str] | None = None) -> int:
    """Writes the generated files, or with `--check` compares them; 1 if they are stale."""
    parser = argparse.ArgumentParser(prog="python -m octavo.server.proto.generate")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if stale")
    check = parser.parse_args(argv).check
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder))
    stale = [
        name
        for name, text in fresh.items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text
    ]
    if check and stale:
        print(f"stale: {', '.join(stale)}: run `make proto` with the pinned grpcio-tools")
        return 1
    for name in stale:
        (ROOT / name).write_text(fresh[name], encoding="utf-8")
    print(f"{len(fresh)} generated files, {len(stale)} {'stale' if check else 'rewritten'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
