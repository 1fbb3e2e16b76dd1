"""A compiled CPU program without the text that it was compiled from.

XLA keeps a program's optimized text (HLO) for as long as the program: up to 83,000 operations with
what was found out about each, 0.1 to 0.35 GB, where the machine code takes 2 MB. To run, it needs
of the text what arguments, results and constants are, and each operation that YNNPACK computes,
which it hands over when the program is loaded. So a program is written down (as for
`program_store`), the rest of the text is taken out, and what is left is loaded: 10 to 20 MB, in a
sixth of the time.

The steps (thunks), the machine code and where each buffer lies stay as XLA made them. Steps of
equal operations share one, and so do equal constants, which changes nothing that is computed. An
operation whose value is wanted but not how it is computed is put down as a call without operands
that nobody makes.

Whatever is not as known (another XLA's) is refused with `UnknownFormatError`, and the program kept
as it is.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.engine.execution.programs.xla_messages import (
    Assigned,
    CompilationResult,
    Computation,
    Instruction,
    LogicalBuffer,
)

_PASSED_ON = frozenset(("bitcast", "opt-barrier", "while", "add-dependency"))
"""Operations whose value is that of their first operand, part by part, in the same place."""
_BODY = frozenset(("call", "conditional"))
"""Operations whose value is that of what they call (of each branch, in the same place)."""
_STEPS = frozenset(
    (
        *("call", "conditional", "sort", "dot", "top_k", "while", "kernel", "copy"),
        *("custom_call", "ynn_fusion"),
    )
)
_FRAME_BYTES, _BINBYTES_HEAD = 9, 5
"""Of a pickle's frame, and before a part's bytes."""


class UnknownFormatError(Exception):
    """A program is not written down as is known here."""


def lighten(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """A program without its text.

    Args:
        parts: of `compat.serialize_program`, on a CPU.

    Raises:
        UnknownFormatError: it is not known how this XLA writes programs down.
    """
    try:
        return (_lighten_pickle(parts[0]), *parts[1:])
    except (DecodeError, ValueError, IndexError, KeyError) as error:
        raise UnknownFormatError(repr(error)) from error


def _lighten_pickle(stream: bytes) -> bytes:
    """A pickle whose largest part is the executable, with that one lightened."""
    pieces: list[bytes] = []
    begin, place, data = 0, 0, b""
    for op, value, place_of_op in pickletools.genops(stream):
        at = place_of_op or 0
        if op.name == "FRAME":  # whose length would change; a pickle needs none
            pieces.append(stream[begin:at])
            begin = at + _FRAME_BYTES
        elif op.name == "BINBYTES" and isinstance(value, bytes) and len(value) > len(data):
            place, data = sum(map(len, pieces)) + at - begin, value
    light = _lighten_executable(data)
    stream = b"".join((*pieces, stream[begin:]))
    head, rest = stream[:place], stream[place + _BINBYTES_HEAD + len(data) :]
    return b"".join((head, b"B", len(light).to_bytes(4, "little"), light, rest))


def _lighten_executable(data: bytes) -> bytes:
    """The same of what XLA's client makes of a program: a head, then a message whose first field is
    the result of compiling."""
    size, at = _varint(data, 0)
    head, rest = data[: at + size], data[at + size :]
    tag, at = _varint(rest, 0)
    size, at = _varint(rest, at)
    if tag != 1 << 3 | 2:
        raise UnknownFormatError("another first field")
    result = CompilationResult.FromString(rest[at : at + size])
    _Lightening(result).run()
    light = result.SerializeToString()
    return b"".join((head, b"\x0a", _as_varint(len(light)), light, rest[at + size :]))


class _Lightening:
    """Takes the text out of one `CompilationResult`."""

    def __init__(self, result: Any) -> None:
        self._module = result.hlo_module.hlo_module
        self._buffers = result.buffer_assignment
        self._steps = [*_messages(result.thunk_sequence)]
        self._computations = {each.id: each for each in self._module.computations}
        self._by_id = {i.id: i for c in self._module.computations for i in c.instructions}
        self._entry = self._computations[self._module.entry_computation_id]
        self._allocations = {each.index: each for each in self._buffers.buffer_allocations}
        self._values = {
            (each.defined_at.instruction_id, tuple(each.defined_at.shape_index)): each
            for each in self._buffers.logical_buffers
        }
        self._places = {
            assigned.logical_buffer_id: (allocation.index, assigned.SerializeToString())
            for allocation in self._buffers.buffer_allocations
            for assigned in allocation.assigned
        }

    def run(self) -> None:
        for step in self._steps:
            _check(step)
        self._share_constants()
        constants = self._moved_constants()
        operations = self._shared_operations()
        values = [*self._arguments(), *constants.values(), *self._results()]
        self._put_buffers(values)
        self._put_computations([instruction for instruction, *_ in constants.values()], operations)

    def _share_constants(self) -> None:
        """Has steps read one of several equal constants, and the others take no memory."""
        first: dict[Any, int] = {}
        instead = {}
        for (number, index), value in self._values.items():
            place = self._places.get(value.id)
            if place is None or not self._allocations[place[0]].is_constant or index:
                continue
            allocation, constant = self._allocations[place[0]], self._by_id[number]
            if constant.opcode != "constant" or allocation.maybe_live_out:
                raise UnknownFormatError("a constant that is none")
            key = (constant.literal, constant.shape.SerializeToString(), allocation.size)
            instead[allocation.index] = first.setdefault(key, allocation.index)
        for step in self._steps:
            if step.DESCRIPTOR.name == "Slice":
                index = step.buffer_allocation_index
                step.buffer_allocation_index = instead.get(index, index)
        for index, other in instead.items():
            if index != other:
                self._allocations[index].is_constant = False
                self._allocations[index].is_thread_local = True  # takes no memory

    def _moved_constants(self) -> dict[int, tuple[Any, tuple[int, ...], Any]]:
        """The constants that are left, by allocation, with new ids and names that fit the entry."""
        entry = self._entry
        of_computation = entry.instructions[0].id >> 32 == entry.id
        taken = (i.id for i in entry.instructions) if of_computation else self._by_id
        next_id = max(taken) + 1
        moved: dict[int, tuple[Any, tuple[int, ...], Any]] = {}
        for (number, _), value in self._values.items():
            index = self._places.get(value.id, (None,))[0]
            if index is None or not self._allocations[index].is_constant or index in moved:
                continue
            constant = Instruction()
            constant.CopyFrom(self._by_id[number])
            constant.id, constant.name = next_id, f"kept.{next_id & 0xFFFFFFFF}"
            next_id += 1
            moved[index] = constant, (), value
        return moved

    def _arguments(self) -> Iterator[tuple[Any, tuple[int, ...], Any]]:
        for (number, index), value in self._values.items():
            instruction = self._by_id[number]
            if instruction.opcode == "parameter" and number in self._entry_ids:
                yield instruction, index, value

    def _results(self) -> Iterator[tuple[Any, tuple[int, ...], Any]]:
        root = self._by_id[self._entry.root_id]
        if root.opcode == "parameter":
            raise UnknownFormatError("a result that is an argument")
        for index in _parts(root.shape):
            value = self._value(root, index)
            if not self._allocations[self._places[value.id][0]].maybe_live_out:
                raise UnknownFormatError(f"a result {index} that does not outlive the program")
            yield root, index, value

    def _value(self, instruction: Any, index: tuple[int, ...]) -> Any:
        """The buffer that a part of an operation's value lies in."""
        while (instruction.id, index) not in self._values:
            if instruction.opcode == "tuple":
                instruction, index = self._by_id[instruction.operand_ids[index[0]]], index[1:]
            elif instruction.opcode == "get-tuple-element":
                index = (instruction.tuple_index, *index)
                instruction = self._by_id[instruction.operand_ids[0]]
            elif instruction.opcode in _PASSED_ON:
                instruction = self._by_id[instruction.operand_ids[0]]
            elif instruction.opcode in _BODY:
                body = self._computations[instruction.called_computation_ids[0]]
                instruction = self._by_id[body.root_id]
            else:
                raise UnknownFormatError(f"a value of {instruction.opcode}")
        return self._values[instruction.id, index]

    @property
    def _entry_ids(self) -> set[int]:
        return {each.id for each in self._entry.instructions}

    def _shared_operations(self) -> set[int]:
        """Ids of the operations that steps name; they name one of several equal ones now."""
        first: dict[Any, int] = {}
        for step in self._steps:
            if step.DESCRIPTOR.name == "YnnFusion":
                number = step.instruction_id
                step.instruction_id = first.setdefault(self._text(self._by_id[number]), number)
        return set(first.values())

    def _text(self, instruction: Any, names: dict[int, int] | None = None) -> Any:
        """What equal operations have in common: all but names."""
        plain = Instruction()
        plain.CopyFrom(instruction)
        called = tuple(map(self._body_text, plain.called_computation_ids))
        for field in ("name", "id", "metadata", "operand_ids", "called_computation_ids"):
            plain.ClearField(field)
        plain.ClearField("control_predecessor_ids")
        operands = tuple(
            names[number] if names is not None else _operand_text(self._by_id[number])
            for number in instruction.operand_ids
        )
        return plain.SerializeToString(), operands, called

    def _body_text(self, computation_id: int) -> Any:
        body = self._computations[computation_id]
        names = {each.id: place for place, each in enumerate(body.instructions)}
        return names[body.root_id], tuple(self._text(each, names) for each in body.instructions)

    def _put_buffers(self, values: list[tuple[Any, tuple[int, ...], Any]]) -> None:
        buffers, assigned = [], []
        for number, (instruction, index, value) in enumerate(values):
            buffer = LogicalBuffer()
            buffer.CopyFrom(value)
            buffer.id = number
            buffer.defined_at.Clear()
            buffer.defined_at.instruction_id = instruction.id
            buffer.defined_at.shape_index.extend(index)
            buffers.append(buffer)
            allocation, place = self._places[value.id]
            assigned.append((allocation, Assigned.FromString(place)))
            assigned[-1][1].logical_buffer_id = number
        for each in self._buffers.buffer_allocations:
            each.ClearField("assigned")
        for allocation, place in assigned:
            self._allocations[allocation].assigned.append(place)
        for field in ("buffer_aliases", "heap_simulator_traces", "peak_buffers"):
            self._buffers.ClearField(field)
        self._buffers.ClearField("logical_buffers")
        self._buffers.logical_buffers.extend(buffers)

    def _put_computations(self, constants: list[Any], operations: set[int]) -> None:
        whole: set[int] = set()
        left = [c for number in operations for c in self._by_id[number].called_computation_ids]
        while left:
            number = left.pop()
            if number not in whole:
                whole.add(number)
                for each in self._computations[number].instructions:
                    left.extend(each.called_computation_ids)
        kept = []
        for computation in self._module.computations:
            if computation.id in whole:
                kept.append(computation)
            elif computation is self._entry or any(
                each.id in operations for each in computation.instructions
            ):
                kept.append(self._cut(computation, operations, constants))
        texts = [each.SerializeToString() for each in kept]
        for field in ("computations", "schedule", "stack_frame_index"):
            self._module.ClearField(field)
        for text in texts:
            computation = self._module.computations.add()
            computation.MergeFromString(text)
            for each in computation.instructions:
                each.ClearField("metadata")

    def _cut(self, computation: Any, operations: set[int], constants: list[Any]) -> Any:
        """A computation with the operations that are named, and what they are given."""
        is_entry = computation is self._entry
        cut = Computation()
        cut.CopyFrom(computation)
        cut.ClearField("instructions")
        named = [each for each in computation.instructions if each.id in operations]
        wanted = {number for each in named for number in each.operand_ids}
        if is_entry:
            wanted.add(computation.root_id)
        else:  # nobody calls it
            cut.root_id = named[-1].id
            cut.ClearField("program_shape")
            cut.program_shape.result.CopyFrom(named[-1].shape)
        for each in computation.instructions:
            is_argument = is_entry and each.opcode == "parameter"
            if each.id in operations or is_argument or (each.id in wanted and _is_constant(each)):
                cut.instructions.append(each)
                cut.instructions[-1].ClearField("control_predecessor_ids")
            elif each.id in wanted:
                cut.instructions.append(_placeholder(each))
        if is_entry:
            cut.instructions.extend(constants)
        return cut


