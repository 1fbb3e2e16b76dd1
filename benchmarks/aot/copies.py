"""Which of its weights a compiled program copies before it reads them, from its HLO text.

A product wants its weight in one order and tiling. Given another, XLA copies it in every dispatch:
before a loop, where the copies of all layers are held at once, or layer by layer, where the size
of the temporaries does not tell. Neither is in a program's floor. A copy within a loop counts once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

_COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"  (ROOT )?%([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:body|to_apply|calls|called_computation)=%([\w.\-]+)")
_INDEX = re.compile(r"index=(\d+)")
_WEIGHT = re.compile(r'op_name="weights(\[[^"]*)"')
_MEMORY_SPACE = re.compile(r"S\(\d+\)")

UNCHANGED = frozenset({"bitcast", "copy-start", "copy-done", "opt-barrier"})
"""What gives what it was given, in whatever memory."""
CALLS = frozenset({"call", "call-update", "call-start", "async-start", "while"})
PRODUCTS = frozenset({"dot", "convolution", "custom-call"})

Source = str | dict[int, str]
"""The weight that an array holds, or those that the parts of a tuple do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A weight in another layout than it came in.

    Attributes:
        weight: which, as layers.3.wqkv.
        array: what it is copied to, in HLO's notation.
        num_bytes: of the copy, without padding.
    """

    weight: str
    array: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    result: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names; everything in this notation that is not an operand comes behind them."""
        return _NAME.findall(self.rest.split(")", 1)[0])

    @property
    def called(self) -> str | None:
        found = _CALLED.search(self.rest)
        return found and found[1]


@dataclass(slots=True)
class _Program:
    entry: str = ""
    computations: dict[str, list[_Instruction]] = field(default_factory=dict)

    def multiplies(self, name: str) -> bool:
        """Whether a fused computation has a product in it."""
        return any(
            step.opcode in PRODUCTS or (step.called is not None and self.multiplies(step.called))
            for step in self.computations.get(name, ())
        )


def weight_copies(text: str) -> list[Copy]:
    """Copies of arguments that belong to `weights`, in loops and asynchronous calls too.

    Args:
        text: of `jax.stages.Compiled.as_text`.
    """
    program = _parse(text)
    return list(_copies(program, program.entry, []))


def _copies(program: _Program, computation: str, given: list[Source | None]) -> Iterator[Copy]:
    """Of a computation and what it calls, whose parameters hold weights as `given`."""
    holds: dict[str, Source] = {}
    arrays: dict[str, str] = {}
    begun: dict[str, str] = {}
    for step in program.computations[computation]:
        arrays[step.name] = step.result
        operands = step.operands
        source = next((holds[name] for name in operands if name in holds), None)
        if step.opcode == "parameter":
            source = _parameter(step, given)
        elif step.opcode == "tuple":
            parts = ((i, holds.get(name)) for i, name in enumerate(operands))
            source = {i: part for i, part in parts if isinstance(part, str)} or None
        elif step.opcode == "get-tuple-element":
            index = _INDEX.search(step.rest)
            if isinstance(source, dict) and index:
                source = source.get(int(index[1]))
        elif step.opcode in CALLS and (called := step.called or begun.get(operands[0])):
            # An asynchronous call's update names its beginning, then what it is given.
            given_to = [name for name in operands if name not in begun]
            begun[step.name] = called
            yield from _copies(program, called, [holds.get(name) for name in given_to])
        elif step.opcode in {"copy", "transpose", "fusion"}:
            before = next((arrays[name] for name in operands if name in holds), "")
            if not isinstance(source, str) or not _is_copy(program, step, before):
                source = None
            elif _layout(before) != _layout(step.result):
                yield Copy(weight=source, array=step.result, num_bytes=_num_bytes(step.result))
        elif step.opcode not in UNCHANGED and not step.opcode.endswith("-done"):
            source = None
        if source is not None:
            holds[step.name] = source


def _parameter(step: _Instruction, given: list[Source | None]) -> Source | None:
    if found := _WEIGHT.search(step.rest):
        return ".".join(re.findall(r"\w+", found[1]))
    number = int(step.rest.split(")", 1)[0])
    return given[number] if number < len(given) else None


def _is_copy(program: _Program, step: _Instruction, before: str) -> bool:
    """Whether the result is all of the array `before` and nothing else."""
    if step.result.startswith("(") or _num_bytes(step.result) != _num_bytes(before):
        return False
    return step.opcode != "fusion" or not program.multiplies(step.called or "")


def _layout(array: str) -> str:
    """Type, dimensions, order and tiles, without the memory."""
    return _MEMORY_SPACE.sub("", array)


def _num_bytes(array: str) -> int:
    found = _ARRAY.match(array)
    if found is None:
        return 0
    kind, dims, _ = found.groups()
    bits = re.search(r"\d+", kind)
    assert bits is not None
    return prod(int(dim) for dim in dims.split(",") if dim) * int(bits[0]) // 8


def _parse(text: str) -> _Program:
    program = _Program()
    steps: list[_Instruction] = []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            steps = program.computations.setdefault(found[1], [])
            if line.startswith("ENTRY"):
                program.entry = found[1]
        elif found := _INSTRUCTION.match(line):
            steps.append(_Instruction(*found.groups()[1:]))
    return program
