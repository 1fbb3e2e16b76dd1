"""What a model's name or path means. It imports no JAX, so that a wrong name is refused at once."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from octavo.engine.errors import InvalidConfigError, ModelLoadError, shorten
from octavo.models.packaged import PACKAGED_MODELS

CheckpointKind = Literal["gguf", "safetensors", "orbax"]


DUMMY = "dummy"
"""The load format of random weights, for which any kind of checkpoint may say the shapes."""


def locate(model: str | Path, load_format: str = "auto") -> tuple[Path, CheckpointKind]:
    """The path that `model` means, and what kind of checkpoint is there.

    Args:
        model: a packaged model's name, or a path.
        load_format: the kind that it must be; "auto" and "dummy" take any.

    Raises:
        ModelLoadError: nothing is there, or nothing Octavo reads.
        InvalidConfigError: it is of another kind.
    """
    path, kind = _locate(model)
    if load_format not in ("auto", DUMMY, kind):
        raise InvalidConfigError("load_format", load_format, f"auto or {kind}, which {path} is")
    return path, kind


def _locate(model: str | Path) -> tuple[Path, CheckpointKind]:
    packaged = PACKAGED_MODELS.get(str(model))
    if packaged is not None:
        return packaged.path(), "gguf"
    try:
        path = Path(model).expanduser()
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError):  # also too long, with a NUL, of no such user
        raise ModelLoadError(
            f"model = {shorten(str(model), 400)} is not a path that exists, and the packaged "
            f"models are {', '.join(PACKAGED_MODELS)}"
        ) from None
    if stat.S_ISDIR(mode):
        return _of_directory(path)
    if path.suffix == ".gguf" and stat.S_ISREG(mode):
        return path, "gguf"
    raise ModelLoadError(
        f"model = {str(model)!r} is not allowed: a .gguf file, or a directory with config.json "
        f"and safetensors{_pickle_note([path])}"
    )


def _of_directory(path: Path) -> tuple[Path, CheckpointKind]:
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise ModelLoadError(f"model = {str(path)!r} cannot be read: {error}") from error
    if (path / "octavo_config.json").is_file():
        return path, "orbax"
    if (path / "config.json").is_file():
        return path, "safetensors"
    listed = [entry.name for entry in entries if entry.suffix == ".gguf" and entry.is_file()]
    if len(listed) == 1:
        return path / listed[0], "gguf"
    hint = f"; name one of its files: {', '.join(listed[:3])}" if listed else ""
    raise ModelLoadError(
        f"model = {str(path)!r} has no config.json (Hugging Face) and no octavo_config.json "
        f"(Orbax){hint}{_pickle_note(entries)}"
    )


def _pickle_note(paths: Iterable[Path]) -> str:
    pickles = [path.name for path in paths if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    return f"; {pickles[0]} is a pickle, which could run code: never read" if pickles else ""
