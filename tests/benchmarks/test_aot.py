"""The ahead-of-time table states floors, and fails what would not fit a device."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

GOOD: dict[str, Any] = {
    "target": "h200",
    "case": "decode",
    "bytes": 4.8e9,
    "flops": 989e9,
    "compile_s": 2.0,
    "temp_bytes": 1e6,
    "registers": 125,
    "spill_bytes": 0,
}


@pytest.fixture
def aot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/aot is run from the repository's root, with `python -m`."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.aot.__main__")


def test_floors_are_bytes_and_operations_over_the_makers_rates(aot: ModuleType) -> None:
    assert aot.floors_us(GOOD) == pytest.approx((1000.0, 1000.0))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"spill_bytes": 8}, "8 bytes of register spills"),
        ({"over_memory": True}, "exceeds the device's memory"),
        ({"error": "ran out of VMEM"}, "ran out of VMEM"),
    ],
)
def test_spills_overflow_and_errors_fail(
    aot: ModuleType, change: dict[str, Any], why: str | None
) -> None:
    assert aot.failure({**GOOD, **change}) == why


def test_the_table_shows_registers_and_failures(aot: ModuleType) -> None:
    broken = {"target": "v6e", "case": "prefill", "bytes": 0, "flops": 0, "error": "no room"}
    text = aot.table([GOOD, broken])
    assert "| h200 | decode | 2.0 | 125/0 |" in text
    assert "| v6e | prefill | FAILED: no room |" in text


def test_the_worst_of_several_kernels_is_kept(aot: ModuleType) -> None:
    registers = importlib.import_module("benchmarks.aot.compile_target").registers
    log = """
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
    ptxas info    : Used 168 registers, used 16 barriers
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 125 registers, used 16 barriers
    """
    assert registers(log) == {"registers": 168, "spill_bytes": 12}
    assert registers("nothing of ptxas") == {}


def test_an_h100_is_described_as_one(aot: ModuleType) -> None:
    text = aot.TARGETS["h100"].target_config()
    assert "H100" in text
    assert "H200" not in text
    assert "memory_bandwidth: 3352000000000" in text
