"""What is read equals what each format's own library makes of the same bytes."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo.models.families.config_fields import ConfigFields
from octavo.models.loading.stored.formats import FORMATS as READERS
from tests.models.loading.stored.writers import FORMATS, Memory

torch = pytest.importorskip("torch")
SHAPE = (48, 96)


def read(name: str, stored: dict[str, np.ndarray]) -> np.ndarray:
    how = FORMATS[name][0]
    disk = Memory({f"layer.{part}": tensor for part, tensor in stored.items()})
    form = READERS[how["quant_method"]].read(ConfigFields(how))
    tensor = form(disk, ()).tensors["layer.weight"]
    assert tensor.shape == SHAPE
    return tensor.read(disk, (slice(0, SHAPE[0]), slice(0, SHAPE[1])))


def to_torch(tensor: np.ndarray) -> Any:
    kinds = {ml_dtypes.bfloat16: torch.bfloat16, ml_dtypes.float8_e4m3fn: torch.float8_e4m3fn}
    for kind, same in kinds.items():
        if tensor.dtype == kind:
            raw = np.ascontiguousarray(tensor).view(np.uint8).copy()
            return torch.from_numpy(raw).view(same).reshape(tensor.shape)
    return torch.from_numpy(np.ascontiguousarray(tensor).copy())


def as_rounded(found: np.ndarray, like: Any) -> Any:
    """The numbers in the dtype that a library computes in: rounded once, as it rounds them."""
    return torch.from_numpy(found.copy()).to(like.dtype)


COMPRESSED = [name for name, (how, _) in FORMATS.items() if how["quant_method"][0] == "c"]


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("seed", range(3))
def test_compressed_tensors_decompresses_to_the_same(name: str, seed: int) -> None:
    pytest.importorskip("compressed_tensors")
    base = importlib.import_module("compressed_tensors.compressors.base")
    importlib.import_module("compressed_tensors.compressors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    how, make = FORMATS[name]
    stored, _ = make(np.random.default_rng(seed), SHAPE)
    if "weight_g_idx" in stored:
        pytest.skip("the library has given up groups in another order")
    found = read(name, stored)
    scheme = quantization.QuantizationScheme(**how["config_groups"]["group_0"])
    compressor = base.BaseCompressor.get_value_from_registry(how["format"])
    parts = {part: to_torch(tensor) for part, tensor in stored.items() if part != "input_scale"}
    want = compressor.decompress(parts, scheme)["weight"]
    assert torch.equal(as_rounded(found, want), want)


@pytest.mark.parametrize("name", ["nf4", "fp4 with plain scales", "int8 by bitsandbytes"])
@pytest.mark.parametrize("seed", range(3))
def test_bitsandbytes_dequantizes_to_the_same(name: str, seed: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    stored, _ = FORMATS[name][1](np.random.default_rng(seed), SHAPE)
    found = read(name, stored)
    parts = {part: to_torch(tensor) for part, tensor in stored.items()}
    if name.startswith("int8"):
        want = functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
    else:
        weight = parts.pop("weight")
        state = functional.QuantState.from_dict(
            {part.removeprefix("weight."): value for part, value in parts.items()}, device="cpu"
        )
        state.dtype = torch.float32
        want = functional.dequantize_4bit(weight, state)
    torch.testing.assert_close(torch.from_numpy(found.copy()), want, rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", ["fp8 in blocks", "fp8 by tensor"])
def test_transformers_dequantizes_eight_bits_to_the_same(name: str) -> None:
    reference = importlib.import_module("transformers.integrations.finegrained_fp8")
    stored, _ = FORMATS[name][1](np.random.default_rng(0), SHAPE)
    parts = {part: to_torch(tensor) for part, tensor in stored.items()}
    operation = reference.Fp8Dequantize(None)
    want = operation._dequantize_one(parts["weight"], parts["weight_scale_inv"])
    assert torch.equal(as_rounded(read(name, stored), want), want)
