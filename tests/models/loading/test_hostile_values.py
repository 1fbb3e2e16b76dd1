"""No value in a checkpoint's files ends in anything but a model or a typed error, at little cost.

The openings happen in a process of its own, whose memory is limited.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from octavo.models.loading.gguf_file import MAX_VALUES, GGUFFile
from octavo.models.loading.load import load_model, save_model

PROGRAM = Path(__file__).with_name("hostile_values.py")
TOKENS = ["<s>", "</s>", *(f"t{number}" for number in range(10))]


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    """The process that opens."""
    running = subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    with running:
        yield running
        assert running.stdin is not None
        running.stdin.close()


@pytest.fixture
def openings(program: Any) -> Callable[..., tuple[int, int]]:
    """Path and names of files -> models opened and refused; nothing else may happen."""

    def ask(path: Path, *names: str) -> tuple[int, int]:
        told = _ask(program, path, *names)
        assert told["reports"] == []
        return told["opened"], told["refused"]

    return ask


@pytest.fixture
def refused(program: Any) -> Callable[..., None]:
    """Path of a checkpoint that must be refused, and words of the error."""

    def check(path: Path, *words: str) -> None:
        told = _ask(program, path)
        assert told["reports"] == []
        assert told["refused"] == 1
        for word in words:
            assert word in told["message"]

    return check


def _ask(program: Any, *arguments: Any) -> dict[str, Any]:
    program.stdin.write(json.dumps(list(map(str, arguments))) + "\n")
    program.stdin.flush()
    answer: dict[str, Any] = json.loads(program.stdout.readline())
    return answer


def add_tokenizer(directory: Path) -> Path:
    """A tokenizer with every kind of file that is read beside a model."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate([*TOKENS, "a", "b", "ab"])},
            merges=[("a", "b")],
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(TOKENS[:2])
    backend.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    documents = {
        "tokenizer_config.json": named
        | {
            "chat_template": [{"name": "default", "template": "{{ messages }}"}],
            "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
        },
        "special_tokens_map.json": named,
        "generation_config.json": {"eos_token_id": [1, 2]},
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    "name", ["llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi4_long", "ministral3"]
)
def test_a_config_with_any_value_anywhere(openings, tiny_checkpoint, name):
    opened, refused = openings(add_tokenizer(tiny_checkpoint(name)), "config.json")
    assert opened > 20  # much may be said of what changes nothing
    assert refused > 300


def test_files_beside_a_config_with_any_value_anywhere(openings, tiny_checkpoint, tiny_tensors):
    directory = add_tokenizer(tiny_checkpoint("llama"))
    index = dict.fromkeys(list(tiny_tensors("llama"))[:2], "model.safetensors")
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    names = [each.name for each in directory.glob("*.json") if each.name != "config.json"]
    assert len(names) == 5
    opened, refused = openings(directory, *names)
    assert opened > 100
    assert refused > 500


def test_an_orbax_checkpoint_with_any_value_anywhere(openings, tiny_checkpoint, tmp_path):
    saved = tmp_path / "saved"
    save_model(load_model(add_tokenizer(tiny_checkpoint("llama3"))), saved)
    opened, refused = openings(saved, "octavo_config.json")
    assert opened > 20
    assert refused > 300


