"""Collectives of a step over several CPU devices: every device comes to them in one order.

A CPU runs branches and loops that do not read each other's results at once. If two of them hold
collectives, one device may wait in the first for another that waits in the second, until XLA ends
the process.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from octavo.engine.execution.platform.kernel_choice import Kernels
from octavo.engine.execution.state import StateLayout
from octavo.engine.execution.step import make_step
from octavo.engine.execution.step_spec import StepShape, step_spec
from octavo.models.flat_config import flat_config
from octavo.models.parameters import abstract_weights
from octavo.sharding.mesh import make_mesh

CONFIG = flat_config(
    vocab_size=272,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
)
COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition)=%?([\w.-]+)|branch_computations=\{([^}]*)\}"
)

Computations = dict[str, dict[str, str]]


def computations(text: str) -> Computations:
    """Of a compiled program: name -> its instructions, by name and in order."""
    found: Computations = {}
    for line in text.splitlines():
        if begin := re.match(r"(?:ENTRY )?%([\w.-]+) \(", line):
            inside = found[begin[1]] = {}
        elif named := re.match(r"\s+(?:ROOT )?%([\w.-]+) = (.*)", line):
            inside[named[1]] = named[2]
    return found


def holds_collective(instruction: str, program: Computations) -> bool:
    """Whether it is a collective, or runs computations in which there is one."""
    groups = " ".join(" ".join(groups) for groups in CALLED.findall(instruction))
    return bool(COLLECTIVE.search(instruction)) or any(
        holds_collective(each, program)
        for name in program.keys() & set(re.findall(r"[\w.-]+", groups))
        for each in program[name].values()
    )


def unordered(program: Computations) -> list[tuple[str, str]]:
    """Pairs of instructions that hold collectives, at least one of them inside, and of which none
    reads what the other made. XLA itself orders those that stand side by side."""
    found = []
    for instructions in program.values():
        before: dict[str, set[str]] = {}
        earlier: list[str] = []
        for name, instruction in instructions.items():
            read = set(re.findall(r"%([\w.-]+)", instruction)) & before.keys()
            before[name] = read.union(*(before[each] for each in read))
            if not holds_collective(instruction, program):
                continue
            for other in earlier:
                are_plain = COLLECTIVE.search(instruction) and COLLECTIVE.search(
                    instructions[other]
                )
                if other not in before[name] and not are_plain:
                    found.append((other, name))
            earlier.append(name)
    return found


@pytest.mark.parametrize(
    "shape",
    [StepShape(32, 4, 0), StepShape(64, 40, 0), StepShape(32, 4, 0, "pooled"), StepShape(4, 4, 2)],
    ids=str,
)
def test_every_device_comes_to_the_collectives_in_one_order(shape: StepShape) -> None:
    mesh = make_mesh(2)
    layout = StateLayout(
        config=CONFIG, mesh=mesh, num_slots=40, num_pages=8, page_size=16, table_pages=8,
        dtype=jnp.dtype("float32"),
    )  # fmt: skip
    spec = step_spec(shape, 8, 16)
    step = jax.jit(make_step(CONFIG, spec, mesh=mesh, kernels=Kernels.for_devices(mesh, "xla")))
    weights = abstract_weights(CONFIG, jnp.dtype("float32"), mesh)
    compiled = step.lower(weights, layout.abstract(), spec.abstract()).compile()
    program = computations(compiled.as_text() or "")
    assert any(holds_collective(each, program) for one in program.values() for each in one.values())
    assert unordered(program) == []
