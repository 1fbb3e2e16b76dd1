"""Hugging Face transformers on torch's CPU build: static batches, left-padded.

A static batch runs until its longest output is done, as `generate` does; only the tokens that were
asked for are counted.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers
from peer import Completion, PeerRequest, main
from transformers.generation.streamers import BaseStreamer


class StepTimes(BaseStreamer):
    """Notes when each step's tokens came; `generate` puts the prompt first."""

    def __init__(self) -> None:
        self.stamps_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A step's tokens (or the prompt) are on the host."""
        self.stamps_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


class TransformersEngine:
    """`AutoModelForCausalLM.generate` over batches of `--batch-size` in the workload's order."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._batch_size: int = args.batch_size
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype)
        ).eval()
        self._model.generation_config = transformers.GenerationConfig(do_sample=False)
        self.settings = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "dtype": args.dtype,
            "batch_size": args.batch_size,
            "threads": torch.get_num_threads(),
        }

    def generate(self, requests: list[PeerRequest]) -> list[Completion]:
        """See `peer.Engine`."""
        began_s = time.perf_counter()
        completions: list[Completion] = []
        for first in range(0, len(requests), self._batch_size):
            completions += self._generate_batch(requests[first : first + self._batch_size], began_s)
        return completions

    def _generate_batch(self, requests: list[PeerRequest], began_s: float) -> list[Completion]:
        longest = max(len(request.prompt_token_ids) for request in requests)
        prompts = torch.zeros((len(requests), longest), dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, request in enumerate(requests):
            prompts[row, longest - len(request.prompt_token_ids) :] = torch.tensor(
                request.prompt_token_ids
            )
            mask[row, longest - len(request.prompt_token_ids) :] = 1
        # A streamer takes one row only, so a batch has no times of its own tokens.
        times = StepTimes() if len(requests) == 1 else None
        with torch.inference_mode():
            tokens = self._model.generate(
                input_ids=prompts,
                attention_mask=mask,
                max_new_tokens=max(request.max_tokens for request in requests),
                streamer=times,
            )
        stamps_s = times.stamps_s if times is not None else []
        return [
            Completion(
                tokens[row, longest : longest + request.max_tokens].tolist(),
                stamps_s[1] - began_s if stamps_s else None,
                stamps_s[-1] - began_s if stamps_s else None,
            )
            for row, request in enumerate(requests)
        ]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=32)


if __name__ == "__main__":
    main("transformers", TransformersEngine, _add_arguments)