def _is_constant(instruction: Any) -> bool:
    return bool(instruction.opcode == "constant")


def _placeholder(instruction: Any) -> Any:
    """Something of the same name and shape that needs nothing."""
    return Instruction(
        name=instruction.name,
        id=instruction.id,
        opcode="custom-call",
        shape=instruction.shape,
        custom_call_target="none",
        custom_call_api_version=1,
    )


def _operand_text(operand: Any) -> Any:
    """What an operation knows of an operand."""
    return operand.shape.SerializeToString(), operand.literal if _is_constant(operand) else None


def _parts(shape: Any, index: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Indices of a shape and all that it is made of."""
    yield index
    for place, part in enumerate(shape.tuple_shapes):
        yield from _parts(part, (*index, place))


def _messages(message: Message) -> Iterator[Any]:
    """A message and all inside of it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                yield from _messages(each)


def _check(step: Message) -> None:
    """Refuses what may name buffers or operations that are not seen.

    Raises:
        UnknownFormatError: a field or a kind of step is not known.
    """
    name = step.DESCRIPTOR.name
    if len(UnknownFieldSet(step)) or (
        name == "Thunk" and not any(field.name in _STEPS for field, _ in step.ListFields())
    ):
        raise UnknownFormatError(f"an unknown field or kind of {name}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where what follows it begins."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at


def _as_varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
