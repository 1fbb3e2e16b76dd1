"""Memory arithmetic."""

from __future__ import annotations

import json

import pytest

from octavo.engine.kv.state_snapshots import default_num_places
from octavo.models.packaged import PACKAGED_MODELS
from octavo.server.cli.capacity import Capacity
from octavo.server.cli.main import main

BASE = {
    "weight_bytes": 1000,
    "kv_bytes_per_token": 10,
    "page_size": 16,
    "context_tokens": 100,
    "memory_bytes": 20_000,
    "utilization": 0.9,
    "bandwidth": 1120,
    "network_bandwidth": 560,
}


def test_pages_are_what_memory_leaves_beside_the_weights():
    capacity = Capacity(**BASE)
    assert capacity.kv_bytes_per_page == 160
    assert capacity.kv_pool_bytes == 17_000
    assert capacity.num_pages == 106
    assert capacity.pages_per_request == 7
    assert capacity.max_concurrent_requests == 15
    assert capacity.swap_s == 1.0
    assert capacity.hand_off_s == 2.0


def test_weights_that_do_not_fit_leave_no_page():
    capacity = Capacity(**BASE | {"weight_bytes": 19_000})
    assert capacity.kv_pool_bytes == capacity.num_pages == capacity.max_concurrent_requests == 0


def test_the_trash_page_is_not_counted_for_requests():
    exactly = Capacity(**BASE | {"memory_bytes": 10_000, "weight_bytes": 9_000 - 7 * 160})
    assert exactly.num_pages == 7
    assert exactly.max_concurrent_requests == 0


def test_a_request_s_recurrent_states_take_their_room_beside_its_pages():
    one = Capacity(**BASE)
    row = one.request_kv_bytes  # as much again, and for padding rows once
    with_states = Capacity(**BASE | {"state_bytes": row})
    assert with_states.num_pages == one.num_pages
    spare = one.kv_pool_bytes - one.kv_bytes_per_page - row
    snapshot = row
    assert with_states.max_concurrent_requests == spare // (2 * row + snapshot) > 0


@pytest.mark.parametrize("state_bytes", [0, 1 << 12, 1 << 24, 3 << 24, 1 << 30])
@pytest.mark.parametrize("memory_gib", [2, 40])
def test_as_many_requests_as_their_states_and_snapshots_leave_room_for(
    state_bytes: int, memory_gib: int
) -> None:
    found = Capacity(**BASE | {"state_bytes": state_bytes, "memory_bytes": memory_gib << 30})

    def taken(num_rows: int) -> int:
        places = default_num_places(num_rows, state_bytes) if state_bytes else 0
        return num_rows * (found.request_kv_bytes + state_bytes) + places * state_bytes

    spare = found.kv_pool_bytes - found.kv_bytes_per_page - state_bytes
    most = found.max_concurrent_requests
    assert taken(most) <= max(0, spare) < taken(most + 1)


@pytest.mark.parametrize("file", ["", "config.json"])
def test_plan_reads_a_directory_or_a_config_alone(file, tiny_model, tmp_path, capsys):
    if file:
        (tmp_path / file).write_text((tiny_model / file).read_text())
    model = tmp_path / file if file else tiny_model
    argv = ["plan", "--model", str(model), "--memory", "1MB", "--bandwidth", "1MB/s", "--json"]
    assert main([*argv, "--context", "64"]) == 0
    report = json.loads(capsys.readouterr().out)
    # 2 layers of 2 KV heads of 8, keys and values, in float32.
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert report["kv_bytes_per_page"] == 16 * 256
    numbers = 258 * 32 + 2 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert report["num_parameters"] == numbers
    assert report["weight_bytes"] == 4 * numbers
    assert report["num_pages"] == (900_000 - 4 * numbers) // (16 * 256)
    assert report["swap_s"] == 64 * 256 / 1e6


def test_plan_reads_the_config_of_a_quantized_checkpoint_alone(tiny_model, tmp_path, capsys):
    values = json.loads((tiny_model / "config.json").read_text())
    reports = []
    for how in (None, {"quant_method": "fp8", "weight_block_size": [128, 128]}):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values | {"quantization_config": how}))
        assert main(["plan", "--model", str(path), "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]
    path.write_text(json.dumps(values | {"quantization_config": {"quant_method": "hqq"}}))
    assert main(["plan", "--model", str(path)]) == 1
    assert "quant_method = 'hqq' is not supported" in capsys.readouterr().err


def test_plan_for_people_says_when_the_weights_do_not_fit(tiny_model, capsys):
    assert main(["plan", "--model", str(tiny_model), "--memory", "1KB"]) == 0
    assert "do not fit" in capsys.readouterr().out


@pytest.mark.skipif(
    not PACKAGED_MODELS["smollm2-135m"].is_installed(), reason="smollm2-135m is not installed"
)
def test_plan_counts_weights_and_kv_in_the_form_that_is_asked_for(tiny_model, capsys):
    """As an engine would have them: 4.5 to 8.5 bits a weight where they stay as they are stored."""

    def report(*options):
        assert main(["plan", "--json", "--dtype", "bfloat16", *options]) == 0
        return json.loads(capsys.readouterr().out)

    dense, int8, stored = (
        report("--quantization", form)["weight_bytes"] for form in ("none", "int8", "stored")
    )
    assert 0.5 < int8 / dense < 0.51
    assert 0.3 < stored / dense < 0.4
    values = 576 // 9 * 3 * 2 * 30  # of 3 KV heads, keys and values, 30 layers
    assert report("--kv-cache-dtype", "int8")["kv_bytes_per_token"] == values + 4 * 3 * 2 * 30
    config = str(tiny_model / "config.json")
    assert main(["plan", "--model", config, "--quantization", "stored"]) == 2
    assert "for a config.json alone" in capsys.readouterr().err
    assert main(["plan", "--quantization", "int4"]) == 2
    assert "quantization = 'int4' is not allowed" in capsys.readouterr().err
