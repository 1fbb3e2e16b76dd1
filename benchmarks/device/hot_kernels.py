"""Which of a device's kernels take the time of a program: the profiler's trace, summed by name."""

from __future__ import annotations

import collections
import glob
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.device import kernels
from benchmarks.device.roofs import looped, seconds

PROFILED = (
    "prefill 2048 x 2048",
    "mixed 128 x 1024 + 512 x 1024",
    "decode 1 x 32768",
    "decode 64 x 4096, int8 KV",
)
TOP = 12


def measure(
    results: dict[str, Any], deadline_s: float, *, backend: Any, dtype: str, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Kernels of some of the attention programs that `kernels` times, the longest first."""
    del results, deadline_s
    for name, rows, kv_dtype in kernels.cases(tiny):
        if not tiny and name not in PROFILED:
            continue
        q, kv, batch = kernels.make_batch(rows, backend, dtype, kv_dtype)
        loops = 2 if tiny else kernels.LOOPS
        many = looped(kernels.attention(rows, backend), loops)

        def run(many: Any = many, args: Any = (q, kv, batch)) -> Any:
            return jax.block_until_ready(many(*args))

        yield {"what": name, "µs": 1e6 * seconds(run) / loops}
        yield from hottest(run, per=loops)


def hottest(run: Callable[[], Any], *, per: int) -> Iterator[dict[str, Any]]:
    """Rows of the kernels that a run spends most time in.

    Args:
        run: compiled and warm; blocks until the device is done.
        per: what counts and microseconds are divided by.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
        took: collections.Counter[str] = collections.Counter()
        count: collections.Counter[str] = collections.Counter()
        for plane in data.planes:
            if not plane.name.startswith("/device:"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    took[event.name] += event.duration_ns
                    count[event.name] += 1
    for name, total_ns in took.most_common(TOP):
        yield {
            "what": f"- {name[:60]}",
            "µs": 1e-3 * total_ns / per,
            "launches": count[name] / per,
        }
    yield {
        "what": "- all kernels",
        "µs": 1e-3 * sum(took.values()) / per,
        "launches": sum(count.values()) / per,
    }
