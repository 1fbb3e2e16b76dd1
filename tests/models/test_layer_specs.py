"""Layers made of blocks: what they share, what they refuse, what is traced of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from octavo.engine.errors import ModelLoadError
from octavo.models import decoder
from octavo.models.blocks import layer_inputs
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.mixers import Mixer, ParallelMixers
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.blocks.short_conv import ShortConv
from octavo.models.cache_spec import PagedKVCache, SharedCache
from octavo.models.config import ModelConfig
from octavo.models.config_dict import config_from_dict, config_to_dict
from octavo.models.families.table import config_from_hf
from octavo.models.parameters import abstract_weights, declare, is_spec
from octavo.models.quantization import EXPERTS, NUM_INPUTS, RECURRENT
from octavo.models.rope import Rope
from octavo.sharding.mesh import make_mesh

NORM = RMSNorm()
WHOLE = Attention(num_heads=4, num_kv_heads=2, head_dim=16, rope=Rope())
WINDOW = dataclasses.replace(WHOLE, sliding_window=5, head_dim=8, scale=0.0)
READER = dataclasses.replace(WHOLE, num_heads=6, shares_cache=True)


def layer(mixer: Mixer, cache_of: int | None = None) -> LayerSpec:
    return LayerSpec(
        mixer=mixer,
        feed_forward=MLP(intermediate_size=48),
        norms=Norms(norm=NORM),
        cache_of=cache_of,
    )


def model(*layers: LayerSpec) -> ModelConfig:
    return ModelConfig(vocab_size=96, hidden_size=32, layers=layers, final_norm=NORM)


def lowered(config: ModelConfig) -> str:
    def forward(weights, embeddings):
        positions = jnp.arange(embeddings.shape[0], dtype=jnp.int32)
        attend = lambda q, k, v, cache, attention, sinks: (q, cache + 1)  # noqa: E731
        caches = tuple(jnp.zeros(()) for _ in config.own_caches())
        return decoder.run_layers(weights, config, embeddings, positions, attend, caches)

    mesh = make_mesh(1)
    weights = abstract_weights(config, jnp.dtype(jnp.float32), mesh)
    embeddings = jax.ShapeDtypeStruct(
        (3, config.hidden_size), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    return jax.jit(forward).lower(weights, embeddings).as_text()


def test_layers_are_traced_once_for_each_spec_whichever_cache_they_read() -> None:
    config = model(
        *(layer(WHOLE), layer(WINDOW), layer(WHOLE), layer(READER, 0), layer(READER, 2)),
        *(layer(READER, 0), layer(WINDOW)),
    )
    text = lowered(config)
    assert text.count("func.func private @_layer") == 3
    assert text.count("call @_layer") == 7
    assert config.cache_places() == ((0,), (1,), (2,), (0,), (2,), (0,), (3,))


def test_a_layer_that_reads_a_cache_has_no_keys_and_values() -> None:
    own, reads = declare(model(layer(WHOLE), layer(READER, 0)), jnp.dtype("float32"))["layers"]
    assert own["wqkv"].shape == (32, 2, 2 + 2, 16)
    assert reads["wqkv"].shape == (32, 2, 3, 16)
    names = [tensor.name for tensor in reads["wqkv"].layout.tensors]
    assert names == ["self_attn.q_proj.weight"]


def test_caches_are_grouped_by_what_they_are() -> None:
    config = model(layer(WHOLE), layer(WINDOW), layer(WHOLE), layer(READER, 0))
    assert config.caches() == (
        (PagedKVCache(num_kv_heads=2, key_size=16, value_size=16),),
        (PagedKVCache(num_kv_heads=2, key_size=8, value_size=8, window=5),),
        (PagedKVCache(num_kv_heads=2, key_size=16, value_size=16),),
        (SharedCache(0),),
    )
    assert len(set(config.own_caches())) == 2


@pytest.mark.parametrize(
    "layers",
    [
        (layer(READER, 0),),
        (layer(READER, 1), layer(WHOLE)),
        (layer(WHOLE), layer(READER, 0), layer(READER, 1)),
        (layer(WINDOW), layer(READER, 0)),
        (layer(dataclasses.replace(WHOLE, sliding_window=5)), layer(READER, 0)),
    ],
    ids=["its own", "a later one", "another reader's", "other heads", "a window"],
)
def test_a_cache_that_cannot_be_read_is_refused(layers: tuple[LayerSpec, ...]) -> None:
    with pytest.raises(ModelLoadError, match=r"layer \d: cache_of = \d is not allowed"):
        model(*layers)


@pytest.mark.parametrize(("mixer", "cache_of"), [(WHOLE, 0), (READER, None), (READER, -1)])
def test_reading_a_cache_takes_a_mixer_that_does_and_its_layer(mixer, cache_of) -> None:
    with pytest.raises(ModelLoadError, match="cache_of = "):
        layer(mixer, cache_of)


def test_kv_heads_are_copied_layer_by_layer_and_alike_where_a_cache_is_shared() -> None:
    many = dataclasses.replace(WINDOW, num_heads=8, num_kv_heads=4)
    config = model(layer(WHOLE), layer(READER, 0), layer(many), layer(WHOLE))
    parallel = config.with_tensor_parallel(4)
    # Six query heads do not divide over four KV heads: the pair stays as it is.
    assert [one.mixer.num_kv_heads for one in parallel.layers] == [2, 2, 4, 4]
    assert [one.mixer.kv_head_copies for one in parallel.layers] == [1, 1, 1, 2]
    assert parallel.without_kv_head_copies() == config
    assert parallel.common(lambda one: one.mixer.num_kv_heads) is None
    assert config.common(lambda one: one.feed_forward.intermediate_size) == 48


def test_a_layer_may_have_no_mixer_or_no_feed_forward() -> None:
    whole = layer(WHOLE)
    mixes = dataclasses.replace(whole, feed_forward=None)
    feeds = dataclasses.replace(whole, mixer=None)
    config = model(mixes, feeds, whole)
    assert config.cache_places() == ((0,), (), (1,))
    assert config.caches()[1] == ()
    assert len(config.own_caches()) == len(config.attentions()) == 2
    first, second, third = declare(config, jnp.dtype("float32"))["layers"]
    assert first.keys() == {"attn_norm", "wqkv", "wo"}
    assert second.keys() == {"mlp_norm", "w_gate_up", "w_down"}
    assert first.keys() | second.keys() == third.keys()
    assert config_from_dict(config_to_dict(config)) == config
    assert config.with_tensor_parallel(4).layers[1] == feeds
    for wrong in (
        {"mixer": None, "feed_forward": None},
        {"norms": Norms(norm=NORM, parallel=True)},
    ):
        with pytest.raises(ModelLoadError, match="a layer of"):
            dataclasses.replace(mixes, **wrong)


def test_a_layer_may_attend_and_recur_side_by_side_with_a_cache_for_each() -> None:
    both = ParallelMixers(attention=WHOLE, recurrent=ShortConv(size=32, width=3))
    config = model(layer(both), layer(WHOLE), layer(READER, 0), layer(both))
    assert config.caches()[0] == (WHOLE.cache(), both.recurrent.cache())
    assert config.cache_places() == ((0, 1), (2,), (0,), (3, 4))
    assert config.attentions() == (WHOLE, WHOLE, READER, WHOLE)
    alone, other, together = (layer(each).num_weights(32) for each in (WHOLE, both.recurrent, both))
    assert together == alone + other - 3 * 32 * 48  # the MLP is there once
    specs = declare(config, jnp.dtype("float32"))["layers"]
    assert specs[0].keys() == specs[1].keys() | {"conv_in", "conv_out", "conv_taps"}
    parallel = config.with_tensor_parallel(4)
    # The first layer's pages are read by six query heads, which do not divide over four.
    assert [one.num_kv_heads for one in parallel.attentions()] == [2, 4, 2, 4]
    assert [one.recurrent for one in parallel.layers] == [one.recurrent for one in config.layers]
    assert parallel.without_kv_head_copies() == config
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": ShortConv(size=32, width=3)}, "attention = ShortConv is not allowed"),
        ({"recurrent": WHOLE}, "recurrent = Attention is not allowed: ShortConv or"),
        ({"recurrent_scale": 0.0}, "recurrent_scale = 0.0"),
    ],
)
def test_only_attention_and_a_recurrence_go_side_by_side(changes, words) -> None:
    mixers = {"attention": WHOLE, "recurrent": ShortConv(size=32, width=3)}
    with pytest.raises(ModelLoadError, match=words):
        ParallelMixers(**mixers | changes)


def test_specs_survive_json() -> None:
    config = model(layer(WHOLE), layer(WINDOW), layer(READER, 0), layer(WHOLE))
    values = config_to_dict(config)
    assert values["layers"] == [0, 1, 2, 0]
    assert config_from_dict(values) == config


def test_blocks_say_what_a_product_contracts(tiny_name, tiny_values) -> None:
    specs = declare(config_from_hf(tiny_values(tiny_name)), jnp.dtype("float32"))
    leaves, _ = jax.tree.flatten_with_path(specs, is_leaf=is_spec)
    said = {path[-1].key: spec.num_inputs for path, spec in leaves}
    wanted = {name: number for name, number in said.items() if number is not None}
    stacked = {path[-1].key for path, spec in leaves if spec.num_stacked}
    assert stacked <= set(EXPERTS)
    wanted = {name: number for name, number in wanted.items() if name not in stacked}
    assert wanted.items() <= NUM_INPUTS.items()
    # An MLP has a gate or none, or is not there, the output layer may be the embedding, few models
    # are recurrent or have inputs for each layer; attention has either keys or latents, whose
    # queries may go through a latent of their own.
    unused = {"lm_head", "w_gate_up", "w_up"} | ({"w_down"} if stacked else set())
    unused |= layer_inputs.NUM_INPUTS.keys()
    unused |= RECURRENT.keys() | {"w_query", "w_query_down"}
    unused |= {"wqkv"} if "w_latent" in wanted else {"w_latent"}
    assert NUM_INPUTS.keys() - wanted.keys() <= unused
