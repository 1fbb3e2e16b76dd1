"""Octavo itself, through its public API, on the same workload as its peers."""

from __future__ import annotations

import argparse
import ast
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from peer import Completion, PeerRequest, main


class OctavoEngine:
    """`octavo.LLM` with its defaults, but for what every peer is told and `--engine-arg`, in a
    process of Octavo's own, as those of its commands are."""

    def __init__(self, args: argparse.Namespace) -> None:
        from octavo import LLM, SamplingParams
        from octavo.engine.process.own_process import prepare_to_compute

        prepare_to_compute(os.environ)

        chosen: dict[str, Any] = {
            "dtype": args.dtype,
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_num_seqs,
            **dict(args.engine_arg),
        }
        self.settings = {"version": _version("octavo"), "jax": _version("jax"), **chosen}
        self._sampling_params = SamplingParams
        self._llm = LLM(args.model, progress=False, **chosen)

    def settle(self) -> None:
        """Waits until every program is compiled: it answers before that, at a lower rate."""
        self._llm.engine.wait_until_compiled()

    def generate(self, requests: list[PeerRequest]) -> list[Completion]:
        """See `peer.Engine`."""
        outputs = self._llm.generate(
            [request.prompt_token_ids for request in requests],
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
    metrics = output.metrics
    return Completion(
        list(output.outputs[0].token_ids),
        metrics.first_token_s - metrics.arrival_s,
        metrics.last_token_s - metrics.arrival_s,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source tree"


def _engine_arg(text: str) -> tuple[str, Any]:
    """`"num_decode_steps=8"` as ("num_decode_steps", 8); a value that is no literal is text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine-arg",
        type=_engine_arg,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine argument; may be repeated",
    )


if __name__ == "__main__":
    main("Octavo", OctavoEngine, _add_arguments)
