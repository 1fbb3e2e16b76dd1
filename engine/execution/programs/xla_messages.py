"""What XLA's CPU backend writes a compiled program down as: the part of it that `light_program`
reads and changes.

The messages are XLA's own (`hlo.proto`, `thunk.proto`, `executable.proto`), under its numbers.
Fields that are not listed are carried along as they are. Of thunks every field is listed, so that
one that is not, of a later XLA, can be told.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int": _FIELD.TYPE_INT64,
    "bool": _FIELD.TYPE_BOOL,
    "str": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
}
_PACKAGE = "octavo.xla"

# Message -> its fields: a type (with * where there are several), a name, a number. Enumerations are
# read as integers, messages that are only carried or dropped as bytes.
_MESSAGES = {
    "CompilationResult": "Module hlo_module 1, BufferAssignment buffer_assignment 2, "
    "ThunkSequence thunk_sequence 6",
    "Module": "HloModule hlo_module 1",
    "HloModule": "Computation* computations 3, int entry_computation_id 6, bytes schedule 7, "
    "bytes stack_frame_index 17",
    "Computation": "Instruction* instructions 2, ProgramShape program_shape 4, int id 5, "
    "int root_id 6",
    "ProgramShape": "Shape* parameters 1, Shape result 2, str* parameter_names 3",
    "Shape": "Shape* tuple_shapes 4",
    "Instruction": "str name 1, str opcode 2, Shape shape 3, bytes metadata 7, bytes literal 8, "
    "int tuple_index 13, str custom_call_target 28, int id 35, int* operand_ids 36, "
    "int* control_predecessor_ids 37, int* called_computation_ids 38, "
    "int custom_call_api_version 77",
    "BufferAssignment": "LogicalBuffer* logical_buffers 1, bytes* buffer_aliases 2, "
    "Allocation* buffer_allocations 3, bytes* heap_simulator_traces 4, bytes* peak_buffers 5",
    "LogicalBuffer": "int id 1, Location defined_at 3",
    "Location": "str instruction_name 2, int* shape_index 3, int instruction_id 4",
    "Allocation": "int index 1, int size 2, bool is_thread_local 3, bool maybe_live_out 7, "
    "Assigned* assigned 9, bool is_constant 12",
    "Assigned": "int logical_buffer_id 1",
    "Slice": "int offset 1, int size 2, int buffer_allocation_index 3, int element_type 4",
    "ShapeSlice": "bytes shape 1, Slice slice 2",
    "SliceShape": "Slice slice 1, bytes shape 2",
    "ThunkSequence": "Thunk* thunks 1, bytes* thunk_resources 2",
    "Thunk": "str kind 1, bytes info 2, Call call 3, Conditional conditional 4, Sort sort 5, "
    "Dot dot 7, TopK top_k 9, While while 10, Kernel kernel 11, Copy copy 12, "
    "CustomCall custom_call 16, YnnFusion ynn_fusion 21",
    "Call": "ThunkSequence called_sequence 1",
    "Conditional": "ThunkSequence* branch_sequences 1, Slice branch_index_buffer 2",
    "Sort": "int dimension 1, bool is_stable 2, bytes direction 3, str comparator_name 4, "
    "ShapeSlice* inputs_shapes 5",
    "Dot": "bytes dot_dimensions 1, ShapeSlice lhs 2, ShapeSlice rhs 3, ShapeSlice out 4",
    "TopK": "int batch_size 1, int input_size 2, int k 3, Slice values 4, Slice output 5, "
    "Slice indices 6",
    "While": "ThunkSequence cond_sequence 1, ThunkSequence body_sequence 2, bytes trip_count 3, "
    "Slice cond_buffer 4",
    "Kernel": "str kernel_name 1, bytes num_workgroups 2, int* invariant_arguments 3, "
    "bytes min_alignment 4, SliceShape* arguments_buffers 5, SliceShape* results_buffers 6",
    "Copy": "ShapeSlice src 1, ShapeSlice dst 2",
    "CustomCall": "int api_version 1, str target_name 2, str backend_config 3, "
    "OpBuffers op_buffers 4",
    "OpBuffers": "ShapeSlice* arguments_shapes 1, ShapeSlice* results_shapes 2, "
    "bool is_tuple_result 3",
    "YnnFusion": "bytes options 1, int instruction_id 2, ShapeSlice* arguments_shapes 3, "
    "ShapeSlice* results_shapes 4",
}


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="octavo/xla.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for each in fields.split(", "):
            kind, field_name, number = each.split()
            field = message.field.add(name=field_name, number=int(number))
            field.label = _FIELD.LABEL_REPEATED if kind[-1] == "*" else _FIELD.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            field.type = _SCALARS.get(kind, _FIELD.TYPE_MESSAGE)
            if kind not in _SCALARS:
                field.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _message_classes()
CompilationResult: Any = _CLASSES["CompilationResult"]
Computation: Any = _CLASSES["Computation"]
Instruction: Any = _CLASSES["Instruction"]
LogicalBuffer: Any = _CLASSES["LogicalBuffer"]
Assigned: Any = _CLASSES["Assigned"]
