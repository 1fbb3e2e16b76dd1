"""What the hot loops of a GPU kernel are made of, read from its machine code.

A hot loop is an innermost loop with tensor-core instructions: one round is one KV tile of one
computing warpgroup. Loops are the natural ones of the control flow (Source: Aho, Lam, Sethi and
Ullman, Compilers, 2nd edition, 9.6): the blocks that reach a branch back to a block that dominates
it. Code that waits is out of the way at the end of a kernel, so that the order of lines says
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

_KERNEL = re.compile(r"^//-+ \.text\.", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_[\w.]+):")
_INSTRUCTION = re.compile(
    r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(@!?U?P[T\d]+\s+)?([A-Z][A-Zx0-9_.]*)\s*(.*?);"
)
_TARGET = re.compile(r"`\((\.L_[\w.]+)\)")
_PRODUCT = re.compile(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)")
_ENDS = ("EXIT", "RET", "BRX", "JMX")
MULTIPLIED_PER_CYCLE = 2048
"""bfloat16 products that a Hopper multiprocessor's tensor cores add up in a cycle."""
SPECIAL_PER_CYCLE = 16
"""Exponentials, logarithms and reciprocals of a multiprocessor in a cycle."""
WARPGROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLoop:
    """One round of an innermost loop with tensor-core instructions, for one warpgroup.

    Attributes:
        instructions: that each of its warps issues, one a cycle of a scheduler, without waiting;
            where paths part, those of all.
        tensor_cycles: of the tensor cores, at bfloat16's rate.
        special_cycles: of the units for exponentials.
        spills: loads from and stores to local memory.
    """

    instructions: int
    tensor_cycles: int
    special_cycles: int
    spills: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(slots=True)
class _Block:
    """Instructions that run one after another."""

    names: list[str] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)


def has_code(log: str) -> bool:
    """Whether a log has machine code in it."""
    return _KERNEL.search(log) is not None


def hot_loops(sass: str) -> list[HotLoop]:
    """The hot loops of every kernel that `nvdisasm` printed, in the order of the code."""
    kernels = _KERNEL.split(sass)[1:]
    return [loop for kernel in kernels for loop in _of_kernel(_blocks(kernel))]


def _of_kernel(blocks: list[_Block]) -> Iterator[HotLoop]:
    loops = _natural_loops(blocks)
    hot = {head: body for head, body in loops.items() if _tensor_cycles(blocks, body)}
    for head, body in sorted(hot.items()):
        if any(other in body for other in hot if other != head):
            continue  # not an innermost one
        # A wait that is not over at once goes through a block of its own.
        names = [
            name
            for index in body
            if not any(name.startswith("NANOSLEEP") for name in blocks[index].names)
            for name in blocks[index].names
        ]
        special = sum(name.startswith("MUFU") for name in names)
        yield HotLoop(
            instructions=len(names),
            tensor_cycles=_tensor_cycles(blocks, body),
            special_cycles=special * WARPGROUP // SPECIAL_PER_CYCLE,
            spills=sum(name.startswith(("LDL", "STL")) for name in names),
        )


def _tensor_cycles(blocks: list[_Block], body: set[int]) -> int:
    sizes = (_PRODUCT.match(name) for index in body for name in blocks[index].names)
    products = sum(int(m[1]) * int(m[2]) * int(m[3]) for m in sizes if m)
    return products // MULTIPLIED_PER_CYCLE


def _blocks(kernel: str) -> list[_Block]:
    """Basic blocks in the order of the code; the first is the entry."""
    blocks = [_Block()]
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    falls = [True]  # whether a block can run on into the next
    for line in kernel.splitlines():
        label = _LABEL.match(line)
        if label:
            if blocks[-1].names:
                blocks.append(_Block())
                falls.append(True)
            labels[label[1]] = len(blocks) - 1
            continue
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        predicate, name, rest = found.groups()
        blocks[-1].names.append(name)
        target = _TARGET.search(rest) if name.startswith("BRA") else None
        if target:
            jumps.append((len(blocks) - 1, target[1]))
        if target or name.startswith(_ENDS):
            # `@P0 BRA` and `BRA P1, target` may fall through.
            conditional = predicate is not None or bool(re.match(r"!?U?P\d", rest.strip()))
            falls[-1] = conditional
            blocks.append(_Block())
            falls.append(True)
    for index, block in enumerate(blocks[:-1]):
        if falls[index]:
            block.follows.append(index + 1)
    for index, name in jumps:
        if name in labels:
            blocks[index].follows.append(labels[name])
    return blocks


def _natural_loops(blocks: list[_Block]) -> dict[int, set[int]]:
    """Header -> blocks of its loop; loops with one header are one."""
    before: list[list[int]] = [[] for _ in blocks]
    order, seen, stack = [], {0}, [(0, iter(blocks[0].follows))]
    while stack:
        index, rest = stack[-1]
        following = next(rest, None)
        if following is None:
            order.append(index)
            stack.pop()
            continue
        before[following].append(index)
        if following not in seen:
            seen.add(following)
            stack.append((following, iter(blocks[following].follows)))
    order.reverse()
    everything = set(order)
    dominators: dict[int, set[int]] = dict.fromkeys(order, everything)
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            new = set.intersection(*(dominators[each] for each in before[index])) | {index}
            if new != dominators[index]:
                dominators[index], changed = new, True
    loops: dict[int, set[int]] = {}
    for index in order:
        for head in blocks[index].follows:
            if head in dominators[index]:
                body = loops.setdefault(head, {head})
                todo = [index]
                while todo:
                    each = todo.pop()
                    if each not in body:
                        body.add(each)
                        todo += before[each]
    return loops


def summary(loops: Sequence[Mapping[str, int]]) -> str:
    """For a table, a loop after another: cycles of issue, of tensor cores, of exponentials."""
    rounds = (
        f"{loop['instructions']} / {loop['tensor_cycles']} / {loop['special_cycles']}"
        for loop in loops
    )
    return "; ".join(rounds) or "-"
