"""What a PyTorch user would reach on the same device; a process of its own, one JSON line a row.

    python benchmarks/device/torch_peers.py decode sdpa transformers

- `decode`: Llama-3.1-8B's shapes, static batch, one CUDA graph a step, SDPA over a static cache;
- `sdpa`: `scaled_dot_product_attention` over pages gathered into a dense cache, as attention alone;
- `transformers`: its continuous batching, the suite's offline batch end to end.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 32, 8, 128, 128_256
PAGE = 64


def main() -> None:
    parts = {"decode": decode, "sdpa": sdpa, "transformers": transformers}
    with torch.inference_mode():
        for name in sys.argv[1:]:
            try:
                for row in parts[name]():
                    print(json.dumps(row), flush=True)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:300]}"
                print(json.dumps({"what": f"peer {name}", "failed": text}), flush=True)
            torch.cuda.empty_cache()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def timed(run: Callable[[], Any], count: int = 20) -> float:
    """Median seconds, from CUDA events."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def decode() -> Iterator[dict[str, Any]]:
    qkv = [random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN) for _ in range(LAYERS)]
    out = [random(HIDDEN, HEADS * DIM) for _ in range(LAYERS)]
    gate_up = [random(2 * MLP, HIDDEN) for _ in range(LAYERS)]
    down = [random(HIDDEN, MLP) for _ in range(LAYERS)]
    head, embed = random(VOCAB, HIDDEN), random(VOCAB, HIDDEN)
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    for rows, context in ((1, 1024), (32, 1024), (128, 1024)):
        caches = [
            (random(rows, KV_HEADS, context, DIM), random(rows, KV_HEADS, context, DIM))
            for _ in range(LAYERS)
        ]
        tokens = torch.zeros(rows, dtype=torch.long, device="cuda")
        angle = torch.randn(rows, 1, DIM // 2, device="cuda")
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()

        def rotate(x: torch.Tensor, cos: Any = cos, sin: Any = sin) -> torch.Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        def step(
            rows: int = rows,
            context: int = context,
            caches: Any = caches,
            tokens: torch.Tensor = tokens,
            rotate: Any = rotate,
        ) -> None:
            x = embed[tokens]
            for layer in range(LAYERS):
                y = F.rms_norm(x, (HIDDEN,), norm, 1e-5)
                parts = F.linear(y, qkv[layer]).view(rows, HEADS + 2 * KV_HEADS, DIM)
                q, k, v = parts.split([HEADS, KV_HEADS, KV_HEADS], 1)
                q, k = rotate(q), rotate(k)
                keys, values = caches[layer]
                keys[:, :, context - 1] = k
                values[:, :, context - 1] = v
                y = F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
                x = x + F.linear(y.reshape(rows, HEADS * DIM), out[layer])
                y = F.rms_norm(x, (HIDDEN,), norm, 1e-5)
                gate, up = F.linear(y, gate_up[layer]).chunk(2, -1)
                x = x + F.linear(F.silu(gate) * up, down[layer])
            logits = F.linear(F.rms_norm(x, (HIDDEN,), norm, 1e-5), head)
            tokens.copy_(logits.argmax(-1))

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        seconds = timed(graph.replay)
        yield {"what": f"peer decode {rows} x {context}", "ms": 1e3 * seconds,
               "tok/s": rows / seconds}  # fmt: skip
        del caches, graph


def sdpa() -> Iterator[dict[str, Any]]:
    for rows, new, context in ((64, 1, 4096), (1, 2048, 8192)):
        pages = -(-context // PAGE)
        pool = random(rows * pages, 2, KV_HEADS, PAGE, DIM)
        table = torch.randperm(rows * pages, device="cuda").view(rows, pages)
        q = random(rows, HEADS, new, DIM)
        mask = None
        if new > 1:
            position = torch.arange(context - new, context, device="cuda")
            mask = torch.arange(context, device="cuda")[None, :] <= position[:, None]

        def gather(pool: Any = pool, table: Any = table, rows: int = rows) -> Any:
            dense = pool[table]  # [rows, pages, 2, heads, page, dim]
            dense = dense.permute(2, 0, 3, 1, 4, 5).reshape(2, rows, KV_HEADS, -1, DIM)
            return dense[0], dense[1]

        keys, values = gather()

        def attend(q: Any = q, keys: Any = keys, values: Any = values, mask: Any = mask) -> Any:
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        def both(gather: Any = gather, q: Any = q, mask: Any = mask) -> Any:
            keys, values = gather()
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        name = f"{rows} x {context}, {new} new"
        yield {"what": f"peer sdpa {name}", "µs": 1e6 * timed(attend)}
        yield {"what": f"peer gather and sdpa {name}", "µs": 1e6 * timed(both)}


def transformers() -> Iterator[dict[str, Any]]:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM,
        max_position_embeddings=8192, rope_theta=5e5,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("paged|sdpa")
    count, prompt, answer = 64, 512, 128
    inputs = torch.randint(1, VOCAB, (count, prompt)).tolist()
    settings = GenerationConfig(
        max_new_tokens=answer, min_new_tokens=answer, do_sample=False, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    model.generate_batch(inputs[:4], generation_config=settings, progress_bar=False)
    begun_s = time.perf_counter()
    model.generate_batch(inputs, generation_config=settings, progress_bar=False)
    wall_s = time.perf_counter() - begun_s
    yield {"what": f"peer transformers {count} requests of {prompt} + {answer}",
           "seconds": wall_s, "output tok/s": count * answer / wall_s}  # fmt: skip


if __name__ == "__main__":
    main()
