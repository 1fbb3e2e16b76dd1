"""`octavo bench serve`: a serving benchmark, as vLLM's is, of a running server.

Any with OpenAI's HTTP API, or Octavo over gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.arrivals import POISSON, ArrivalProcess, parse_process
from octavo.engine.simulation.workloads.bench_requests import (
    BenchRequest,
    bench_requests,
    parse_range,
    random_workload,
)
from octavo.engine.simulation.workloads.traffic import TrafficClass, checked_target
from octavo.server.cli.workload_args import add_workload_args, asked_workload

if TYPE_CHECKING:
    from octavo.server.load.arrivals import Target
    from octavo.server.load.figures import Sent

GOALS = ("ttft", "tpot", "e2el")

UNITS = {
    "completed": "requests",
    "failed": "requests",
    "duration": "s",
    "total_input_tokens": "tokens",
    "total_output_tokens": "tokens",
    "request_throughput": "requests/s",
    "request_goodput": "requests/s",
    "output_throughput": "tokens/s",
    "total_token_throughput": "tokens/s",
}
"""Of the figures whose names do not say."""


def add_parser(kinds: Any) -> None:
    """Adds `serve` to what `bench` measures."""
    parser = kinds.add_parser(
        "serve", help="a running server, over HTTP or gRPC", description=__doc__
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", metavar="URL", help="http://HOST:PORT")
    where.add_argument("--grpc", metavar="HOST:PORT", help="an Octavo server's gRPC address")
    parser.add_argument("--model", help="its name there (default: the first that is served)")
    parser.add_argument("--num-prompts", "--num-requests", type=int, default=128)
    parser.add_argument("--prompt-len", "--input-len", default="16:256", help="tokens, LOW:HIGH")
    parser.add_argument("--output-len", default="16:128", help="tokens, LOW:HIGH")
    parser.add_argument("--shared-prefix-len", type=int, default=0)
    add_workload_args(parser.add_argument_group("workload, in place of random lengths"))
    parser.add_argument(
        "--vocab-size", type=int, default=10_000, help="prompts are token ids below it"
    )
    parser.add_argument(
        "--request-rate", "--rate", type=float,
        help="requests a second, arriving at random, or as the workload's do (default: all at "
        "once, or the workload's own)",
    )  # fmt: skip
    parser.add_argument("--max-concurrency", type=int, help="most requests in flight")
    parser.add_argument("--seed", type=int, default=1, help="of the workload")
    parser.add_argument("--stop-at-eos", action="store_true", help="do not send ignore_eos")
    parser.add_argument(
        "--goodput", action="append", default=[], metavar="NAME:MS",
        help=f"a goal for {', '.join(GOALS)} (repeatable); requests within all of them are counted "
        "(default: each request's own targets, if it has any)",
    )  # fmt: skip
    parser.add_argument(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="more fields of requests; of sampling parameters over gRPC",
    )
    parser.add_argument("--token-env", metavar="NAME", help="variable that holds the bearer token")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if any request failed."""
    from tqdm import tqdm

    from octavo.server.load.arrivals import send_all
    from octavo.server.load.figures import summarize

    goals = _goals(args.goodput)
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise InvalidConfigError("max_concurrency", args.max_concurrency, "at least 1")
    requests = _requests(args)
    target = _target(args)

    async def measure() -> list[Sent]:
        with tqdm(total=len(requests), unit="req", disable=not sys.stderr.isatty()) as bar:
            return await send_all(
                target, requests, max_concurrency=args.max_concurrency,
                on_end=lambda _: bar.update(),
            )  # fmt: skip

    sent = asyncio.run(measure())
    report = summarize(sent, goals)
    if args.json:
        print(json.dumps(report))
    else:
        print(as_text(report))
    errors = [item.error for item in sent if item.error is not None]
    if errors:
        print(f"octavo: {len(errors)} requests failed, the first: {errors[0]}", file=sys.stderr)
    return int(bool(errors))


def _requests(args: argparse.Namespace) -> list[BenchRequest]:
    """Those of `--workload` or `--trace`, or else of random lengths."""
    workload = asked_workload(args, args.num_prompts)
    if workload is not None:
        rate = workload.rate if args.request_rate is None else args.request_rate
        return bench_requests(workload.traffic(rate, args.seed), args.vocab_size, args.seed)
    requests = random_workload(
        args.num_prompts,
        parse_range(args.prompt_len, "prompt_len"),
        parse_range(args.output_len, "output_len"),
        args.vocab_size,
        args.seed,
        args.shared_prefix_len,
    )
    for name, value in (("class", args.classes), ("duration", args.duration)):
        if value:
            raise InvalidConfigError(name, value, "left out without --workload or --trace")
    process = POISSON if args.arrivals is None else parse_process(args.arrivals)
    if process is None:
        raise InvalidConfigError("arrivals", args.arrivals, "poisson or gamma without a trace")
    if args.ttft is not None or args.tpot is not None:
        promised = TrafficClass(
            name="",
            ttft_target_s=checked_target("ttft", args.ttft),
            tpot_target_s=checked_target("tpot", args.tpot),
        )
        requests = [dataclasses.replace(item, traffic_class=promised) for item in requests]
    rate = math.inf if args.request_rate is None else args.request_rate
    return with_arrivals(requests, rate, args.seed, process)


def as_text(report: dict[str, Any]) -> str:
    """A line a figure: its name, its value and its unit."""
    lines = []
    for name, value in report.items():
        number = f"{value:.4g}" if isinstance(value, float) else str(value)
        lines.append(f"{name:24} {number:>10} {_unit(name)}")
    return "\n".join(lines)


def _unit(name: str) -> str:
    return "ms" if name.endswith("_ms") else UNITS[name]


def _target(args: argparse.Namespace) -> Target:
    fields = ({} if args.stop_at_eos else {"ignore_eos": True}) | _object(args.extra_body)
    if args.token_env is not None and args.token_env not in os.environ:
        raise InvalidConfigError("token_env", args.token_env, "a variable that is set")
    token = None if args.token_env is None else os.environ[args.token_env]
    if args.grpc is not None:
        from octavo.server.load.grpc_load import GrpcTarget

        return GrpcTarget(args.grpc, model=args.model, token=token, sampling=fields)
    from octavo.server.load.http_load import HttpTarget

    base_url = args.base_url.rstrip("/").removesuffix("/v1")
    return HttpTarget(base_url, model=args.model, token=token, extra_body=fields)


def with_arrivals(
    requests: Sequence[BenchRequest], rate: float, seed: int, process: ArrivalProcess = POISSON
) -> list[BenchRequest]:
    """The requests as a process of `rate` a second brings them; all at once if infinite.

    Raises:
        InvalidConfigError: the rate is not above 0.
    """
    if not rate > 0:
        raise InvalidConfigError("request_rate", rate, "a number above 0")
    if rate == float("inf"):
        return list(requests)
    shape = process.burstiness
    gaps_s = np.random.default_rng(seed).gamma(shape, 1 / (rate * shape), len(requests))
    arrivals_s = np.cumsum(gaps_s) - gaps_s[0]
    return [
        dataclasses.replace(request, arrival_s=float(arrival_s))
        for request, arrival_s in zip(requests, arrivals_s, strict=True)
    ]


def _goals(texts: Sequence[str]) -> dict[str, float]:
    goals = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            name = ""
        if name not in GOALS:
            raise InvalidConfigError("goodput", text, f"{', '.join(GOALS)}, then :milliseconds")
    return goals


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidConfigError("extra_body", text, "a JSON object")
    return value
