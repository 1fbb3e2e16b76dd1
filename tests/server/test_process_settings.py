"""Engines in somebody's process change none of its settings; `octavo serve` has its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.process import own_process
from octavo.engine.process.collector import COLLECT_AT
from octavo.engine.process.interpreter_share import LOOP_SLACK_S, SWITCH_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads settings as Linux has them")

WATCHER = """
import ctypes, gc, json, logging, os, resource, signal, sys, threading

libc = ctypes.CDLL(None)
libc.prctl  # looked up here, so that reading is not noted
noted, look_up = [], ctypes.CDLL.__getattr__

def noting(library, name):
    if name in ("mallopt", "prctl"):
        noted.append(name)
    return look_up(library, name)

ctypes.CDLL.__getattr__ = noting

def settings():
    import jax

    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "switch": sys.getswitchinterval(),
        "slack": libc.prctl(30, 0, 0, 0, 0),
        "collector": [gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "signals": [id(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
        "logging": [repr(logging.root.handlers), logging.root.level],
        "jax": {name: repr(value) for name, value in jax.config.values.items()},
        "environ": dict(os.environ),
        "called": sorted(set(noted)),
    }
"""

EMBEDDED = """
import asyncio
import jax, jax.numpy as jnp

model, mine, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
jax.devices()
before = settings()
from octavo import LLM, AsyncEngine, SamplingParams
from octavo.engine.execution.programs.compile_cache import cache_counts
from octavo.server.serve import OctavoServer
from octavo.server.serve_config import ServeConfig

llm = LLM(model, progress=False, **sizes)
built = settings()
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
llm.engine.wait_until_compiled()
llm.close()
counts = cache_counts()

async def serve():
    before = settings()  # asyncio.run has a handler of SIGINT
    server = OctavoServer(ServeConfig(grpc_port=0))
    await server.bind()
    await server.attach(AsyncEngine(model=model, **sizes))
    served = settings()
    await server.drain_and_stop()
    return before, served

before_serving, served = asyncio.run(serve())
# JAX's cache is the author's again.
jax.config.update("jax_compilation_cache_dir", mine)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.jit(lambda x: x * 3 + 1)(jnp.ones(3)).block_until_ready()
print(json.dumps([before, built, before_serving, served, counts.num_compiled, counts.num_hits]))
"""

SERVED = """
from octavo.server.cli import serve
from octavo.server.cli.main import main

def announce(addresses, engine):
    print(json.dumps([before, settings()]), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

serve._announce = announce
resource.setrlimit(
    resource.RLIMIT_NOFILE, (256, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
)
before = settings()
main(["serve", "--quiet", "--grpc-port", "0", *sys.argv[1:]])
"""

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128, "num_kv_pages": 40}


def result_of(script: str, *args: str, cache: Path | None = None) -> Any:
    """What a fresh process prints, without a compile cache that it was told of.

    Args:
        cache: the user's cache folder.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environ |= {"JAX_PLATFORMS": "cpu"} | ({} if cache is None else {"XDG_CACHE_HOME": str(cache)})
    done = subprocess.run(
        [sys.executable, "-c", WATCHER + script, *args],
        capture_output=True, text=True, env=environ, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_engines_in_somebodys_process_change_no_setting(tiny_model: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    arguments = (str(tiny_model), str(mine), json.dumps(SIZES))
    before, built, before_serving, served, num_compiled, _ = result_of(
        EMBEDDED, *arguments, cache=tmp_path
    )
    assert built == before
    assert served == before_serving
    assert served | {"signals": before["signals"]} == before
    assert num_compiled > 0
    # Octavo's programs are kept all the same, and the author's own apart from them.
    octavos = {file.name for file in (tmp_path / "octavo" / "xla").rglob("*") if file.is_file()}
    assert any(name.endswith(".program") for name in octavos)
    assert any(name.startswith("jit_") for name in octavos), "the small ones, which JAX keeps"
    assert [name for name in os.listdir(mine) if "lambda" in name]
    assert not any("lambda" in name for name in octavos)
    *_, num_compiled, num_hits = result_of(EMBEDDED, *arguments, cache=tmp_path)
    assert (num_compiled, num_hits > 0) == (0, True)


def test_a_serving_process_has_its_settings(tiny_model: Path, tiny_args: tuple[str, ...]) -> None:
    before, served = result_of(SERVED, "--model", str(tiny_model), *tiny_args)
    assert before["called"] == []
    assert served["called"] == ["mallopt", "prctl"]
    assert served["switch"] == pytest.approx(SWITCH_S, abs=1.5e-6)
    assert served["slack"] == round(LOOP_SLACK_S * 1e9)
    thresholds, num_frozen, _ = served["collector"]
    assert tuple(thresholds) == COLLECT_AT
    assert num_frozen > 10_000
    soft, hard = served["limits"]["RLIMIT_NOFILE"]
    assert (before["limits"]["RLIMIT_NOFILE"][0], soft) == (256, hard)
    assert served["jax"] == before["jax"]
    assert served["environ"] == before["environ"]


@pytest.mark.parametrize(
    ("environ", "is_for_cpus"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True),
        ({"JAX_PLATFORMS": "cuda"}, False),
        ({"JAX_PLATFORMS": "tpu,cpu"}, False),
        ({"JAX_PLATFORM_NAME": "gpu"}, False),
    ],
)
def test_memory_is_kept_where_jax_can_find_cpus_alone(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], is_for_cpus: bool
) -> None:
    called: list[bool] = []
    monkeypatch.setattr(own_process, "keep_freed_memory", lambda: not called.append(True))
    assert own_process.prepare_to_compute(environ) is is_for_cpus
    assert called == [True] * is_for_cpus
