"""docs/grpc.md, written from the `.proto` files and their comments.

Run `python -m octavo.server.proto.reference > docs/grpc.md` after changing one; needs grpcio-tools,
which is in the `test` extra.
"""

from __future__ import annotations

import importlib
import importlib.resources
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from octavo.server.proto.generate import ROOT, SOURCES

DOCUMENTED = tuple(source for source in SOURCES if not source.startswith("smg/"))
"""smg's own repository tells what its messages are."""

_HEAD = """# The gRPC interface

`octavo serve` listens on one port for all of these, with `grpc.health.v1` and server reflection.
How to run it is told in [operating.md](operating.md).

```python
from octavo.client import OctavoClient, RetryPolicy, SamplingParams

with OctavoClient("127.0.0.1:50051", timeout_s=60, retry=RetryPolicy(max_attempts=4)) as client:
    params = SamplingParams(max_tokens=8, temperature=0)
    print(client.generate("The capital of France is", params, priority="high").outputs[0].text)
    for output in client.stream("The capital of France is", params, ttft_target_ms=300):
        print(output.outputs[0].text, end="", flush=True)
```

`client.chat(messages, tools=…)` answers a conversation with words and calls
([tools.md](tools.md#over-grpc)). `client.embed("some text", pooling="mean")` gives the vector of a
text, where the server
[embeds](embeddings.md). `AsyncOctavoClient` is the same for asyncio. Both take and give the
engine's own types and raise its own errors. `timeout_s` is the deadline of the whole call, which
the server schedules against. Closing a stream, or cancelling the task that reads it, ends its
request at the next step. A call that a full server refused is made again after the time that the
server gave (`RetryInfo`), one that found no server after doubling pauses; a stream that has begun
is not. A target that no idle server could meet ends the call with FAILED_PRECONDITION
(`UnattainableTargetError`), which names the least that could be and has no time to come back at.
`token=` is shown with every call, `credentials=` is for TLS.

This page is generated: `python -m octavo.server.proto.reference > docs/grpc.md`.
"""

_SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}
_MESSAGE, _ENUM = (
    descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
    descriptor_pb2.FieldDescriptorProto.TYPE_ENUM,
)
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 4, 5, 6
_INNER_FIELD, _INNER_MESSAGE, _INNER_VALUE, _INNER_METHOD = 2, 3, 2, 2
_SYNTAX = (12,)

Path_ = tuple[int, ...]


def render() -> str:
    """The page.

    Raises:
        RuntimeError: protoc refused a source.
    """
    lines, package = [_HEAD], ""
    for file in sorted(_read(), key=lambda file: file.package != "octavo.v1"):
        if file.package != package:
            package = file.package
            lines += [f"## {package}", ""]
        lines += _File(file).render()
    return "\n".join(lines).rstrip() + "\n"


def _read() -> list[descriptor_pb2.FileDescriptorProto]:
    protoc = importlib.import_module("grpc_tools.protoc")
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        code = protoc.main(
            [
                *("protoc", f"-I{ROOT}", f"-I{well_known}", "--include_source_info"),
                *(f"--descriptor_set_out={out}", *(str(ROOT / source) for source in DOCUMENTED)),
            ]
        )
        if code:
            raise RuntimeError(f"protoc ended with {code}")
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return list(files)


class _File:
    """Renders one file."""

    def __init__(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(place.path): " ".join(
                [place.leading_comments.strip(), place.trailing_comments.strip()]
            ).strip()
            for place in file.source_code_info.location
        }
        self._comments[()] = self._comments.get(_SYNTAX, "")

    def render(self) -> list[str]:
        file = self._file
        lines = [*_paragraphs(self._comments[()])]
        for index, service in enumerate(file.service):
            lines += self._service(service, (_FILE_SERVICE, index))
        for index, enum in enumerate(file.enum_type):
            lines += self._enum(enum, (_FILE_ENUM, index))
        for index, message in enumerate(file.message_type):
            lines += self._message(message, (_FILE_MESSAGE, index), message.name)
        return lines

    def _service(self, service: Any, path: Path_) -> list[str]:
        lines = [f"### {self._file.package}.{service.name}", "", *self._about(path)]
        lines += ["| method | takes | answers | |", "|---|---|---|---|"]
        for index, method in enumerate(service.method):
            takes = ("stream of " if method.client_streaming else "") + self._link(
                method.input_type
            )
            answers = ("stream of " if method.server_streaming else "") + self._link(
                method.output_type
            )
            text = self._cell((*path, _INNER_METHOD, index))
            lines.append(f"| `{method.name}` | {takes} | {answers} | {text} |")
        return [*lines, ""]

    def _enum(self, enum: Any, path: Path_) -> list[str]:
        lines = [f"### {enum.name}", "", *self._about(path), "| value | | |", "|---|---|---|"]
        for index, value in enumerate(enum.value):
            text = self._cell((*path, _INNER_VALUE, index))
            lines.append(f"| `{value.name}` | {value.number} | {text} |")
        return [*lines, ""]

    def _message(self, message: Any, path: Path_, name: str) -> Iterator[str]:
        yield from (f"### {name}", "", *self._about(path))
        if message.field:
            yield from ("| field | type | number | |", "|---|---|---|---|")
        else:
            yield "No fields."
        for index, field in enumerate(message.field):
            text = self._cell((*path, _INNER_FIELD, index))
            if field.HasField("oneof_index") and not field.proto3_optional:
                only = f"One of `{message.oneof_decl[field.oneof_index].name}`."
                text = f"{only} {text}".strip()
            kind = self._kind(message, field)
            yield f"| `{field.name}` | {kind} | {field.number} | {text} |"
        yield ""
        for index, inner in enumerate(message.nested_type):
            if not inner.options.map_entry:
                place = (*path, _INNER_MESSAGE, index)
                yield from self._message(inner, place, f"{name}.{inner.name}")

    def _kind(self, message: Any, field: Any) -> str:
        if field.type not in (_MESSAGE, _ENUM):
            kind = _SCALARS[field.type]
        else:
            entries = {inner.name: inner for inner in message.nested_type}
            entry = entries.get(field.type_name.rpartition(".")[2])
            if entry is not None and entry.options.map_entry:
                key, value = (self._kind(entry, inner) for inner in entry.field)
                return f"map of {key} to {value}"
            kind = self._link(field.type_name)
        if field.label == field.LABEL_REPEATED:
            return f"repeated {kind}"
        return f"optional {kind}" if field.proto3_optional else kind

    def _link(self, type_name: str) -> str:
        name = type_name.removeprefix(f".{self._file.package}.")
        return f"[{name}](#{name.lower().replace('.', '')})"

    def _about(self, path: Path_) -> list[str]:
        return _paragraphs(self._comments.get(path, ""))

    def _cell(self, path: Path_) -> str:
        return " ".join(self._comments.get(path, "").split()).replace("|", "\\|")


def _paragraphs(comment: str) -> list[str]:
    parts = [" ".join(part.split()) for part in comment.replace("\n\n", "\0").split("\0")]
    return [line for part in parts if part for line in (part, "")]


if __name__ == "__main__":
    sys.stdout.write(render())