def add_gguf_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_scores([0.0] * 96)
    writer.add_token_types([1] * 96)
    writer.add_unk_token_id(0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi4_long", "ministral3"])
def test_a_gguf_file_with_any_value_anywhere(openings, tiny_gguf, name):
    opened, refused = openings(tiny_gguf(name, add_gguf_tokenizer), "metadata")
    assert opened > 10
    assert refused > 200


class TestBombs:
    """Small files that claim to be large."""

    @pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3"])
    def test_ten_million_layers(self, refused, tiny_checkpoint, name):
        directory = add_tokenizer(tiny_checkpoint(name, num_hidden_layers=10**7))
        refused(directory, "num_hidden_layers = 10000000 is not allowed", "4096")

    def test_ten_million_layers_of_a_gguf_file(self, refused, tiny_gguf):
        path = tiny_gguf("gemma3", add_gguf_tokenizer)
        key = b"gemma3.block_count" + struct.pack("<I", 4)
        data = path.read_bytes()
        start = data.index(key) + len(key)
        path.write_bytes(data[:start] + struct.pack("<I", 10**7) + data[start + 4 :])
        refused(path, "gemma3.block_count = 10000000 is not allowed")

    @pytest.mark.parametrize("token_id", [10**7, 2**31, 2**32 - 1])
    def test_a_token_with_an_id_out_of_all_proportion(self, refused, tiny_checkpoint, token_id):
        directory = add_tokenizer(tiny_checkpoint("llama"))
        path = directory / "tokenizer.json"
        document = json.loads(path.read_text())
        document["model"]["vocab"]["ab"] = token_id
        path.write_text(json.dumps(document))
        refused(directory, f"the token id {token_id} is not allowed")

    def test_a_million_tensors(self, refused, tiny_checkpoint):
        directory = add_tokenizer(tiny_checkpoint("llama"))
        entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        header = b"{" + b",".join(entry % number for number in range(10**6)) + b"}"
        path = directory / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        refused(directory, "its header is longer than")

    def test_many_tensors_in_many_shards(self, refused, tiny_checkpoint):
        directory = add_tokenizer(tiny_checkpoint("llama"))
        nothing = np.zeros((0,), np.float32)
        index = {}
        for shard in range(5):
            names = [f"{shard}.{number}" for number in range(60_000)]
            save_file(dict.fromkeys(names, nothing), directory / f"{shard}.safetensors")
            index |= dict.fromkeys(names, f"{shard}.safetensors")
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": index}))
        refused(directory, "300000 tensors is not allowed: at most 262144")

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
    def test_a_sparse_file_beside_the_weights(self, refused, tiny_checkpoint, name):
        directory = add_tokenizer(tiny_checkpoint("llama"))
        (directory / name).touch()
        os.truncate(directory / name, 2**34)
        refused(directory, name, "17179869184 bytes is not allowed")

    @pytest.mark.parametrize(
        ("kind", "count"), [(0, 2**30), (0, MAX_VALUES + 1), (8, 2**29), (9, 2**29), (12, 2**28)]
    )
    def test_an_array_in_a_sparse_gguf_file(self, refused, tmp_path, kind, count):
        path = tmp_path / "sparse.gguf"
        key = b"general.tags"
        path.write_bytes(
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
            + struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, kind, count)
        )  # fmt: skip
        os.truncate(path, 2**36)
        refused(path, "entries of arrays", str(count))

    @pytest.mark.parametrize("counts", [(2**31, 0), (0, 2**31), (10**6, 0), (0, 10**6)])
    def test_counts_of_a_sparse_gguf_file(self, refused, tmp_path, counts):
        path = tmp_path / "sparse.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
        os.truncate(path, 2**36)
        refused(path, " count = ")

    def test_tensors_that_share_their_bytes(self, refused, tiny_gguf):
        path = tiny_gguf("llama", add_gguf_tokenizer)
        tensors = sorted(GGUFFile(path).tensors.values(), key=lambda tensor: tensor.offset)
        data = path.read_bytes()
        first = tensors[0].offset
        largest = max(tensor.num_bytes for tensor in tensors)
        for tensor in tensors:
            at = data.index(struct.pack("<Q", len(tensor.name)) + tensor.name.encode())
            at += 8 + len(tensor.name) + 4 + 8 * len(tensor.shape) + 4
            data = data[:at] + struct.pack("<Q", 0) + data[at + 8 :]
        path.write_bytes(data[: first + largest])
        refused(path, "its tensors overlap")

    def test_rope_factors_without_end(self, refused, tiny_gguf):
        path = tiny_gguf(
            "llama",
            lambda writer: (
                add_gguf_tokenizer(writer),
                writer.add_tensor("rope_freqs.weight", np.ones(10**6, np.float32)),
            ),
        )
        refused(path, "rope_freqs.weight of shape (1000000,)")

    def test_a_token_with_more_parts_than_can_be_tried(self, refused, tiny_gguf):
        path = tiny_gguf("llama", add_gguf_tokenizer)
        data = path.read_bytes()
        old = struct.pack("<Q", 4) + b"<95>"
        long = b"a" * 2_000_000
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, struct.pack("<Q", len(long)) + long) + bytes(64))
        refused(path, "tokens are too long to find their merges")
