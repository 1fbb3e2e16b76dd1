"""Steps of models as people download them, compiled for the accelerators that they would run on.

    python -m benchmarks.aot.families                    every family, for v6e and h200
    python -m benchmarks.aot.families v6e --only DeepSeek --output benchmarks/results/aot-families

A step has the model's first layers, so many that every kind of them is there; weights and pages are
counted for all. A model is compiled for as many devices of a kind as hold it: where 8 do not, for
pods. Fails where a step does not compile, copies more than a tenth of its weights into another
layout (a layer's times the layers), or does not fit into a device's memory with the whole model's
weights and the pages of its rows.

Sizes are those that `transformers` gives a family where nobody says more, as a rule a published
model's, and for some families a well-known model's own. Nothing is loaded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.aot.compile_target import ENVIRONMENT
from benchmarks.aot.targets import TARGETS

STEPS = ("decode", "prefill")
TIMEOUT_S = 900
MAX_COPIED_SHARE = 0.1
MEMORY_SHARE = 0.9
"""Of a device's memory, what an engine takes by default."""


SLICES = {
    "v6e": {1: "v6e:2x2", 4: "v6e:2x2", 8: "v6e:2x4"},
    "v5p": {4: "v5p:2x2x1", 64: "v5p:4x4x4"},
    "tpu7x": {4: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"},
    "h200": {1: "1x1x1", 8: "1x1x8"},
}
"""Target -> how many devices of it a model may have, and what JAX calls a slice that has them."""
PODS = ("v5p", "tpu7x")
"""Where models are compiled for that no slice of another target holds."""
COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32_768,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256,
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "Qwen3-30B-A3B": COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
    "gpt-oss-20b": COMMON | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201_088,
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "GLM-4.5-Air": COMMON | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151_552,
        "hidden_size": 4096, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "partial_rotary_factor": 0.5, "n_routed_experts": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "attention_bias": True, "use_qk_norm": False,
    },
    "DeepSeek-V2-Lite": DEEPSEEK | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "norm_topk_prob": False, "topk_method": "greedy", "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
    },
    "DeepSeek-V3": DEEPSEEK,
    "Kimi-K2": DEEPSEEK | {
        "vocab_size": 163_840, "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
    },
}  # fmt: skip


