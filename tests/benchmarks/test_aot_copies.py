"""Copies of weights are found in a compiled program's text, and nothing else is taken for one."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
WEIGHT = "bf16[64,256]{1,0:T(8,128)(2,1)}"
RETILED = "bf16[64,256]{1,0:T(16,128)(2,1)}"
NAMED = """metadata={op_name="weights[\'layers\'][0][\'wo\']"}"""


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.aot.copies")


def program(*lines: str, called: str = "") -> str:
    entry = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule jit_step

{called}
ENTRY %main.1 (wo.1: bf16[64,256], x.1: bf16[64,256]) -> bf16[64,256] {{
  %wo.1 = {WEIGHT} parameter(0), {NAMED}
  %x.1 = {WEIGHT} parameter(1), metadata={{op_name="state.x"}}
{entry}
}}
"""


def test_a_weight_in_other_tiles_or_another_order_is_a_copy(copies: ModuleType) -> None:
    turned = "bf16[64,256]{0,1:T(8,128)(2,1)}"
    text = program(
        f"%copy.1 = {RETILED} copy(%wo.1), backend_config={{}}",
        f"%bitcast.1 = {WEIGHT} bitcast(%wo.1)",
        f"ROOT %copy.2 = {turned} copy(%bitcast.1), backend_config={{}}",
    )
    assert [(c.weight, c.array, c.num_bytes) for c in copies.weight_copies(text)] == [
        ("layers.0.wo", RETILED, 32_768),
        ("layers.0.wo", turned, 32_768),
    ]


def test_a_prefetch_is_none_and_neither_is_a_copy_of_something_else(copies: ModuleType) -> None:
    near = WEIGHT.replace("}", "S(1)}")
    text = program(
        f"%copy-start.1 = ({near}, {WEIGHT}, u32[]{{:S(2)}}) copy-start(%wo.1)",
        f"%copy-done.1 = {near} copy-done(%copy-start.1)",
        f"%copy.1 = {near} copy(%wo.1)",
        f"ROOT %copy.2 = {RETILED} copy(%x.1)",
    )
    assert not copies.weight_copies(text)


def test_a_copy_in_a_loop_is_found(copies: ModuleType) -> None:
    carried = f"(s32[], /*index=1*/{WEIGHT})"
    body = f"""%body.1 (carry: (s32[], bf16[64,256])) -> (s32[], bf16[64,256]) {{
  %carry = {carried} parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %w = {WEIGHT} get-tuple-element(%carry), index=1
  %copy.1 = {RETILED} copy(%w)
  ROOT %tuple.1 = {carried} tuple(%i, %w)
}}
"""
    text = program(
        "%zero = s32[] constant(0)",
        f"%tuple.2 = {carried} tuple(%zero, %wo.1)",
        f"ROOT %while.1 = {carried} while(%tuple.2), condition=%cond.1, body=%body.1",
        called=body,
    )
    assert [copy.weight for copy in copies.weight_copies(text)] == ["layers.0.wo"]


def test_a_copy_on_another_core_is_found_once(copies: ModuleType) -> None:
    inner = f"""%called.1 (p: bf16[64,256]) -> bf16[64,256] {{
  %p = {WEIGHT} parameter(0)
  ROOT %copy.1 = {RETILED} copy(%p)
}}
"""
    text = program(
        '%start = ((), (), s32[1]) call-start(), async_execution_thread="x", to_apply=%called.1',
        f"%update = (({WEIGHT}), {RETILED}) call-update(%start, %wo.1)",
        f"ROOT %done = {RETILED} call-done(%update)",
        called=inner,
    )
    assert [copy.array for copy in copies.weight_copies(text)] == [RETILED]


@pytest.mark.parametrize(("opcode", "count"), [("convolution", 0), ("copy", 1)])
def test_a_fusion_copies_unless_it_multiplies(copies: ModuleType, opcode: str, count: int) -> None:
    """A product's output may be as large as its weight."""
    fused = f"""%fused.1 (p: bf16[64,256], q: bf16[64,256]) -> bf16[64,256] {{
  %p = {WEIGHT} parameter(0)
  %q = {WEIGHT} parameter(1)
  ROOT %out = {RETILED} {opcode}(%p, %q)
}}
"""
    text = program(
        f"ROOT %fusion.1 = {RETILED} fusion(%wo.1, %x.1), kind=kLoop, calls=%fused.1",
        called=fused,
    )
    assert len(copies.weight_copies(text)) == count
