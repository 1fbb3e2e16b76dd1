"""Tells checkpoints apart, without reading them whole."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

SAMPLES = 1024
"""Places of a file that are read: a fine-tuned layer changes every tensor, or a whole one."""
SAMPLE_BYTES = 512


def checkpoint_digest(source: Path) -> str:
    """A digest of a checkpoint's files: of their names, sizes and samples of what they hold.

    Copies of a checkpoint have the same, wherever they are. Weights that differ in a few numbers
    alone may have the same, too: it guards against a mistake, not against an intent.

    Args:
        source: a file or folder.

    Raises:
        OSError: it cannot be read.
    """
    found = sorted(source.rglob("*")) if source.is_dir() else [source]
    digest = blake2b(digest_size=16)
    for path in found:
        if not path.is_file():
            continue
        size = path.stat().st_size
        name = path.relative_to(source) if source.is_dir() else path.suffix
        digest.update(f"{name}\n{size}\n".encode("utf-8", "surrogateescape"))
        with path.open("rb", buffering=0) as file:
            step = max(SAMPLE_BYTES, size // SAMPLES)
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
