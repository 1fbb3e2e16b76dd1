"""Hot loops are found in machine code, and what they spill with them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

# As nvdisasm prints it: an outer loop over items, which spills, around one over tiles, whose wait
# is at the end of the code and branches back; and a loop without products.
CODE = """
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
//--------------------- .text.anonymous_mosaic_gpu_kernel --------------------------
        .size           anonymous_mosaic_gpu_kernel,(.L_x_9 - anonymous_mosaic_gpu_kernel)
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   STL [R1], R4 ;
.L_x_1:
        /*0020*/                   LDL R2, [R1] ;
        /*0030*/              @!P1 BRA `(.L_x_5) ;
.L_x_2:
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9], R24 ;
        /*0050*/              @!P1 BRA `(.L_x_7) ;
.L_x_3:
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
        /*0070*/                   MUFU.EX2 R5, R6 ;
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R24, R28, gdesc[UR8].tnspB, R24, gsb0 ;
        /*0090*/                   BRA P2, `(.L_x_2) ;
.L_x_5:
        /*00a0*/               @P3 BRA `(.L_x_1) ;
.L_x_6:
        /*00b0*/                   STL [R1], R4 ;
        /*00c0*/               @P4 BRA `(.L_x_6) ;
        /*00d0*/                   EXIT ;
.L_x_7:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3+URZ], R2 ;
        /*00f0*/              @!P1 NANOSLEEP.SYNCS 0x989680 ;
        /*0100*/              @!P1 BRA `(.L_x_7) ;
        /*0110*/                   BRA `(.L_x_3) ;
.L_x_8:
        /*0120*/                   BRA `(.L_x_8) ;
.L_x_9:
"""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.aot.hot_loops")


def test_the_innermost_loop_with_products_is_hot_and_waits_are_not_counted(
    found: ModuleType,
) -> None:
    [loop] = found.hot_loops(CODE)
    # Its six instructions, and the branch back from the wait.
    assert loop == found.HotLoop(instructions=7, tensor_cycles=64 + 32, special_cycles=8, spills=0)


def test_spills_are_counted_where_they_are_in_the_loop(found: ModuleType) -> None:
    inside = CODE.replace("MUFU.EX2 R5, R6", "STL [R1+0x4], R5")
    assert [loop.spills for loop in found.hot_loops(inside)] == [1]


def test_every_kernel_is_read(found: ModuleType) -> None:
    assert len(found.hot_loops(CODE + CODE)) == 2
    assert not found.hot_loops(CODE.replace("HGMMA", "FFMA"))
    assert found.has_code(CODE)
    assert not found.has_code("ptxas info    : Used 168 registers")


def test_spills_fail_a_program_in_hot_loops_or_where_nothing_shows_them(
    found: ModuleType,
) -> None:
    aot = importlib.import_module("benchmarks.aot.__main__")
    compile_target = importlib.import_module("benchmarks.aot.compile_target")
    says = "    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
    warns = "ptxas warning : Registers are spilled, 8 bytes spill stores, 12 bytes spill loads\n"
    outside = compile_target.registers(warns + says + CODE)
    assert outside["spill_bytes"] == 20
    assert aot.failure(outside) is None
    inside = compile_target.registers(says + CODE.replace("MUFU.EX2 R5, R6", "STL [R1+0x4], R5"))
    assert aot.failure(inside) == "1 accesses to spilled registers in hot loops"
    unseen = compile_target.registers(says + "ptxas info    : Used 168 registers")
    assert aot.failure(unseen) == "20 bytes of register spills"
    assert found.summary(outside["hot_loops"]) == "7 / 96 / 8"
    assert found.summary([]) == "-"
