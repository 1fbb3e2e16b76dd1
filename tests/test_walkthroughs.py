"""What the walkthroughs say is so: their code runs, and the places that they name are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler import policies
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.step_time import ConstantStepTime
from octavo.engine.simulation.workloads.traffic import Arrival
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.ernie4_5 import ERNIE4_5
from octavo.models.families.table import FAMILIES, config_from_hf

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "walkthroughs"


def code_of(page: str) -> dict[str, Any]:
    """What a page's one block of Python defines."""
    [code] = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.name)
def test_a_page_is_short_and_the_files_it_names_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(text.split()) < 650
    named = re.findall(r"`((?:engine|models|pallas_kernels|server|tests|docs)/[\w./<>]*)`", text)
    missing = [name for name in named if "<" not in name and not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_computes_what_its_reference_does(dtype) -> None:
    names = code_of("add-a-kernel.md")
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (24, 128), dtype)
    bias = jax.random.normal(keys[1], (128,), dtype)
    got = names["bias_silu"](x, bias, interpret=True)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, names["bias_silu_reference"](x, bias))
    assert np.abs(np.asarray(got - x, np.float32)).max() > 0.1


def test_the_family_is_the_one_file_that_the_page_shows() -> None:
    page = (PAGES / "add-a-model-family.md").read_text("utf-8")
    [shown] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown == (ROOT / "models/families/ernie4_5.py").read_text("utf-8")
    assert FAMILIES.count(ERNIE4_5) == 1
    elsewhere = [
        path.name
        for folder in ("engine", "models", "server")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bernie4_5\b", path.read_text("utf-8"), re.IGNORECASE)
    ]
    assert sorted(elsewhere) == ["ernie4_5.py", "table.py"]
    tiny = json.loads((ROOT / "tests/golden/tiny_configs.json").read_text("utf-8"))
    layers = code_of("add-a-model-family.md")["read"](ConfigFields(tiny["ernie4_5"])).layers
    assert layers == config_from_hf(tiny["ernie4_5"]).layers


def test_the_field_is_in_every_place_of_the_table_and_in_the_tests() -> None:
    text = (PAGES / "add-a-field.md").read_text("utf-8")
    places = re.findall(r"^\| `([\w./]+)` \|", text, re.MULTILINE)
    places += re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert len(places) >= 12
    for place in places:
        assert re.search(r"\bmin_p\b", (ROOT / place).read_text("utf-8")), place


def waits_of(policy: str) -> dict[str, float]:
    """When each of nine prompts that come at once, the largest first, has its first token."""
    arrivals = [
        Arrival(request_id=f"r{index}", arrival_s=0.0, num_input=900 - 100 * index, num_output=2)
        for index in range(9)
    ]
    limits = replica_limits(kv_tokens=20_000, num_rows=2, max_num_batched_tokens=256)
    scheduler = Scheduler(limits, policy=policy)
    report = simulate(arrivals, scheduler, ConstantStepTime(0.1))
    return {record.request_id: record.ttft_s for record in report.records}


def test_the_policy_serves_the_smallest_prompt_first(monkeypatch: pytest.MonkeyPatch) -> None:
    make = code_of("add-a-policy.md")["make"]
    monkeypatch.setitem(policies.POLICIES, "smallest-prompt", make)
    in_order = waits_of("fcfs")
    assert min(in_order, key=in_order.__getitem__) == "r0"
    waits = waits_of("smallest-prompt")
    assert min(waits, key=waits.__getitem__) == "r8"
    assert max(waits, key=waits.__getitem__) == "r0"
    bounded = waits_of("smallest-prompt:max_wait_s=0.5")
    assert bounded["r0"] < waits["r0"]
    with pytest.raises(InvalidConfigError, match="patience"):
        waits_of("smallest-prompt:patience=1")
