"""Every supported GGUF type, read whole or in slices, equals what the format's library says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.models.loading.gguf import GGUFSource
from octavo.models.loading.gguf_blocks import BLOCK_TYPES
from octavo.models.loading.gguf_file import SUPPORTED_TYPES, GGUFFile

NAME = "model.layers.0.mlp.gate_proj.weight"


def _quantized_model(path, kind, rows, columns):
    """A qwen2 file whose gate matrix holds random blocks of `kind`."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(columns)
    writer.add_feed_forward_length(rows)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((8, columns), np.float32))
    if kind is GGMLQuantizationType.F32:
        writer.add_tensor("blk.0.ffn_gate.weight", raw.view(np.float32))
    elif kind is GGMLQuantizationType.F16:
        writer.add_tensor("blk.0.ffn_gate.weight", raw.view(np.float16))
    else:
        writer.add_tensor("blk.0.ffn_gate.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_a_type_reads_as_its_library_dequantizes_it(type_name, tmp_path):
    kind = GGMLQuantizationType[type_name]
    raw = _quantized_model(tmp_path / "model.gguf", kind, 96, 512)
    source = GGUFSource(tmp_path / "model.gguf")
    assert source.file.tensors["blk.0.ffn_gate.weight"].type is kind
    expected = gguf.quants.dequantize(raw, kind).reshape(96, 512)
    whole = source.read(NAME, (slice(0, 96), slice(0, 512)))
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole, expected)
    part = source.read(NAME, (slice(30, 61), slice(100, 300)))
    np.testing.assert_array_equal(part, expected[30:61, 100:300])


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_a_types_blocks_stand_for_the_numbers_it_reads_as(kind, tmp_path):
    _quantized_model(tmp_path / "model.gguf", kind, 96, 512)
    source = GGUFSource(tmp_path / "model.gguf")
    blocks = source.read_blocks(NAME)
    held = source.block_type(NAME)
    assert blocks.type == held == BLOCK_TYPES[kind]
    assert blocks.codes.shape == (96, 512 // held.codes, held.code_bytes)
    assert blocks.codes.dtype == (np.uint8 if held.nibbles else np.int8)
    assert blocks.scale.dtype == held.scale_dtype
    assert (None if blocks.minimum is None else blocks.minimum.dtype) == held.minimum_dtype
    whole = source.read(NAME, (slice(0, 96), slice(0, 512)))
    np.testing.assert_array_equal(blocks.dequantized(), whole)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_types_without_blocks_say_so(type_name, tmp_path):
    _quantized_model(tmp_path / "model.gguf", GGMLQuantizationType[type_name], 96, 512)
    assert GGUFSource(tmp_path / "model.gguf").block_type(NAME) is None


def test_metadata_of_every_kind_reads_back(tmp_path):
    path = tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    written = {
        "a.uint8": 255, "a.int32": -5, "a.uint64": 2**63, "a.float": 0.5, "a.bool": True,
        "a.text": "grüße", "a.numbers": [1, 2, 3], "a.floats": [0.5, -1.0], "a.texts": ["x", ""],
    }  # fmt: skip
    writer.add_uint8("a.uint8", 255)
    writer.add_int32("a.int32", -5)
    writer.add_uint64("a.uint64", 2**63)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüße")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.floats", [0.5, -1.0])
    writer.add_array("a.texts", ["x", ""])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(path).metadata == {"general.architecture": "llama"} | written
