"""Random weights as each format stores them, beside the numbers that they stand for.

Each is written plainly, bit by bit where bits are packed, and knows nothing of what reads it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from octavo.models.loading.stored.disk import Entry
from octavo.models.tensor_layouts import Index

Stored = dict[str, np.ndarray]
"""What follows the name of a layer -> a tensor on disk; "weight_shape" has its dot before it."""
Made = tuple[Stored, np.ndarray]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
F8 = ml_dtypes.float8_e4m3fn
_THIRDS = [0.0, 0.0625 / 12, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25]
TABLES = {
    # QLoRA, appendix E.
    "nf4": [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    "fp4": [*_THIRDS, *(-third for third in _THIRDS)],
}  # fmt: skip
"""What four bits stand for in bitsandbytes."""
DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(F8): "F8_E4M3",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A file of any dtypes, F8 among them, which the library does not write."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class Memory:
    """Tensors as an open checkpoint."""

    where = "here"

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors = tensors
        self.entries = {
            name: Entry(tensor.shape, DTYPES[tensor.dtype], name)
            for name, tensor in tensors.items()
        }

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        return self._tensors[name] if index is None else self._tensors[name][index]


def in_words(integers: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of integers along the last dimension, from the lowest bit on, without gaps."""
    rows = integers.reshape(-1, integers.shape[-1])
    num_words = -(-rows.shape[1] * bits // 32)
    words = []
    for row in rows:
        number = sum(int(value) << (bits * place) for place, value in enumerate(row))
        words += [(number >> (32 * word)) & 0xFFFFFFFF for word in range(num_words)]
    return np.array(words, np.uint32).view(np.int32).reshape(*integers.shape[:-1], num_words)


def in_halves(codes: np.ndarray, *, first_is_high: bool = False) -> np.ndarray:
    """uint8 of two codes of four bits each."""
    first, second = codes[..., 0::2], codes[..., 1::2]
    high, low = (first, second) if first_is_high else (second, first)
    return (high << 4 | low).astype(np.uint8)


def spread(values: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """The value of each number's block."""
    rows = values.astype(np.float32).repeat(block[0], 0)[: shape[0]]
    return rows.repeat(block[1], 1)[:, : shape[1]]


def eights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Every finite number of E4M3 may occur."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[codes & 127 == 127] = 0
    return codes.view(F8)


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.uniform(0.001, 0.02, shape).astype(dtype)


def fp8(rng: np.random.Generator, shape: tuple[int, int], block: tuple[int, int] | None) -> Made:
    numbers = eights(rng, shape)
    sizes = block or shape
    scales = scales_of(rng, (-(-shape[0] // sizes[0]), -(-shape[1] // sizes[1])), np.float32)
    dense = numbers.astype(np.float32) * spread(scales, sizes, shape)
    stored = scales if block else scales.reshape(())
    return {
        "weight": numbers,
        "weight_scale_inv": stored,
        "activation_scale": np.float32(2.0).reshape(()),
    }, dense


def awq(rng: np.random.Generator, shape: tuple[int, int], group: int) -> Made:
    outputs, inputs = shape
    groups = -(-inputs // group)
    codes, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (groups, outputs))
    scales = scales_of(rng, (groups, outputs), np.float16)
    # The word's nibbles, from the lowest: outputs 0, 2, 4, 6, 1, 3, 5, 7.
    places = [8 * word + out for word in range(outputs // 8) for out in (0, 2, 4, 6, 1, 3, 5, 7)]
    dense = np.empty(shape, np.float32)
    for j in range(inputs):
        g = j // group
        dense[:, j] = (codes[j] - zeros[g]).astype(np.float32) * scales[g].astype(np.float32)
    stored = {
        "qweight": in_words(codes[:, places], 4),
        "qzeros": in_words(zeros[:, places], 4),
        "scales": scales,
    }
    return stored, dense


def gptq(
    rng: np.random.Generator,
    shape: tuple[int, int],
    bits: int,
    group: int,
    *,
    ordered: bool,
    v2: bool,
) -> Made:
    outputs, inputs = shape
    groups = -(-inputs // group)
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(0, 1 << bits, (groups, outputs))
    scales = scales_of(rng, (groups, outputs), np.float16)
    of_input = np.arange(inputs) // group
    if ordered:
        of_input = rng.permutation(of_input)
    dense = (codes - zeros[of_input]).T.astype(np.float32) * scales.astype(np.float32)[of_input].T
    kept = zeros if v2 else (zeros - 1) % (1 << bits)
    stored = {
        "qweight": in_words(codes.T, bits).T,
        "qzeros": in_words(kept, bits),
        "scales": scales,
        "g_idx": of_input.astype(np.int32),
        "bias": np.zeros(outputs, np.float16),
    }
    return stored, dense


def packed(
    rng: np.random.Generator,
    shape: tuple[int, int],
    bits: int,
    group: int | None,
    *,
    zeros: bool,
    ordered: bool = False,
) -> Made:
    size = group or shape[1]
    groups = -(-shape[1] // size)
    low = -(1 << (bits - 1))
    integers = rng.integers(low, -low, shape)
    scales = scales_of(rng, (shape[0], groups), ml_dtypes.bfloat16)
    of_input = np.arange(shape[1]) // size
    if ordered:
        of_input = rng.permutation(of_input)
    points = rng.integers(low, -low, (shape[0], groups)) if zeros else np.zeros_like(scales, int)
    dense = (integers - points[:, of_input]).astype(np.float32) * scales.astype(np.float32)[
        :, of_input
    ]
    stored = {
        "weight_packed": in_words(integers - low, bits),
        "weight_scale": scales,
        "weight_shape": np.array(shape, np.int64),
    }
    if zeros:
        stored["weight_zero_point"] = in_words((points - low).T, bits).T
    if ordered:
        stored["weight_g_idx"] = of_input.astype(np.int32)
    return stored, dense


def plain(
    rng: np.random.Generator,
    shape: tuple[int, int],
    block: tuple[int, int],
    *,
    floats: bool,
    zeros: bool = False,
) -> Made:
    size = (min(block[0], shape[0]), min(block[1], shape[1]))
    blocks = (-(-shape[0] // size[0]), -(-shape[1] // size[1]))
    numbers = eights(rng, shape) if floats else rng.integers(-128, 128, shape).astype(np.int8)
    scales = scales_of(rng, blocks, ml_dtypes.bfloat16)
    stored = {"weight": numbers, "weight_scale": scales.reshape(1) if scales.size == 1 else scales}
    dense = numbers.astype(np.float32)
    if zeros:
        points = rng.integers(-128, 128, blocks).astype(np.int8)
        stored["weight_zero_point"] = points
        dense = dense - spread(points, size, shape)
    stored["input_scale"] = np.float32([0.5])
    return stored, dense * spread(scales, size, shape)


def fours(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    codes = rng.integers(0, 16, shape)
    return codes, np.array(E2M1, np.float32)[codes]


def nvfp4(rng: np.random.Generator, shape: tuple[int, int], *, by_modelopt: bool) -> Made:
    codes, numbers = fours(rng, shape)
    scales = np.abs(eights(rng, (shape[0], -(-shape[1] // 16))).astype(np.float32)).astype(F8)
    whole = np.float32(rng.uniform(0.001, 0.01))
    wide = spread(scales, (1, 16), shape)
    if by_modelopt:
        stored = {
            "weight": in_halves(codes),
            "weight_scale": scales,
            "weight_scale_2": whole.reshape(()),
            "input_scale": np.float32(1.0).reshape(()),
        }
        return stored, numbers * (wide * whole)
    whole = np.float32(1 / whole)
    stored = {
        "weight_packed": in_halves(codes),
        "weight_scale": scales,
        "weight_global_scale": whole.reshape(1),
    }
    return stored, numbers * (wide / whole)


def mx(rng: np.random.Generator, shape: tuple[int, int], *, bits: int) -> Made:
    exponents = rng.integers(115, 125, (shape[0], -(-shape[1] // 32))).astype(np.uint8)
    wide = 2.0 ** (spread(exponents, (1, 32), shape) - 127)
    if bits == 8:
        numbers = eights(rng, shape)
        return {"weight": numbers, "weight_scale": exponents}, numbers.astype(np.float32) * wide
    codes, dense = fours(rng, shape)
    return {"weight_packed": in_halves(codes), "weight_scale": exponents}, dense * wide


def table_coded(
    rng: np.random.Generator, shape: tuple[int, int], *, kind: str, nested: bool
) -> Made:
    size = 64
    count = shape[0] * shape[1]
    codes = rng.integers(0, 16, count)
    table = np.array(TABLES[kind], np.float32)
    num_scales = -(-count // size)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": "bfloat16",
        "shape": list(shape),
    }
    stored = {
        "weight": in_halves(np.pad(codes, (0, count % 2)), first_is_high=True).reshape(-1, 1),
        "weight.quant_map": table,
    }
    if nested:
        of_scales = rng.integers(0, 256, num_scales).astype(np.uint8)
        more = rng.uniform(-1, 1, 256).astype(np.float32)
        scales_of_scales = scales_of(rng, (-(-num_scales // 8),), np.float32)
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.03125}
        stored |= {
            "weight.absmax": of_scales,
            "weight.nested_absmax": scales_of_scales,
            "weight.nested_quant_map": more,
        }
        scales = more[of_scales] * scales_of_scales.repeat(8)[:num_scales] + np.float32(0.03125)
    else:
        scales = scales_of(rng, (num_scales,), np.float32)
        stored["weight.absmax"] = scales
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(
        json.dumps(state).encode(), np.uint8
    )
    dense = table[codes] * scales.repeat(size)[:count]
    return stored, dense.reshape(shape)


def of_eight_bits(rng: np.random.Generator, shape: tuple[int, int]) -> Made:
    numbers = rng.integers(-127, 128, shape).astype(np.int8)
    largest = rng.uniform(0.1, 2.0, shape[0]).astype(np.float32)
    dense = numbers.astype(np.float32) * largest[:, None] * np.float32(1 / 127)
    return {"weight": numbers, "SCB": largest, "weight_format": np.uint8(0).reshape(())}, dense


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


Maker = Callable[[np.random.Generator, tuple[int, int]], Made]


def _gptq(bits: int, *, ordered: bool = False, v2: bool = False) -> tuple[dict[str, Any], Maker]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": ordered}
    config["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
    return config, lambda rng, shape: gptq(rng, shape, bits, 16, ordered=ordered, v2=v2)


def _packed(bits: int, group: int | None, **more: bool) -> tuple[dict[str, Any], Maker]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    symmetric = not more["zeros"]
    config = compressed(
        "pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **strategy
    )
    return config, lambda rng, shape: packed(rng, shape, bits, group, **more)


FORMATS: dict[str, tuple[dict[str, Any], Maker]] = {
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"},
        lambda rng, shape: fp8(rng, shape, (16, 32)),
    ),
    "fp8 by tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda rng, shape: fp8(rng, shape, None),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
        lambda rng, shape: awq(rng, shape, 16),
    ),
    "gptq of 2 bits": _gptq(2),
    "gptq of 3 bits": _gptq(3),
    "gptq of 4 bits": _gptq(4),
    "gptq of 4 bits in order of activations": _gptq(4, ordered=True),
    "gptq of 8 bits, second form": _gptq(8, v2=True),
    "packed 4 bits by group": _packed(4, 16, zeros=False),
    "packed 4 bits by group, with zeros": _packed(4, 16, zeros=True),
    "packed 4 bits, ordered": _packed(4, 16, zeros=True, ordered=True),
    "packed 8 bits by output": _packed(8, None, zeros=False),
    "packed 2 bits": _packed(2, 16, zeros=True),
    "int8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        lambda rng, shape: plain(rng, shape, (1, 999), floats=False),
    ),
    "int8 with zeros": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        lambda rng, shape: plain(rng, shape, (1, 999), floats=False, zeros=True),
    ),
    "fp8 by output": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda rng, shape: plain(rng, shape, (1, 999), floats=True),
    ),
    "fp8 by tensor, compressed": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        lambda rng, shape: plain(rng, shape, (999, 999), floats=True),
    ),
    "fp8 in blocks, compressed": (
        compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
        ),
        lambda rng, shape: plain(rng, shape, (16, 32), floats=True),
    ),
    "nvfp4, compressed": (
        compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
        lambda rng, shape: nvfp4(rng, shape, by_modelopt=False),
    ),
    "mxfp4, compressed": (
        compressed(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
        ),
        lambda rng, shape: mx(rng, shape, bits=4),
    ),
    "mxfp8, compressed": (
        compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
        lambda rng, shape: mx(rng, shape, bits=8),
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda rng, shape: nvfp4(rng, shape, by_modelopt=True),
    ),
    "fp8 by modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda rng, shape: plain(rng, shape, (999, 999), floats=True),
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda rng, shape: table_coded(rng, shape, kind="nf4", nested=True),
    ),
    "fp4 with plain scales": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda rng, shape: table_coded(rng, shape, kind="fp4", nested=False),
    ),
    "int8 by bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        of_eight_bits,
    ),
}
"""Name -> a quantization_config, and what stores a layer so."""


def quantized(
    name: str, tensors: Mapping[str, np.ndarray], seed: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A checkpoint whose linear layers a format stores, and one of the numbers they stand for."""
    rng = np.random.default_rng(seed)
    make = FORMATS[name][1]
    stored, dense = dict(tensors), dict(tensors)
    for key, tensor in tensors.items():
        is_linear = key.startswith("model.layers.") and key.endswith("_proj.weight")
        # Three bits fill words in runs of 32 inputs, which is what that format wants.
        if not is_linear or (name == "gptq of 3 bits" and tensor.shape[1] % 32):
            continue
        parts, dense[key] = make(rng, (tensor.shape[0], tensor.shape[1]))
        del stored[key]
        stored |= {key.removesuffix("weight") + part: value for part, value in parts.items()}
    return stored, dense


def stores_blocks(name: str) -> bool:
    """Whether a format's layers are blocks of small codes whose inputs follow each other."""
    without = {
        "packed 4 bits, ordered",
        "gptq of 4 bits in order of activations",
        "int8 by bitsandbytes",
    }
    return name not in without and bool(re.match("awq|gptq|packed|int8|nvfp4|mxfp4", name))
