"""Arguments of simulations: the workload, the replica, and how long its steps take."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.executor import NO_OVERHEAD, HostOverhead, SwapLink
from octavo.engine.simulation.settings import SETTINGS, Setting, get_setting, replica_limits
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME, StepTime
from octavo.engine.simulation.workloads.arrivals import (
    ClosedUsers,
    checked_rate,
    parse_process,
    uniform_lengths,
)
from octavo.engine.simulation.workloads.bench_requests import parse_range
from octavo.engine.simulation.workloads.spec import Extent, Workload, drawn_workload
from octavo.engine.simulation.workloads.traffic import Arrival, checked_target, with_targets
from octavo.server.cli.workload_args import (
    add_workload_args,
    asked_workload,
    parse_class,
    promised,
)


def add_setting_args(parser: argparse.ArgumentParser) -> None:
    """Adds the workload's and the replica's arguments."""
    group = parser.add_argument_group("workload")
    group.add_argument("--setting", choices=sorted(SETTINGS), help="a named replica and traffic")
    group.add_argument("--trace-dir", metavar="DIR", help="folder of a setting's trace files")
    add_workload_args(group)
    group.add_argument(
        "--rate", type=float, metavar="R",
        help="requests a second: thins or superposes a trace, or draws arrivals (default: the "
        "trace's own, or 1)",
    )  # fmt: skip
    group.add_argument(
        "--num-requests", type=int, metavar="N",
        help="in all (default: as many as arrive in time; 1000 of a closed loop)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="SHAPE",
        help="of drawn arrivals: 1 is Poisson, below it bursts (default 1)",
    )  # fmt: skip
    group.add_argument("--users", type=int, metavar="N", help="a closed loop of so many users")
    group.add_argument("--think-s", type=float, default=0.0, help="of users, on average")
    group.add_argument(
        "--input-len", default="16:1024", metavar="LOW:HIGH",
        help="tokens, where neither a workload nor a trace is named",
    )  # fmt: skip
    group.add_argument("--output-len", default="16:256", metavar="LOW:HIGH", help="likewise")
    group.add_argument(
        "--max-tokens", type=int, help="every request's limit (default 2048, or the longest output)"
    )
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

    A replica that is not said otherwise takes requests as long as the workload's longest.

    Raises:
        InvalidConfigError: arguments that are out of range or do not go together.
    """
    if args.rate is not None:
        checked_rate(args.rate)
    overhead = NO_OVERHEAD
    if args.setting is not None:
        for name, value in (("workload", args.workloads), ("trace", args.trace)):
            if value:
                raise InvalidConfigError(name, value, "left out with --setting, which has traffic")
        setting = get_setting(args.setting, args.trace_dir)
        ttft_s, tpot_s = checked_target("ttft", args.ttft), checked_target("tpot", args.tpot)
        traffic = setting.traffic
        setting = dataclasses.replace(
            setting, traffic=lambda rate, seed: with_targets(traffic(rate, seed), ttft_s, tpot_s)
        )
    else:
        workload = _workload(args)
        step_time, limits, overhead, link = _step_time(args, workload.max_model_len)
        setting = Setting(
            name=workload.name,
            limits=limits,
            step_time=step_time,
            link=link,
            traffic=workload.traffic,
            rates=(args.rate or workload.rate,),
            max_tokens=max(2048, workload.max_output),
            max_request_len=workload.max_model_len,
        )
    if args.host_us is not None:
        overhead = HostOverhead(plan_s=args.host_us * 5e-7, commit_s=args.host_us * 5e-7)
    return dataclasses.replace(
        setting,
        limits=_limits(args, setting.limits),
        max_tokens=setting.max_tokens if args.max_tokens is None else args.max_tokens,
        enable_prefix_caching=bool(args.enable_prefix_caching),
    ), overhead


def workload_from(args: argparse.Namespace, setting: Setting) -> list[Arrival] | ClosedUsers:
    """The requests to play: arrivals at the rate asked for, or users in a closed loop."""
    if args.users is not None:
        for name, value in (("workload", args.workloads), ("trace", args.trace)):
            if value:
                raise InvalidConfigError(name, value, "left out with --users")
        lengths = uniform_lengths(
            parse_range(args.input_len, "input_len"), parse_range(args.output_len, "output_len")
        )
        classes = [parse_class(spec) for spec in args.classes]
        num_requests = 1000 if args.num_requests is None else args.num_requests
        return ClosedUsers(
            args.users, num_requests, lengths, think_s=args.think_s, seed=args.seed,
            **({"traffic_class": classes[0][0]} if classes else {}),
        )  # fmt: skip
    return setting.traffic(args.rate or setting.rates[0], args.seed)


def run_setting_from(args: argparse.Namespace) -> tuple[Setting, HostOverhead]:
    """`setting_from` for a run, with its `--token-budget`; says which requests are too long."""
    quiet_faults()
    setting, overhead = setting_from(args)
    if notice := notice_of_long_requests(setting):
        print(notice, file=sys.stderr)
    if args.token_budget is not None:
        limits = dataclasses.replace(setting.limits, max_num_batched_tokens=args.token_budget)
        setting = dataclasses.replace(setting, limits=limits)
    return setting, overhead


