"""The declared parameters and the shape of the lowered decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from octavo.models import decoder, layers
from octavo.models.families.table import config_from_hf
from octavo.models.layers import rms_norm, rotary_frequencies
from octavo.models.parameters import ParamSpec, abstract_weights, declare, is_spec, num_parameters
from octavo.models.random_weights import random_weights
from octavo.models.rope import Rope
from octavo.sharding.mesh import make_mesh


def test_every_parameter_names_each_of_its_axes(tiny_name, tiny_values):
    config = config_from_hf(tiny_values(tiny_name))
    specs = declare(config, jnp.dtype(jnp.bfloat16))
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    assert len(specs["layers"]) == config.num_layers
    assert ("lm_head" in specs) == (not config.tie_word_embeddings)
    for spec in leaves:
        assert isinstance(spec, ParamSpec)
        assert len(spec.logical_axes) == len(spec.shape)
    first = next(layer for layer in specs["layers"] if {"wqkv", "w_latent"} & layer.keys())
    assert first["wqkv" if "wqkv" in first else "w_latent"].dtype == jnp.bfloat16
    assert specs["final_norm"].dtype == jnp.float32


def test_the_declaration_counts_what_the_checkpoint_holds(tiny_name, tiny_values, tiny_tensors):
    config = config_from_hf(tiny_values(tiny_name))
    stored = sum(tensor.size for tensor in tiny_tensors(tiny_name).values())
    assert num_parameters(declare(config, jnp.dtype(jnp.float32))) == stored


def test_abstract_and_random_weights_agree_and_follow_the_seed(tiny_values):
    config = config_from_hf(tiny_values("qwen2")).with_tensor_parallel(2)
    dtype = jnp.dtype(jnp.float32)
    abstract = abstract_weights(config, dtype, make_mesh(2))
    weights = random_weights(config, dtype, make_mesh(2), seed=3)
    for expected, made in zip(jax.tree.leaves(abstract), jax.tree.leaves(weights), strict=True):
        assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
        assert made.sharding == expected.sharding
    again = random_weights(config, dtype, make_mesh(1), seed=3)
    other = random_weights(config, dtype, make_mesh(1), seed=4)
    np.testing.assert_array_equal(weights["embed"], again["embed"])
    assert not np.array_equal(weights["embed"], other["embed"])
    layers = again["layers"]
    assert not np.array_equal(layers[0]["w_down"], layers[1]["w_down"])
    assert float(layers[0]["w_down"].std()) == pytest.approx(0.02, rel=0.2)


def _lower(config, *, closes_over_traced: bool):
    weights = abstract_weights(config, jnp.dtype(jnp.float32), make_mesh(1))

    def forward(weights, ids, bias):
        positions = jnp.arange(ids.shape[0], dtype=jnp.int32)

        def attend(q, k, v, cache, attention, sinks):
            del k, v, attention, sinks
            return (q + bias if closes_over_traced else q), cache

        x = decoder.embed(weights, config, ids)
        caches = (None,) * config.num_layers
        x, _ = decoder.run_layers(weights, config, x, positions, attend, caches)
        return decoder.unembed(weights, config, x)

    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    return jax.jit(forward).lower(weights, ids, jax.ShapeDtypeStruct((), jnp.float32))


@pytest.mark.parametrize("closes_over_traced", [False, True])
def test_equal_layers_are_lowered_once(tiny_values, closes_over_traced):
    config = config_from_hf(tiny_values("gemma3"))
    text = _lower(config, closes_over_traced=closes_over_traced).as_text()
    assert text.count("func.func private @_layer") == 2
    assert text.count("call @_layer") == config.num_layers


def test_layers_are_inlined_when_compiled(tiny_values):
    compiled = _lower(config_from_hf(tiny_values("llama")), closes_over_traced=True).compile()
    assert "_layer(" not in compiled.as_text()


@pytest.mark.parametrize("name", ["smollm2", "llama"])
def test_two_devices_exchange_sums_and_never_weights(tiny_values, name):
    """Heads, MLP and vocabulary stay split: only partial sums and token embeddings travel."""
    config = config_from_hf(tiny_values(name)).with_tensor_parallel(2)
    mesh = make_mesh(2)
    weights = abstract_weights(config, jnp.dtype(jnp.float32), mesh)

    def forward(weights, ids):
        x = decoder.embed(weights, config, ids)
        positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
        attend = lambda q, k, v, cache, attention, sinks: (q, cache)  # noqa: E731
        x, _ = decoder.run_layers(
            weights, config, x, positions, attend, (None,) * config.num_layers
        )
        return decoder.unembed(weights, config, x)

    ids = jax.ShapeDtypeStruct((3,), jnp.int32, sharding=NamedSharding(mesh, P()))
    text = jax.jit(forward).lower(weights, ids).compile().as_text()
    assert "all-reduce" in text
    for moved in ("all-gather", "all-to-all", "collective-permute"):
        assert moved not in text


def test_norms_accumulate_in_float32():
    x = jnp.full((1, 4096), 3.0, jnp.bfloat16)
    out = rms_norm(x, jnp.ones((4096,), jnp.float32), 1e-6)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


def test_llama_3_scaling_keeps_short_wavelengths_and_stretches_long_ones(tiny_values):
    config = config_from_hf(tiny_values("llama3"))
    rope, head_dim = config.layers[0].mixer.rotary
    plain = rotary_frequencies(Rope(theta=rope.theta), head_dim)
    scaled = rotary_frequencies(rope, head_dim)
    assert scaled[0] < plain[0]  # a wavelength between the ends of the blend
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8.0, rtol=1e-6)
    assert np.all((plain / scaled >= 1.0 - 1e-6) & (plain / scaled <= 8.0 + 1e-5))


def test_only_a_tpu_is_told_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.arange(6.0).reshape(1, 2, 3)
    assert layers.row_major(x) is x
    monkeypatch.setattr(layers, "device_kind", lambda: "TPU v6 lite")
    np.testing.assert_array_equal(jax.jit(layers.row_major)(x), x)
    assert "layout_constraint" in str(jax.make_jaxpr(layers.row_major)(x))