def models() -> dict[str, dict[str, Any]]:
    """Name -> configuration: models that people know, and then a model of each other family.

    Families are left out whose `transformers` defaults are no model of theirs.
    """
    from transformers import CONFIG_MAPPING

    from octavo.engine.errors import OctavoError
    from octavo.models.families.table import FAMILIES, config_from_hf

    found = dict(KNOWN)
    known = {values["model_type"] for values in KNOWN.values()}
    for family in FAMILIES:
        if family.model_type in known:
            continue
        given = CONFIG_MAPPING[family.model_type]().get_text_config().to_dict()
        values = given | {
            "architectures": [family.architecture], "model_type": family.model_type
        }  # fmt: skip
        try:
            config_from_hf(values)
        except OctavoError:
            continue
        found[family.architecture.removesuffix("ForCausalLM")] = values
    return found


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the first layers, so many that every kind of layer is among them."""
    from octavo.models.families.table import config_from_hf

    layers = config_from_hf(values).layers
    count = 1 + max(layers.index(layer) for layer in set(layers))
    by_layer: dict[str, Any] = {"num_hidden_layers": count}
    for name, value in values.items():
        if isinstance(value, list) and len(value) == len(layers) > 1:
            by_layer[name] = value[:count]
        elif isinstance(value, dict) and value and all(str(key).isdecimal() for key in value):
            by_layer[name] = {key: one for key, one in value.items() if int(key) < count}
    return values | by_layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(SLICES)}; v6e and h200 if none")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--step", choices=STEPS, help="these alone")
    parser.add_argument("--output", type=Path, help="without suffix: also write .json and .md")
    args = parser.parse_args()
    targets = args.targets or ["v6e", "h200"]
    unknown = sorted(set(targets) - set(SLICES))
    if unknown:
        parser.error(f"target {unknown[0]!r}: want {', '.join(SLICES)}")
    results = []
    for name in models():
        if args.only in name:
            for target in targets:
                found = in_a_process(name, target, [args.step] if args.step else STEPS)
                print("\n".join(table(found).splitlines()[2:]), flush=True)
                results += found
                if args.output:
                    write(args.output, results, sys.argv[1:])
    print(table(results))
    sys.exit(1 if any(failure(result) for result in results) else 0)


def write(path: Path, results: list[dict[str, Any]], arguments: list[str]) -> None:
    """Writes PATH.json and PATH.md."""
    command = "python -m benchmarks.aot.families " + shlex.join(arguments)
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    written = {"command": command, "date": made, "results": results}
    path.with_suffix(".json").write_text(json.dumps(written, indent=1) + "\n")
    path.with_suffix(".md").write_text(f"`{command}`, {made}\n\n{table(results)}\n")


def in_a_process(name: str, target: str, steps: Sequence[str]) -> list[dict[str, Any]]:
    """The results of a model on a target, and on pods where it needs one; each is a process."""
    failed = {"model": name, "target": target, "num_devices": 0, "step": "all"}
    if not TARGETS[target].is_installed:
        print(f"{name} on {target}: skipped, {TARGETS[target].package} is not installed")
        return []
    command = [sys.executable, "-m", "benchmarks.aot.compile_family", target, name, *steps]
    env = os.environ | ENVIRONMENT[TARGETS[target].platform]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        return [failed | {"error": f"not done after {TIMEOUT_S} s"}]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        return [*results, failed | {"error": done.stderr[-600:]}]
    if not results and target not in PODS:
        return [result for pod in PODS for result in in_a_process(name, pod, steps)]
    return results


def failure(result: dict[str, Any]) -> str | None:
    """Why a result fails, if it does."""
    if "error" in result:
        return str(result["error"])
    if result["copied_bytes"] > MAX_COPIED_SHARE * result["whole_weight_bytes"]:
        return f"copies {', '.join(result['copied'])} into another layout"
    limit = MEMORY_SHARE * TARGETS[result["target"]].memory_bytes
    if needed(result) > limit:
        return f"needs {needed(result) / 1e9:.1f} GB of {limit / 1e9:.1f}"
    return None


def needed(result: dict[str, Any]) -> float:
    """Bytes of a device: the whole model's weights, the rows' pages and states, temporaries."""
    return float(result["whole_weight_bytes"] + result["kept_bytes"] + result["temp_bytes"])


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table, a row a program, in figures of one device."""
    head = (
        "| model | on | step | attention | layers compiled, of | compile s | temp MB "
        "| weights copied MB | weights GB | pages and states GB | needs, of GB |\n"
        + "|---" * 11
        + "|"
    )
    rows = []
    for result in results:
        why = failure(result)
        where = f"| {result['model']} | {result['num_devices']} × {result['target']} "
        if "compile_s" not in result:
            rows.append(f"{where}| {result['step']} | FAILED: {why} |" + " |" * 7)
            continue
        compiled, layers = result["num_layers"]
        memory = TARGETS[result["target"]].memory_bytes
        rows.append(
            f"{where}| {result['step']} | {result['attention']} | {compiled}, {layers} "
            f"| {result['compile_s']:.0f} | {result['temp_bytes'] / 1e6:.0f} "
            f"| {result['copied_bytes'] / 1e6:.1f} | {result['whole_weight_bytes'] / 1e9:.1f} "
            f"| {result['kept_bytes'] / 1e9:.2f} | {needed(result) / 1e9:.1f}, {memory / 1e9:.0f}"
            f"{' FAILED: ' + why if why else ''} |"
        )
    return "\n".join([head, *rows])


if __name__ == "__main__":
    main()