def notice_of_long_requests(setting: Setting) -> str:
    """A line about requests that the replica is too small for; empty if all fit."""
    limits = setting.limits
    most_tokens = limits.needs.most_tokens(limits.num_pages - 1, limits.max_pages_per_seq)
    room = min(limits.max_model_len, most_tokens + 1)
    if setting.max_request_len <= room:
        return ""
    return (
        f"octavo: the longest request has {setting.max_request_len} tokens and the replica takes "
        f"{room} (--max-model-len, --kv-tokens): longer prompts fail, longer outputs are cut"
    )


def quiet_faults() -> None:
    """Faults are the point of some simulations: their errors are counted, not logged."""
    logging.getLogger("octavo.engine.faults.recovery").setLevel(logging.CRITICAL)


def _workload(args: argparse.Namespace) -> Workload:
    """What is asked for, or else requests of uniform lengths."""
    workload = asked_workload(args, args.num_requests)
    if workload is not None:
        return workload
    burstiness = args.burstiness
    if args.arrivals is not None:
        process = parse_process(args.arrivals)
        if process is None:
            raise InvalidConfigError("arrivals", args.arrivals, "poisson or gamma without a trace")
        burstiness = process.burstiness
    drawn = drawn_workload(
        parse_range(args.input_len, "input_len"),
        parse_range(args.output_len, "output_len"),
        Extent(num_requests=args.num_requests, duration_s=args.duration),
        burstiness=burstiness,
    )
    return promised(args, drawn)


def _limits(args: argparse.Namespace, limits: StepLimits) -> StepLimits:
    changes: dict[str, Any] = {}
    if args.max_model_len is not None and args.max_model_len < 2:
        raise InvalidConfigError("max_model_len", args.max_model_len, "at least 2 tokens")
    if args.num_decode_steps is not None:
        changes["max_num_steps"] = args.num_decode_steps
    page_size = args.page_size or limits.page_size
    max_model_len = args.max_model_len or limits.max_model_len
    if args.num_rows is not None:
        changes |= {"max_num_seqs": args.num_rows, "max_prefill_rows": args.num_rows}
    given = (args.kv_tokens, args.page_size, args.max_model_len)
    if any(value is not None for value in given):
        num_groups = len(limits.windows)
        tokens = args.kv_tokens or (limits.num_pages - 1) // num_groups * limits.page_size
        num_pages = tokens // page_size * num_groups
        changes |= {
            "page_size": page_size,
            "num_pages": num_pages + 1,
            "max_model_len": max_model_len,
            "max_pages_per_seq": min(-(-max_model_len // page_size), num_pages),
        }
    if args.host_kv_tokens is not None:
        num_groups = len(limits.windows)
        changes["num_host_pages"] = args.host_kv_tokens // page_size * num_groups
    return dataclasses.replace(limits, **changes)


def _step_time(
    args: argparse.Namespace, longest: int
) -> tuple[StepTime, StepLimits, HostOverhead, SwapLink]:
    """Step times, the replica's limits, its host and its link.

    Args:
        longest: tokens of the longest request.
    """
    from octavo.engine.simulation.profile import Profile
    from octavo.engine.simulation.roofline import DEVICES, kv_capacity, roofline
    from octavo.engine.simulation.step_time import ConstantStepTime

    max_model_len = max(16_384, longest)
    limits = replica_limits(kv_tokens=64_000, max_model_len=max_model_len)
    name, _, number = args.step_time.partition(":")
    if name == "niyama":
        return NIYAMA_STEP_TIME, limits, NO_OVERHEAD, SwapLink()
    if name == "constant":
        try:
            return ConstantStepTime(float(number)), limits, NO_OVERHEAD, SwapLink()
        except ValueError:
            raise InvalidConfigError("step_time", args.step_time, "constant:SECONDS") from None
    if name.lower() in DEVICES:
        from octavo.engine.config import DEFAULT_MODEL
        from octavo.server.cli.plan import read_model_config

        config = read_model_config(args.model or DEFAULT_MODEL)
        model = roofline(name, config, num_devices=int(number or 1))
        windows = config.cache_layout().windows
        limits = replica_limits(
            kv_tokens=min(kv_capacity(model), 4_000_000),
            max_model_len=min(config.max_position_embeddings, max_model_len),
            windows=windows,
        )
        page_bytes = int(model.kv_bytes_per_token * limits.page_size) // len(windows)
        link = SwapLink(
            bytes_per_page=page_bytes,
            bytes_per_s=model.device.host_bytes_per_s * model.num_devices,
        )
        return model, limits, NO_OVERHEAD, link
    profile = Profile.load(args.step_time)
    return profile, profile.limits, profile.host, profile.link or SwapLink()
