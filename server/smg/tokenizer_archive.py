"""The served tokenizer as a zip archive of the files that smg reads."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.proto.smg import common_pb2 as pb

CHUNK_BYTES = 64 * 1024
"""Of a part of the archive."""
_DATE = (1980, 1, 1, 0, 0, 0)
"""Of every file: archives of one tokenizer are alike."""


def tokenizer_archive(tokenizer: Tokenizer) -> bytes:
    """tokenizer.json, tokenizer_config.json with the chat template, and generation_config.json with
    the tokens that end an answer, which smg leaves out of texts."""
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="octavo-tokenizer-") as name:
        folder = Path(name)
        tokenizer.save(folder)
        ends = json.dumps({"eos_token_id": list(tokenizer.eos_token_ids)})
        (folder / "generation_config.json").write_text(ends, encoding="utf-8")
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.iterdir()):
                info = zipfile.ZipInfo(path.name, _DATE)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, path.read_bytes())
    return buffer.getvalue()


def chunks_of(archive: bytes) -> Iterator[pb.GetTokenizerChunk]:
    """The messages that carry an archive; the last one has its digest."""
    digest = hashlib.sha256(archive).hexdigest()
    for start in range(0, len(archive), CHUNK_BYTES):
        is_last = start + CHUNK_BYTES >= len(archive)
        data = archive[start : start + CHUNK_BYTES]
        yield pb.GetTokenizerChunk(data=data, sha256=digest if is_last else "")
