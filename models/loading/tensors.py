"""What a checkpoint must hold, and how its tensors become parameters, slice by slice.

Names and layouts on this side are Hugging Face's, the common tongue of checkpoints: linear weights
are [out, in], query heads of one KV head are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from octavo.models.config import ModelConfig
from octavo.models.loading.aligned import aligned_empty
from octavo.models.parameters import ParamSpec

Index = tuple[slice, ...]
"""One slice a dimension, with start and stop set and step 1."""

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


class TensorSource(Protocol):
    """An open checkpoint.

    Attributes:
        config: the model that the checkpoint describes.
        norms_include_offset: whether stored norm weights already include `config.norm_offset`.
    """

    config: ModelConfig
    norms_include_offset: bool

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and shape, in Hugging Face's names and layouts."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of one tensor as float32, float16 or bfloat16; it may view the file."""
        ...


def layer_prefix(layer: int) -> str:
    """How the names of layer `layer`'s tensors begin."""
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of `config` must hold."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBED: (config.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    layer_shapes = _layer_shapes(config)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes.update({prefix + name: shape for name, shape in layer_shapes.items()})
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size = config.num_heads * head_dim
    kv_size = config.num_checkpoint_kv_heads * head_dim
    attention = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    mlps = (("gate_proj", mlp, hidden), ("up_proj", mlp, hidden), ("down_proj", hidden, mlp))

    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in attention:
        shapes[f"self_attn.{name}.weight"] = (size, hidden)
        if config.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = (size,)
    shapes["self_attn.o_proj.weight"] = (hidden, q_size)
    if config.attention_out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    for name, outputs, inputs in mlps:
        shapes[f"mlp.{name}.weight"] = (outputs, inputs)
        if config.mlp_bias:
            shapes[f"mlp.{name}.bias"] = (outputs,)
    norms = _norm_names(config)
    for parameter, name in norms.items():
        shapes[name] = (head_dim,) if parameter in ("q_norm", "k_norm") else (hidden,)
    return shapes


def _norm_names(config: ModelConfig) -> dict[str, str]:
    """Parameter -> tensor name of a layer's norms, the part where architectures differ."""
    names = {"attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
    if config.post_norms:
        names["post_attn_norm"] = "post_attention_layernorm.weight"
        names["mlp_norm"] = "pre_feedforward_layernorm.weight"
        names["post_mlp_norm"] = "post_feedforward_layernorm.weight"
    if config.qk_norm:
        names["q_norm"] = "self_attn.q_norm.weight"
        names["k_norm"] = "self_attn.k_norm.weight"
    return names


def read_parameter(
    source: TensorSource, config: ModelConfig, path: tuple[str | int, ...], spec: ParamSpec,
    index: Index,
) -> np.ndarray:  # fmt: skip
    """A slice of one parameter, assembled from the tensors it is fused from.

    Args:
        source: the checkpoint.
        config: the model, with its KV heads copied if they are to be.
        path: where the parameter is in the weights, such as ("layers", 3, "wqkv").
        spec: its spec.
        index: the slice, in the parameter's own dimensions.

    Returns:
        An array of the slice's shape in `spec.dtype`; it may view the file.
    """
    name = str(path[-1])
    prefix = layer_prefix(int(path[1])) if path[0] == "layers" else ""
    if name in ("final_norm", *_norm_names(config)):
        norm = FINAL_NORM if name == "final_norm" else prefix + _norm_names(config)[name]
        offset = 0.0 if source.norms_include_offset else config.norm_offset
        return source.read(norm, index).astype(np.float32) + np.float32(offset)
    if name == "embed":
        return source.read(EMBED, index).astype(spec.dtype, copy=False)

    out = aligned_empty([part.stop - part.start for part in index], spec.dtype)
    if name == "lm_head":
        out[...] = source.read(LM_HEAD, index[::-1]).T
    elif name == "wqkv":
        hidden, heads = index[0], index[1]
        full = _qkv(source, config, prefix, "weight", heads, (hidden,))
        out[...] = np.moveaxis(full, -1, 0)[:, :, index[2], index[3]]
    elif name == "bqkv":
        out[...] = _qkv(source, config, prefix, "bias", index[0], ())[:, index[1], index[2]]
    elif name == "wo":
        width = config.num_queries_per_kv * config.head_dim
        columns = slice(index[0].start * width, index[0].stop * width)
        tensor = source.read(prefix + "self_attn.o_proj.weight", (index[3], columns))
        heads_shape = (-1, config.num_queries_per_kv, config.head_dim)
        full = tensor.reshape(tensor.shape[0], *heads_shape)
        out[...] = np.moveaxis(full, 0, -1)[:, index[1], index[2]]
    elif name == "bo":
        out[...] = source.read(prefix + "self_attn.o_proj.bias", index)
    elif name in ("w_gate_up", "b_gate_up"):
        kind = "weight" if name == "w_gate_up" else "bias"
        for row, projection in enumerate(("gate_proj", "up_proj")[index[-2]]):
            # w [F, E] -> [E, F]; b [F] is its own transpose.
            part = source.read(f"{prefix}mlp.{projection}.{kind}", (index[-1], *index[:-2]))
            out[..., row, :] = part.T
    elif name == "w_down":
        out[...] = source.read(prefix + "mlp.down_proj.weight", index[::-1]).T
    elif name == "b_down":
        out[...] = source.read(prefix + "mlp.down_proj.bias", index)
    else:
        raise AssertionError(f"no tensor is known for the parameter {path}")
    return out


def _qkv(
    source: TensorSource, config: ModelConfig, prefix: str, kind: str, heads: slice, rest: Index
) -> np.ndarray:
    """Fused q, k and v of the KV heads `heads`: [heads, G + 2, D, *rest]."""
    head_dim, group, copies = config.head_dim, config.num_queries_per_kv, config.kv_head_copies
    count = heads.stop - heads.start

    def read(name: str, first: int, last: int) -> np.ndarray:
        rows = slice(first * head_dim, last * head_dim)
        tensor = source.read(f"{prefix}self_attn.{name}.{kind}", (rows, *rest))
        return tensor.reshape(last - first, head_dim, *tensor.shape[1:])

    q = read("q_proj", heads.start * group, heads.stop * group)
    first, last = heads.start // copies, -(-heads.stop // copies)
    copied = np.arange(heads.start, heads.stop) // copies - first
    k, v = (read(name, first, last)[copied] for name in ("k_proj", "v_proj"))
    return np.concatenate([q.reshape(count, group, *q.shape[1:]), k[:, None], v[:, None]], axis=1)
