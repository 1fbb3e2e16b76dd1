"""MXFP4: what four bits and a scale stand for, bit by bit, and checkpoints that hold them."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np
import pytest

from octavo.engine.errors import ModelLoadError
from octavo.models.loading.load import load_model
from octavo.models.loading.stored.mxfp4 import find
from octavo.models.tensor_layouts import Index
from octavo.sharding.mesh import make_mesh
from tests.models.loading.stored.writers import Memory

BYTES = np.arange(256, dtype=np.uint8)
SCALES = np.arange(255, dtype=np.uint8)
CONFIG = {"quant_method": "mxfp4"}
PREFIX = "model.layers.1.mlp.experts."


def dequantized(blocks: np.ndarray, scales: np.ndarray, index: Index | None = None) -> np.ndarray:
    """[X, B · 32, rows], or a slice of it, of blocks [X, rows, B, 16] and scales [X, rows, B]."""
    disk = Memory({"up_blocks": blocks, "up_scales": scales})
    tensor = find(disk, ()).tensors["up"]
    return tensor.read(disk, index or tuple(slice(0, size) for size in tensor.shape))


def of_specification(code: int, scale: int) -> float:
    """E2M1: a sign, two bits of exponent with a bias of 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-1.0 if sign else 1.0) * magnitude * 2.0 ** (scale - 127)


def every_byte() -> tuple[np.ndarray, np.ndarray]:
    """One row a scale, and every byte in it: blocks [1, 255, 16, 16] and scales [1, 255, 16]."""
    blocks = np.broadcast_to(BYTES.reshape(16, 16), (1, 255, 16, 16)).copy()
    return blocks, np.broadcast_to(SCALES[:, None], (255, 16))[None].copy()


def test_every_byte_under_every_scale_is_what_the_format_says() -> None:
    found = dequantized(*every_byte())[0].T.reshape(255, 256, 2)
    with np.errstate(over="ignore"):
        want = np.array(
            [[[of_specification(b & 15, s), of_specification(b >> 4, s)] for b in range(256)]
             for s in range(255)]
        ).astype(np.float32)  # fmt: skip
    np.testing.assert_array_equal(found, want)
    assert np.signbit(found[0, 8, 0])  # a zero keeps its sign


def test_every_byte_under_every_scale_is_what_transformers_makes_of_it() -> None:
    torch = pytest.importorskip("torch")
    reference = importlib.import_module("transformers.integrations.mxfp4")
    blocks, scales = every_byte()
    want = reference.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    np.testing.assert_array_equal(dequantized(blocks, scales), want.numpy())


@pytest.mark.parametrize("first", [0, 5, 31, 32, 64])
@pytest.mark.parametrize("last", [65, 70, 96])
def test_a_slice_is_one_of_the_whole(first: int, last: int) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 5, 3, 16), np.uint8)
    scales = rng.integers(120, 130, (3, 5, 3), np.uint8)
    index = (slice(1, 3), slice(first, last), slice(2, 5))
    np.testing.assert_array_equal(
        dequantized(blocks, scales, index), dequantized(blocks, scales)[index]
    )


def test_a_scale_that_makes_no_number_is_refused() -> None:
    blocks, scales = np.zeros((1, 1, 2, 16), np.uint8), np.array([[[3, 255]]], np.uint8)
    with pytest.raises(ModelLoadError, match="up_scales' holds 255, which is not allowed: 0 to"):
        dequantized(blocks, scales)


@pytest.mark.parametrize(
    ("blocks", "scales", "words"),
    [
        ((2, 4, 3, 16), None, "lacks 'w_scales'"),
        ((2, 4, 3, 8), (2, 4, 3), r"w_blocks' = \(2, 4, 3, 8\) is not allowed: four dimensions"),
        ((4, 3, 16), (4, 3), r"w_blocks' = \(4, 3, 16\)"),
        ((2, 4, 3, 16), (2, 4, 2), r"w_scales' = \(2, 4, 2\) is not allowed: \(2, 4, 3\)"),
    ],
)
def test_blocks_that_do_not_fit_their_scales_are_refused(
    blocks: Any, scales: Any, words: str
) -> None:
    shapes = {"w_blocks": blocks} | ({"w_scales": scales} if scales else {})
    stored = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    with pytest.raises(ModelLoadError, match=words):
        find(Memory(stored), ())


def packed(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A gpt-oss checkpoint with random blocks, and one with what they stand for."""
    rng = np.random.default_rng(0)
    small, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            continue
        experts, inputs, outputs = tensor.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(122, 126, blocks.shape[:-1], np.uint8)
        del small[name]
        small |= {name + "_blocks": blocks, name + "_scales": scales}
        plain[name] = np.ascontiguousarray(dequantized(blocks, scales))
    return small, plain


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_checkpoint_of_blocks_is_the_one_that_they_stand_for(
    num_devices: int, tiny_checkpoint: Any, tiny_tensors: Any
) -> None:
    small, plain = packed(tiny_tensors("gpt_oss"))
    want = load_model(tiny_checkpoint("gpt_oss", plain), "float32", make_mesh(num_devices))
    directory = tiny_checkpoint("gpt_oss", small, quantization_config=CONFIG, dtype="bfloat16")
    found = load_model(directory, "float32", make_mesh(num_devices))
    jax.tree.map(np.testing.assert_array_equal, found.weights, want.weights)
    # Four bits and a power of two fit the eight bits of bfloat16.
    half = load_model(directory, "bfloat16").weights["layers"][0]["experts_down"]
    exact = want.weights["layers"][0]["experts_down"]
    np.testing.assert_array_equal(np.asarray(half, np.float32), exact)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"down_proj_scales": None}, "lacks 'model.layers.1.mlp.experts.down_proj_scales'"),
        ({"down_proj_blocks": None}, "lacks 'model.layers.1.mlp.experts.down_proj_blocks'"),
        ({"down_proj_blocks": "float32"}, "the dtype of 'model.layers.1.mlp.experts.down_proj_blo"),
        ({"down_proj_scales": "cut"}, "down_proj_scales' = (8, 32, 1) is not allowed: (8, 32, 2)"),
        ({"down_proj": "both"}, "experts.down_proj' twice, as"),
    ],
    ids=str,
)
def test_a_checkpoint_that_lacks_a_part_is_refused(
    changes: dict[str, Any], words: str, tiny_checkpoint: Any, tiny_tensors: Any
) -> None:
    small, plain = packed(tiny_tensors("gpt_oss"))
    for name, change in changes.items():
        tensor = small.pop(PREFIX + name, plain[PREFIX + "down_proj"])
        if change is not None:
            tensor = tensor.astype(np.float32) if change == "float32" else tensor
            tensor = np.ascontiguousarray(tensor[..., :1]) if change == "cut" else tensor
            small[PREFIX + name] = tensor
    with pytest.raises(ModelLoadError) as caught:
        load_model(tiny_checkpoint("gpt_oss", small, quantization_config=CONFIG))
    assert words in str(caught.value)
