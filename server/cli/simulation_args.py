"""Arguments of simulations: the workload, the replica, and how long its steps take."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Priority
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.executor import NO_OVERHEAD, HostOverhead, SwapLink
from octavo.engine.simulation.settings import (
    SETTINGS,
    Setting,
    get_setting,
    replica_limits,
)
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME, StepTime
from octavo.engine.simulation.workloads.arrivals import (
    ClosedUsers,
    Traffic,
    gamma_arrivals,
    spread_classes,
    trace_traffic,
    uniform_lengths,
    window,
)
from octavo.engine.simulation.workloads.bench_requests import parse_range
from octavo.engine.simulation.workloads.traces import read_arrivals
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass


def add_setting_args(parser: argparse.ArgumentParser) -> None:
    """Adds the workload's and the replica's arguments."""
    group = parser.add_argument_group("workload")
    group.add_argument("--setting", choices=sorted(SETTINGS), help="a named replica and traffic")
    group.add_argument("--trace-dir", metavar="DIR", help="folder of a setting's trace files")
    group.add_argument(
        "--trace", metavar="FILE",
        help="CSV (arrival_s, input_tokens, output_tokens) or Mooncake-style .jsonl",
    )  # fmt: skip
    group.add_argument("--window", metavar="BEGIN:END", help="seconds of the trace to take")
    group.add_argument(
        "--rate", type=float, metavar="R",
        help="requests a second: thins or superposes a trace, or draws arrivals (default 1)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="SHAPE",
        help="of drawn arrivals: 1 is Poisson, below it bursts (default 1)",
    )  # fmt: skip
    group.add_argument("--duration", type=float, default=300.0, metavar="S", help="(default 300)")
    group.add_argument("--users", type=int, metavar="N", help="a closed loop of so many users")
    group.add_argument("--think-s", type=float, default=0.0, help="of users, on average")
    group.add_argument("--num-requests", type=int, default=1000, help="of a closed loop")
    group.add_argument("--input-len", default="16:1024", metavar="LOW:HIGH", help="tokens")
    group.add_argument("--output-len", default="16:256", metavar="LOW:HIGH", help="tokens")
    group.add_argument(
        "--class", action="append", default=[], dest="classes", metavar="SPEC",
        help="name:share=0.2,ttft=1,tpot=0.05,e2e=60,priority=low,tenant=a; may be repeated, "
        "the rest is of the first class (seconds)",
    )  # fmt: skip
    group.add_argument("--max-tokens", type=int, help="every request's limit (default 2048)")
    group = parser.add_argument_group("replica")
    group.add_argument(
        "--step-time", default="niyama", metavar="MODEL",
        help="niyama (a published fit), constant:SECONDS, a profile written by `octavo profile`, "
        "or a device: h100, h200, v5e, v5p, v6e, tpu7x, with :N for N of them",
    )  # fmt: skip
    group.add_argument("--model", help="of a device's step time (default: the packaged one)")
    group.add_argument(
        "--kv-tokens", type=int, help="KV capacity (default 64000, or the setting's)"
    )
    group.add_argument("--host-kv-tokens", type=int, help="of the host tier (default 0)")
    group.add_argument("--num-rows", type=int, help="most running requests (default 128)")
    group.add_argument("--page-size", type=int, help="tokens (default 16)")
    group.add_argument("--num-decode-steps", type=int, help="in a dispatch (default 1)")
    group.add_argument(
        "--host-us", type=float, metavar="US",
        help="host time a step, half to plan and half to commit (default: the profile's, or 0)",
    )  # fmt: skip
    group.add_argument("--no-overlap", action="store_true", help="plan only when the device waits")


def setting_from(args: argparse.Namespace) -> tuple[Setting, HostOverhead]:
    """The setting that the arguments describe, and what its host spends on a step.

    Raises:
        InvalidConfigError: arguments that are out of range or do not go together.
    """
    if args.rate is not None and not args.rate > 0:
        raise InvalidConfigError("rate", args.rate, "a number above 0")
    overhead = NO_OVERHEAD
    if args.setting is not None:
        setting = get_setting(args.setting, args.trace_dir)
    else:
        step_time, limits, overhead, link = _step_time(args)
        setting = Setting(
            name=args.trace or "drawn",
            limits=limits or replica_limits(kv_tokens=64_000),
            step_time=step_time,
            link=link,
            traffic=_traffic(args),
            rates=(args.rate or 1.0,),
            max_tokens=2048,
        )
    if args.host_us is not None:
        overhead = HostOverhead(plan_s=args.host_us * 5e-7, commit_s=args.host_us * 5e-7)
    if args.max_tokens is not None:
        setting = dataclasses.replace(setting, max_tokens=args.max_tokens)
    return dataclasses.replace(setting, limits=_limits(args, setting.limits)), overhead


def workload_from(args: argparse.Namespace, setting: Setting) -> list[Arrival] | ClosedUsers:
    """The requests to play: arrivals at the rate asked for, or users in a closed loop."""
    if args.users is not None:
        lengths = uniform_lengths(
            parse_range(args.input_len, "input_len"), parse_range(args.output_len, "output_len")
        )
        classes = [parse_class(spec) for spec in args.classes]
        return ClosedUsers(
            args.users, args.num_requests, lengths, think_s=args.think_s, seed=args.seed,
            **({"traffic_class": classes[0][0]} if classes else {}),
        )  # fmt: skip
    if args.trace is not None and args.rate is None:
        return _classified(args, _trace(args), args.seed)
    return setting.traffic(args.rate or setting.rates[0], args.seed)


def parse_class(spec: str) -> tuple[TrafficClass, float]:
    """Reads `"chat:share=0.8,ttft=1,tpot=0.05"`: a class and its share of the traffic.

    Raises:
        InvalidConfigError: an unknown name or a bad value.
    """
    name, _, rest = spec.partition(":")
    fields = {"ttft": "ttft_target_s", "tpot": "tpot_target_s", "e2e": "e2e_target_s"}
    values: dict[str, Any] = {"name": name}
    share = 1.0
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key == "priority":
            values["priority"] = Priority.parse(value)
        elif key == "tenant":
            values["tenant"] = value
        elif key == "share":
            share = _positive(spec, key, value)
        elif key in fields:
            values[fields[key]] = _positive(spec, key, value)
        else:
            raise InvalidConfigError("class", spec, "share, ttft, tpot, e2e, priority or tenant")
    return TrafficClass(**values), share


def _positive(spec: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise InvalidConfigError("class", spec, f"NAME:{key}=NUMBER with a finite number above 0")
    return number


def quiet_faults() -> None:
    """Faults are the point of some simulations: their errors are counted, not logged."""
    logging.getLogger("octavo.engine.core").setLevel(logging.CRITICAL)


def _traffic(args: argparse.Namespace) -> Traffic:
    if args.trace is not None:
        by_rate = trace_traffic(_trace(args))
        return lambda rate, seed: _classified(args, by_rate(rate, seed), seed)
    lengths = uniform_lengths(
        parse_range(args.input_len, "input_len"), parse_range(args.output_len, "output_len")
    )
    return lambda rate, seed: _classified(
        args,
        gamma_arrivals(rate, args.duration, lengths, seed=seed, burstiness=args.burstiness),
        seed,
    )


def _trace(args: argparse.Namespace) -> list[Arrival]:
    arrivals = read_arrivals(args.trace)
    if args.window is not None:
        begin, _, end = args.window.partition(":")
        try:
            arrivals = window(arrivals, float(begin or 0), float(end or "inf"))
        except ValueError:
            raise InvalidConfigError("window", args.window, "BEGIN:END in seconds") from None
    if not arrivals:
        raise InvalidConfigError("trace", args.trace, "a trace with requests in the window")
    return arrivals


def _classified(args: argparse.Namespace, arrivals: list[Arrival], seed: int) -> list[Arrival]:
    classes = [parse_class(spec) for spec in args.classes]
    if not classes:
        return arrivals
    arrivals = [dataclasses.replace(a, traffic_class=classes[0][0]) for a in arrivals]
    left = 1.0
    for index, (traffic_class, share) in enumerate(classes[1:], 1):
        # Shares are of all; each class draws from the first one's requests alone.
        first = [a for a in arrivals if a.traffic_class is classes[0][0]]
        rest = [a for a in arrivals if a.traffic_class is not classes[0][0]]
        moved = spread_classes(first, min(1.0, share / left), traffic_class, seed * 100 + index)
        arrivals = sorted([*moved, *rest], key=lambda a: (a.arrival_s, a.request_id))
        left = max(1e-9, left - share)
    return arrivals


def _limits(args: argparse.Namespace, limits: StepLimits) -> StepLimits:
    changes: dict[str, Any] = {}
    if args.num_decode_steps is not None:
        changes["max_num_steps"] = args.num_decode_steps
    page_size = args.page_size or limits.page_size
    if args.num_rows is not None:
        changes |= {"max_num_seqs": args.num_rows, "max_prefill_rows": args.num_rows}
    if args.kv_tokens is not None or args.page_size is not None:
        tokens = args.kv_tokens or (limits.num_pages - 1) * limits.page_size
        num_pages = tokens // page_size
        changes |= {
            "page_size": page_size,
            "num_pages": num_pages + 1,
            "max_pages_per_seq": min(-(-limits.max_model_len // page_size), num_pages),
        }
    if args.host_kv_tokens is not None:
        changes["num_host_pages"] = args.host_kv_tokens // page_size
    return dataclasses.replace(limits, **changes)


def _step_time(
    args: argparse.Namespace,
) -> tuple[StepTime, StepLimits | None, HostOverhead, SwapLink]:
    from octavo.engine.simulation.profile import Profile
    from octavo.engine.simulation.roofline import DEVICES, kv_capacity, roofline
    from octavo.engine.simulation.step_time import ConstantStepTime

    name, _, number = args.step_time.partition(":")
    if name == "niyama":
        return NIYAMA_STEP_TIME, None, NO_OVERHEAD, SwapLink()
    if name == "constant":
        try:
            return ConstantStepTime(float(number)), None, NO_OVERHEAD, SwapLink()
        except ValueError:
            raise InvalidConfigError("step_time", args.step_time, "constant:SECONDS") from None
    if name.lower() in DEVICES:
        from octavo.engine.config import DEFAULT_MODEL
        from octavo.server.cli.plan import read_model_config

        config = read_model_config(args.model or DEFAULT_MODEL)
        model = roofline(name, config, num_devices=int(number or 1))
        limits = replica_limits(
            kv_tokens=min(kv_capacity(model), 4_000_000),
            max_model_len=min(config.max_position_embeddings, 16_384),
        )
        page_bytes = int(model.kv_bytes_per_token * limits.page_size)
        link = SwapLink(
            bytes_per_page=page_bytes,
            bytes_per_s=model.device.host_bytes_per_s * model.num_devices,
        )
        return model, limits, NO_OVERHEAD, link
    profile = Profile.load(args.step_time)
    return profile, profile.limits, profile.host, profile.link or SwapLink()
