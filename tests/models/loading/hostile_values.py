"""Opens checkpoints that hold hostile values, in a process whose memory is limited.

A program of its own: each line of its standard input is a JSON list, a checkpoint's path and then
names of files in it. With names it writes each hostile document in place of each of these files, in
turn, and opens model and tokenizer each time; a GGUF file's metadata are changed in the same way if
a name is "metadata". Without names it opens the checkpoint as it is. Memory is limited to
`SPARE_BYTES` above what the imports took, and each opening to `LIMIT_S` seconds.

Each line of its output is a JSON object: how many were opened and refused, the last refusal's
words, and as reports whatever neither opened nor was refused with a typed error.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

from octavo.engine.errors import ModelLoadError
from octavo.engine.text.tokenizer import Tokenizer
from octavo.models.loading.gguf_file import GGUFFile
from octavo.models.loading.load import load_config, open_model
from octavo.models.parameters import declare
from octavo.sharding.mesh import make_mesh

SPARE_BYTES = 512 << 20
LIMIT_S = 60
MARK = "@hostile@"

JSON_VALUES = (
    *("null", "true", "false", '""', '"text"', '"\\u0000"', '"\\ud800"', f'"{"x" * 5000}"'),
    *("[]", "[[1]]", '[1, "a", null]', "[-1]", "[9223372036854775808]", "{}", '{"a": {}}'),
    *("-1", "0", "1", "1.5", "NaN", "Infinity", "1e400", "-1e400", "1e-400", "1e300", "1e-300"),
    *(str(2**31), str(2**32 - 1), str(2**63), str(10**7), "1" + "0" * 400, "9" * 5000),
    *("[" * 900 + "]" * 900, "[" * 100_000 + "]" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000),
)
"""Values as they stand in a file: some of them no parser returns."""


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


GGUF_VALUES = (
    *(struct.pack("<IB", 0, value) for value in (0, 255)),
    *(struct.pack("<Ii", 5, value) for value in (-1, 0, 1, 10**7)),
    *(struct.pack("<II", 4, value) for value in (2**31, 2**32 - 1)),
    *(struct.pack("<IQ", 10, value) for value in (2**40, 2**63, 2**64 - 1)),
    struct.pack("<Iq", 11, -(2**63)),
    *(struct.pack("<If", 6, value) for value in (0.0, -1.0, 1e38, float("nan"), float("inf"))),
    *(struct.pack("<Id", 12, value) for value in (1e300, 1e-300)),
    *(struct.pack("<I?", 7, value) for value in (False, True)),
    *(struct.pack("<I", 8) + _string(text) for text in (b"", b"a\0b", b"\xff\xfe", b"x" * 5000)),
    struct.pack("<I", 9) + _array(4, []),
    struct.pack("<I", 9) + _array(4, [struct.pack("<I", 1)]),
    struct.pack("<I", 9) + _array(7, [b"\1"] * 3),
    struct.pack("<I", 9) + _array(8, [_string(b""), _string(b"a"), _string(b"a")]),
    struct.pack("<I", 9) + _array(8, [_string(b"a " * 2500)] * 96),
    struct.pack("<I", 9) + _array(9, [_array(9, [_array(4, [])])]),
    struct.pack("<I", 9) + _array(9, [struct.pack("<IQ", 9, 1)] * 50),
    struct.pack("<IIQ", 9, 0, 2**33),
)
"""Values with their types, as they stand in a file."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a document may be changed: every entry of every object and list in it."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def hostile_documents(document: Any) -> Iterator[tuple[str, str]]:
    """(what was changed, the document's text) for each place and value."""
    for path in places(document):
        changed = json.loads(json.dumps(document))
        node = changed
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = MARK
        text = json.dumps(changed)
        for value in JSON_VALUES:
            yield f"{path} = {value[:30]}", text.replace(f'"{MARK}"', value)


def hostile_gguf(file: GGUFFile, data: bytes) -> Iterator[tuple[str, bytes]]:
    """(what was changed, the file's bytes) for each metadata key and value."""
    start, end = file.metadata_span
    for key in file.metadata:
        before = data.index(_string(key.encode()), start, end) + 8 + len(key)
        for value in GGUF_VALUES:
            if key == "general.architecture":
                rest = data[before:]
                old = struct.pack("<I", 8) + _string(file.metadata[key].encode())
                assert rest.startswith(old)
                after = before + len(old)
            else:
                after = _end_of_value(data, before)
            new = data[:before] + value + data[after:] + bytes(64)  # the padding may have grown
            yield f"{key} = {value[:24]!r}", new


def _end_of_value(data: bytes, position: int) -> int:
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    (kind,) = struct.unpack_from("<I", data, position)
    position += 4
    if kind in sizes:
        return position + sizes[kind]
    if kind == 8:
        return position + 8 + int(struct.unpack_from("<Q", data, position)[0])
    item, count = struct.unpack_from("<IQ", data, position)
    position += 12
    for _ in range(count):
        if item == 8:
            position += 8 + struct.unpack_from("<Q", data, position)[0]
        else:
            position += sizes[item]
    return position


def open_everything(path: Path, mesh: Any) -> None:
    """What a start does before it reads weights."""
    for read in (load_config, lambda path: open_model(path, "auto", mesh).config):
        config = read(path)
        hash(config)
        declare(config, jnp.dtype("float32"))
    tokenizer = Tokenizer.from_source(path)
    pieces = [tokenizer.token_bytes.piece(i, first=False) for i in range(tokenizer.vocab_size)]
    assert sum(map(len, pieces)) < SPARE_BYTES


class Openings:
    """Counts what was opened and refused, and reports what was neither."""

    def __init__(self, mesh: Any) -> None:
        self.num_opened = self.num_refused = 0
        self.message = ""
        self.reports: list[str] = []
        self._mesh = mesh

    def open(self, what: str, path: Path) -> None:
        signal.alarm(LIMIT_S)
        try:
            open_everything(path, self._mesh)
            self.num_opened += 1
        except ModelLoadError as error:
            self.num_refused += 1
            self.message = str(error)
            if len(self.message.encode()) > 4000:
                self.reports.append(f"{what}: a message of {len(self.message)} characters")
        except BaseException as error:
            self.reports.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
        finally:
            signal.alarm(0)


def open_all(openings: Openings, path: Path, names: list[str]) -> None:
    if not names:
        openings.open("as it is", path)
    for name in names:
        if name == "metadata":
            for what, hostile in hostile_gguf(GGUFFile(path), path.read_bytes()):
                path.unlink()  # the old bytes stay mapped
                path.write_bytes(hostile)
                openings.open(what, path)
            continue
        good = (path / name).read_text(encoding="utf-8")
        for what, text in hostile_documents(json.loads(good)):
            (path / name).write_text(text, encoding="utf-8")
            openings.open(f"{name}: {what}", path)
        (path / name).write_text(good, encoding="utf-8")


def on_alarm(*_: Any) -> None:
    raise TimeoutError(f"more than {LIMIT_S} s")


def main() -> None:
    mesh = make_mesh(1)
    data = int(re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (data + SPARE_BYTES,) * 2)
    signal.signal(signal.SIGALRM, on_alarm)
    for line in sys.stdin:
        path, *names = json.loads(line)
        openings = Openings(mesh)
        open_all(openings, Path(path), names)
        told = {
            "opened": openings.num_opened,
            "refused": openings.num_refused,
            "message": openings.message,
            "reports": openings.reports,
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
