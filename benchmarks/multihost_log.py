"""What a group of hosts costs its leader a step: writing the log, and comparing digests.

Two processes on this machine, each on a core of its own, share each layer of a small random model
over gloo; every row decodes.
Of each step: microseconds in which the leader writes commands, folds its own digest and waits for
followers' reports, and the frame's bytes. The wait is what is left of a follower's delay, as it is
for an earlier step. Then the longest vectors: prompts.

    python -m benchmarks.multihost_log [--rows 32] [--steps 400] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.machine import about_machine
from benchmarks.tiny_server import write_tiny_model

LIMIT_US = 150.0
"""A step's p50 that the log may cost."""


def main() -> int:
    """Measures; 1 if the log costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--no-overlap", action="store_true", help="plan when a step has ended")
    parser.add_argument("--output", help="write every figure as JSON")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member is not None:
        return be_member(json.loads(args.member), args.rows, args.steps)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        found = run_group(model, args.rows, args.steps, overlap=not args.no_overlap)
    for name, row in found.items():
        cells = (f"{key} {value:.4g}" for key, value in row.items())
        print(f"{name}: {', '.join(cells)}")
    if args.output:
        rest = f" --rows {args.rows} --steps {args.steps}" + " --no-overlap" * args.no_overlap
        machine = about_machine() | {"command": f"python -m benchmarks.multihost_log{rest}"}
        content = {"machine": machine, "load": os.getloadavg()[0], "found": found}
        Path(args.output).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(found["decode"]["log p50 us"] > LIMIT_US)


def run_group(model: Path, rows: int, steps: int, *, overlap: bool) -> dict[str, dict[str, float]]:
    """What the leader of a group of two measured."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {"JAX_PLATFORMS": "cpu"} | os.environ
    members = []
    for index in (0, 1):
        place = {"coordinator": f"127.0.0.1:{port - 1}", "num_hosts": 2, "host_id": index}
        settings = json.dumps({"model": str(model), "place": place, "overlap": overlap})
        command = [sys.executable, "-m", "benchmarks.multihost_log", "--member", settings]
        command += ["--rows", str(rows), "--steps", str(steps)]
        members.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
    try:
        lines = members[0].communicate()[0].splitlines()
        members[1].communicate(timeout=60)
    finally:
        for member in members:
            member.kill()
    found: dict[str, dict[str, float]] = json.loads(
        next(line for line in lines if line.startswith("{"))
    )
    return found


def be_member(settings: dict[str, Any], rows: int, steps: int) -> int:
    """Leads or follows; the leader prints what it measured."""
    from octavo.engine.config import EngineConfig
    from octavo.engine.hosts.hosts_config import HostsConfig
    from octavo.engine.process.own_process import prepare_to_compute

    place = HostsConfig(**settings["place"])
    config = EngineConfig(
        model=settings["model"],
        tensor_parallel_size=2,
        max_num_seqs=rows,
        max_num_batched_tokens=256,
        num_kv_pages=rows * 33,
        num_decode_steps=1,
        overlap=settings["overlap"],
        warm_up="coarse",
        scheduling_policy="fcfs",
        enable_prefix_caching=False,
    )
    prepare_to_compute(os.environ)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(place.host_id or 0) % len(cores)]})
    if not place.is_leader:
        from octavo.engine.hosts.group import follow

        follow(place, config)
        return 0
    from octavo.engine.engine import Engine
    from octavo.engine.hosts.group import lead

    engine = Engine(config, hosts=lead(place, config))
    meter = Meter(engine)
    work(engine, rows, prompt_len=16, max_tokens=50)  # first uses
    found = {
        "decode": meter.of(lambda: work(engine, rows, prompt_len=16, max_tokens=steps)),
        "prompts": meter.of(lambda: work(engine, 4 * rows, prompt_len=240, max_tokens=1)),
    }
    print(json.dumps(found), flush=True)
    engine.close()
    return 0


def work(engine: Any, num_requests: int, prompt_len: int, max_tokens: int) -> None:
    """Serves requests of one size."""
    from octavo.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for index in range(num_requests):
        prompt = [2 + (index + place) % 250 for place in range(prompt_len)]
        now_s = engine.clock.now_s()
        engine.submit(engine.inputs.process(str(index), prompt, params, now_s=now_s))
    while engine.has_unfinished:
        engine.step()


class Meter:
    """Times what the group adds to the leader's loop, a step."""

    def __init__(self, engine: Any) -> None:
        from octavo.engine.hosts import leader as module
        from octavo.engine.hosts.host_executor import Trail

        self._steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        leader, executor = engine.executor._leader, engine.executor
        self._wrap(leader, "write", "write")
        self._wrap(leader, "check", "wait")
        self._wrap(executor, "_digest_rows", "rows")
        self._wrap(Trail, "take", "fold")
        encode = module.encode

        def counted(*args: Any) -> bytes:
            frame = encode(*args)
            self._now["bytes"] += len(frame)
            return frame

        module.encode = counted
        result = executor.result

        def ended(handle: Any) -> Any:
            found = result(handle)
            self._steps.append(dict(self._now) | {"end": time.perf_counter()})
            self._now.clear()
            return found

        executor.result = ended

    def _wrap(self, of: Any, name: str, key: str) -> None:
        whole = getattr(of, name)

        def timed(*args: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return whole(*args)
            finally:
                if threading.current_thread() is threading.main_thread():
                    self._now[key] += time.perf_counter() - begun_s

        setattr(of, name, timed)

    def of(self, serve: Any) -> dict[str, float]:
        """Figures of the steps of some work."""
        self._steps.clear()
        serve()
        steps = self._steps[10:-10]
        ends = [step["end"] for step in self._steps]
        took = [1e3 * (b - a) for a, b in itertools.pairwise(ends)]
        parts = {
            key: [1e6 * step.get(key, 0.0) for step in steps]
            for key in ("write", "fold", "rows", "wait")
        }
        whole = [sum(values) for values in zip(*parts.values(), strict=True)]
        found = {"steps": float(len(steps)), "step p50 ms": statistics.median(took)}
        found |= {"log p50 us": statistics.median(whole), "log p99 us": _p99(whole)}
        found |= {"log mean us": statistics.fmean(whole)}
        found |= {f"{key} p50 us": statistics.median(values) for key, values in parts.items()}
        found["bytes p50"] = statistics.median(step.get("bytes", 0.0) for step in steps)
        return {name: round(value, 1) for name, value in found.items()}


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


if __name__ == "__main__":
    sys.exit(main())
