"""The workload as a file that every peer can read, whatever its environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.engine.simulation.workloads.bench_requests import BenchRequest, Range, random_workload

NUM_SINGLE_STREAMS = 3
SINGLE_STREAM = (32, 128)
"""Prompt and output tokens of each single stream."""

NUM_PREFILL, PREFILL_LEN = 8, 256
"""Prompts of the prefill section, and tokens in each."""


def make_workload(
    *,
    batch_sizes: Sequence[int],
    prompt_len: Range,
    output_len: Range,
    vocab_size: int,
    seed: int,
) -> dict[str, Any]:
    """Every section of `peer.PeerWorkload`, fit for JSON.

    The batch of the largest size is `random_workload` of these very arguments; each other section
    has a seed of its own, so that no prompt is in a prefix cache when it is timed.

    Args:
        batch_sizes: numbers of requests, served in ascending order.
        prompt_len, output_len, vocab_size, seed: as for `random_workload`.
    """

    def section(number: int, count: int, prompts: Range, outputs: Range) -> list[dict[str, Any]]:
        section_seed = seed if number == 0 else seed + 1_000 * number
        return _rows(random_workload(count, prompts, outputs, vocab_size, section_seed))

    sizes = sorted(set(batch_sizes))
    single_prompt, single_output = SINGLE_STREAM
    return {
        "warmup": section(1, 4, prompt_len, (8, 8)),
        "batches": {
            str(size): section(0 if size == sizes[-1] else 10 + index, size, prompt_len, output_len)
            for index, size in enumerate(sizes)
        },
        "prefill": section(2, NUM_PREFILL, (PREFILL_LEN, PREFILL_LEN), (1, 1)),
        "single": section(
            3,
            NUM_SINGLE_STREAMS,
            (single_prompt, single_prompt),
            (single_output, single_output),
        ),
    }


def write_workload(workload: dict[str, Any], path: Path, batch_sizes: Sequence[int]) -> None:
    """Write `workload` with only these of its batches."""
    names = sorted(str(size) for size in batch_sizes)
    kept = {name: rows for name, rows in workload["batches"].items() if name in names}
    path.write_text(json.dumps({**workload, "batches": kept}))


def _rows(requests: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    return [
        {"prompt_token_ids": list(request.prompt_token_ids), "max_tokens": request.max_tokens}
        for request in requests
    ]
