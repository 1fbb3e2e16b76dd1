"""`octavo tune` writes a table that attention then reads."""

from __future__ import annotations

import json
from functools import partial

import pytest

from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.cpu import tune_products
from octavo.pallas_kernels.ragged_paged_attention import tune as tune_module
from octavo.server.cli.main import main

SMALL = ["--heads", "4/2/16", "--block-size", "64", "--rows", "2", "--row-context", "64"]
SMALL += ["--part", "decode", "--rounds", "1"]


@pytest.mark.parametrize(
    ("options", "kv_dtype"),
    [
        ([], "float32"),
        (["--kv-cache-dtype", "int8"], "int8"),
        # Plain XLA's pools hold the bits of fp8, and tables are found by the pool's own type.
        (["--kv-cache-dtype", "fp8_e4m3"], "uint8"),
    ],
)
def test_a_table_lands_where_engines_look(options, kv_dtype, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_TUNING_DIR", str(tmp_path))
    every = tune_module._candidates
    monkeypatch.setattr(tune_module, "_candidates", lambda *args: every(*args)[:2])
    tuning.forget_tables()
    assert main(["tune", *SMALL, *options]) == 0
    [path] = tmp_path.glob("cpu-*.json")
    assert f"written to {path}" in capsys.readouterr().out
    table = json.loads(path.read_text())
    assert table["device"] == tuning.tuning_device()
    assert table["command"]
    [entry] = table["entries"]
    key = tuning.TuningKey(
        device=table["device"], **{k: entry[k] for k in tuning.key_fields(_any_key())}
    )
    assert tuning.tuned(key) == entry["tiles"]
    assert (key.num_heads, key.page_size, key.part) == (4, 64, "decode")
    assert key.kv_dtype == kv_dtype
    tuning.forget_tables()


def test_the_faster_library_lands_where_engines_look(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_TUNING_DIR", str(tmp_path))
    tuning.forget_tables()
    few = partial(tune_products.tune_products, rows=(1, 8))
    monkeypatch.setattr(tune_products, "tune_products", few)
    monkeypatch.setattr(tune_products, "_LAYERS", 1)  # where a table lands, no time decides
    assert main(["tune", "--part", "products", "--rounds", "1"]) == 0
    [path] = tmp_path.glob("cpu-*.json")
    [measured] = json.loads(path.read_text())["products"]
    assert measured["num_cores"] == tuning.num_cores()
    spans = (measured[name] and tuple(measured[name]) for name in ("int8_split", "bounded_argmax"))
    found = tuning.tuned_products("float32")
    assert found == (measured["library"], *spans, measured["block_quantized"])
    assert f"products in float32: {measured['library']}" in capsys.readouterr().out
    tuning.forget_tables()


def _any_key():
    return tuning.tuning_key("xla", "decode", (1, 4, 16), "float32", (1, 2, 2, 64, 16), "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "5/2/16"], "heads = '5/2/16' is not allowed: HQ/HKV/D"),
        (["--heads", "many"], "heads = 'many'"),
        (["--rounds", "0"], "rounds = 0"),
        (["--part", "products", "--dtype", "bfloat16"], "part = 'products'"),
        (["--part", "products", "--kv-cache-dtype", "int8"], "part = 'products'"),
        ([*SMALL, "--attention-backend", "mosaic_tpu"], "attention_backend"),
    ],
)
def test_what_cannot_be_tuned_is_refused(options, message, capsys):
    assert main(["tune", *options]) == 2
    assert message in capsys.readouterr().err
