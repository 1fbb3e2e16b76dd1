"""The ahead-of-time table states floors, and fails what would not fit a device."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

GOOD: dict[str, Any] = {
    "target": "h200",
    "case": "decode",
    "num_devices": 1,
    "bytes": 4.8e9,
    "flops": 989e9,
    "counted_bytes": 6e9,
    "counted_flops": 989e9,
    "compile_s": 2.0,
    "temp_bytes": 1e6,
    "memory_bytes": 5e9,
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


def test_counted_bytes_are_at_least_the_least(aot: ModuleType) -> None:
    cases = importlib.import_module("benchmarks.aot.cases")
    for backend, kind in (("mosaic_tpu", "TPU v6 lite"), ("mosaic_gpu", "NVIDIA H200")):
        for case in (*cases.attention_cases("cuda"), *cases.step_cases()):
            counted = case.counted(backend, kind)
            assert counted.num_bytes > 0.9 * case.bytes_moved, case.name


def test_decode_reads_its_pages_once(aot: ModuleType) -> None:
    """Queries, outputs, new tokens and partial results are all that comes on top."""
    [decode, *_] = importlib.import_module("benchmarks.aot.cases").attention_cases("cuda")
    assert decode.counted("mosaic_tpu", "TPU v6 lite").num_bytes < 1.02 * decode.bytes_moved
    assert decode.counted("mosaic_gpu", "NVIDIA H200").num_bytes < 1.02 * decode.bytes_moved


@pytest.mark.parametrize("target", ["v5e", "v5p", "v6e", "tpu7x", "h100", "h200"])
def test_decode_can_attain_its_share_on_every_target(aot: ModuleType, target: str) -> None:
    """Counted without a compiler, so that block sizes that read twice are found here."""
    compile_target = importlib.import_module("benchmarks.aot.compile_target")
    cases = importlib.import_module("benchmarks.aot.cases")
    kinds = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
    where = aot.TARGETS[target]
    backend = f"mosaic_{'tpu' if target in kinds else 'gpu'}"
    held = []
    for case in (*cases.attention_cases(where.platform), *cases.step_cases()):
        count = compile_target.num_devices(case, where)
        result = compile_target.describe(case, where, backend, kinds.get(target, "NVIDIA"), count)
        assert aot.failure(result) is None, case.name
        held += [case.name] if result["is_decode"] else []
    assert any("D64" in name for name in held)
    assert any("1B decode 128" in name for name in held)


def test_results_are_written_with_date_and_command(aot: ModuleType, tmp_path: Path) -> None:
    aot.write(
        tmp_path / "table", [GOOD, {**GOOD, "spill_bytes": 8}], "python -m benchmarks.aot h200"
    )
    text = (tmp_path / "table.md").read_text()
    assert "- command: python -m benchmarks.aot h200\n" in text
    assert "- 2 programs, 1 failed" in text
    found = json.loads((tmp_path / "table.json").read_text())
    assert found["date"]
    assert found["results"][0] == GOOD


def test_a_model_is_split_until_it_fits(aot: ModuleType) -> None:
    target = importlib.import_module("benchmarks.aot.compile_target")
    steps = list(importlib.import_module("benchmarks.aot.cases").step_cases())
    small = next(case for case in steps if "1B decode 1 " in case.name)
    large = next(case for case in steps if "8B decode 128 " in case.name)
    assert target.num_devices(small, aot.TARGETS["v5e"]) == 1
    assert target.num_devices(large, aot.TARGETS["v5e"]) == 4
    assert target.num_devices(large, aot.TARGETS["v6e"]) == 2
    assert target.num_devices(large, aot.TARGETS["h200"]) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"spill_bytes": 8}, "8 bytes of register spills"),
        ({"over_memory": True}, "exceeds the device's memory"),
        ({"error": "ran out of VMEM"}, "ran out of VMEM"),
        ({"vmem_bytes": 9, "vmem_limit_bytes": 8}, "plans for 9 bytes of VMEM"),
        ({"is_decode": True}, None),
        (
            {"is_decode": True, "counted_bytes": 8e9},
            "60% of the bandwidth is attainable: want 80%",
        ),
        ({"is_decode": False, "counted_bytes": 8e9}, None),
        ({"weight_bytes": 1e9, "copied_bytes": 1e8}, None),
        ({"weight_bytes": 1e9, "copied_bytes": 2e8}, "copies 200 MB of its weights"),
    ],
)
def test_spills_overflow_and_errors_fail(
    aot: ModuleType, change: dict[str, Any], why: str | None
) -> None:
    found = aot.failure({**GOOD, **change})
    assert found is None if why is None else why in (found or "")


def test_the_table_shows_registers_and_failures(aot: ModuleType) -> None:
    broken = {"target": "v6e", "case": "prefill", "bytes": 0, "flops": 0, "error": "no room"}
    text = aot.table([GOOD, broken])
    assert "| h200 | decode | 1 | 2.0 | 125 / 0 B | - | 1.0 | 0.0 | 5.0 of 141 |" in text
    assert "| 80% |" in text
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
