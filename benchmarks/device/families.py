"""Whole steps of models whose layers are not a Llama's: routed experts, windows with sinks,
recurrent states, latents.

The shapes are real ones, cut to some layers, so that a model is compiled and filled in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device.report import Skipped

DENSE = "Llama-3.2-1B"
"""So small that the host's part of a step shows; of it, sampled rows too."""
SHAPES: dict[str, dict[str, Any]] = {
    DENSE: {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256,
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    },
    "Qwen3-30B-A3B, 12 layers": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151_936,
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
    "gpt-oss-20b, 12 layers": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201_088,
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 12,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
    },
    "DeepSeek-V2-Lite, 6 layers": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "norm_topk_prob": False, "topk_method": "greedy",
    },
    "Qwen3-Next-80B-A3B, 8 layers": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5120,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "partial_rotary_factor": 0.25, "num_experts": 512,
        "num_experts_per_tok": 10, "norm_topk_prob": True, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    },
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    DENSE: {"num_hidden_layers": 2},
    "Qwen3-30B-A3B, 12 layers": {"num_hidden_layers": 2, "moe_intermediate_size": 32,
                                 "num_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss-20b, 12 layers": {
        "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"]},
    "Qwen3-Next-80B-A3B, 8 layers": {
        "num_hidden_layers": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "num_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "DeepSeek-V2-Lite, 6 layers": {
        "num_hidden_layers": 2, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "num_key_value_heads": 4, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
}  # fmt: skip


def measure(
    results: dict[str, Any],
    deadline_s: float,
    *,
    backend: str,
    dtype: str,
    tiny: bool,
    only: str = "",
) -> Iterator[dict[str, Any]]:
    """Decode of one row and of many, and a batch from end to end, of each family."""
    try:
        from benchmarks.device.steps import StepBench, free_device
    except ModuleNotFoundError as error:
        raise Skipped(f"{error.name} is not installed, which whole steps need") from error
    for name in SHAPES:
        if only not in name:
            continue
        if time.monotonic() > deadline_s:
            return
        try:
            config, chosen = _config(name, tiny, backend, dtype)
            is_dense = name == DENSE
            variants = ("greedy", "general") if is_dense else ("greedy",)
            bench = StepBench(chosen, dtype, _sizes(tiny), config, variants)
            yield {"what": f"{name}: programs, {chosen}", "seconds": bench.ready_s}
            for rows in bench.sizes.decode_rows:
                yield _named(name, bench.decode(rows, results))
            for each in (bench.prefill, bench.offline, *((bench.sampled,) if is_dense else ())):
                yield _named(name, each(dict(results)))
            del bench
        except Exception as error:  # the next family may do better
            yield {"what": name, "failed": f"{type(error).__name__}: {str(error)[:400]}"}
        free_device()


def _named(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Shares of the roofs count all weights as read, which few rows do not."""
    row = {
        key: value
        for key, value in row.items()
        if key not in ("GB/s", "of copy", "of matmul", "TFLOP/s")
    }
    return row | {"what": f"{name}: {row['what']}"}


def _sizes(tiny: bool) -> Any:
    from benchmarks.device.steps import Sizes

    if tiny:
        return Sizes((1, 4), 64, 8, 32, 128, 32, 1, (6, 16, 8))
    return Sizes((1, 64), 1024, 24, 2048, 4096, 2048, 1, (64, 512, 128))


def _config(name: str, tiny: bool, backend: str, dtype: str) -> tuple[Any, Any]:
    """A family's model, and the attention that an engine takes for it here."""
    from octavo.engine.execution.platform.kernel_choice import choose_attention
    from octavo.models.families.table import config_from_hf
    from octavo.sharding.mesh import make_mesh

    values = SHAPES[name] | {
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32_768,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": dtype,
    }  # fmt: skip
    if tiny:
        values |= {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
        values |= SMALL[name]
    config = config_from_hf(values)
    chosen = choose_attention(
        "auto" if backend.startswith("mosaic") else backend, config, make_mesh(1),
        dtype=jnp.dtype(dtype), kv_dtype=jnp.dtype(dtype), page_size=16 if tiny else 64,
        max_tokens=2048,
    )  # fmt: skip
    jax.clear_caches()
    return config, chosen
