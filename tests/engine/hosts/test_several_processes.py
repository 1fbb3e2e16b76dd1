"""Groups of real processes, each with devices of its own, say what one process says.

`make multihost` sets OCTAVO_MULTIHOST and runs all of them; else the first alone is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.hosts.leader import LOST_STATUS
from tests.engine.families import FAMILIES, write_family
from tests.engine.hosts.work import serve_all

ROOT = Path(__file__).resolve().parents[3]
ALL = bool(os.environ.get("OCTAVO_MULTIHOST"))
START_S, DEATH_S = 240, 5.0
TIGHT = {"num_kv_pages": 30, "scheduling_policy": "priority"}
SWAP = {"host_kv_memory_bytes": 4 << 20}

GROUPS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "swap, overlap, several steps, recovery": (2, {**TIGHT, **SWAP}, {"fail_at": 9}),
    "recompute, one step at a time": (
        2,
        {**TIGHT, "overlap": False, "num_decode_steps": 1},
        {"fail_at": 30},
    ),
    "no prefix cache, whole prompts": (
        2,
        {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_model_len": 256},
        {},
    ),
    "programs that come later": (2, {"warm_up": "early", **TIGHT, **SWAP}, {}),
    "four hosts": (4, {**TIGHT, **SWAP}, {"fail_at": 20}),
    "four hosts, one step at a time": (4, {"overlap": False, "num_decode_steps": 1}, {}),
}
DEATHS = (signal.SIGKILL, signal.SIGSTOP)


class Group:
    """Processes of one group.

    Args:
        engine: settings of all.
        work: the leader's.
        of_last: settings of the last host, in which it differs.
        skew_at: a step that the last host computes twice.
    """

    def __init__(
        self,
        model: Path,
        size: int,
        engine: dict[str, Any],
        work: dict[str, Any],
        of_last: dict[str, Any] | None = None,
        skew_at: int | None = None,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        place = {"coordinator": f"127.0.0.1:{port - 1}", "num_hosts": size}
        settings = {
            "model": str(model),
            "tensor_parallel_size": size,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "num_kv_pages": 200,
            "warm_up": "coarse",
            **engine,
        }
        flags = os.environ.get("XLA_FLAGS", "").split()
        flags = [flag for flag in flags if "host_platform_device_count" not in flag]
        env = os.environ | {
            "XLA_FLAGS": " ".join(flags),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        self.members = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.engine.hosts.member"),
                    json.dumps(
                        {
                            "place": {**place, "host_id": index},
                            "engine": settings | ((of_last or {}) if index == size - 1 else {}),
                            "work": work,
                            "skew_at": skew_at if index == size - 1 else None,
                        }
                    ),
                ],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(size)
        ]

    def answer(self) -> dict[str, Any]:
        """What the leader says of its work."""
        leader = self.members[0]
        assert leader.stdout is not None
        for line in leader.stdout:  # gloo prints lines of its own first
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(self.members[0].communicate()[1][-3000:])

    def end(self) -> list[int]:
        """Tells the leader to end; exit statuses."""
        self.members[0].communicate("\n", timeout=60)
        return [member.wait(60) for member in self.members]

    def lose(self, index: int, number: int) -> tuple[float, list[int]]:
        """Sends a member a signal; seconds until the others have ended, and their statuses."""
        others = [member for member in self.members if member is not self.members[index]]
        self.members[index].send_signal(number)
        begun_s = time.monotonic()
        statuses = [member.wait(60) for member in others]
        return time.monotonic() - begun_s, statuses


@contextmanager
def group(*args: Any) -> Iterator[Group]:
    found = Group(*args)
    try:
        yield found
    finally:
        for member in found.members:
            member.kill()
        for member in found.members:
            member.communicate()


@pytest.mark.parametrize("name", GROUPS if ALL else list(GROUPS)[:1])
def test_a_group_says_what_one_process_says_and_ends_with_its_members(
    tiny_model: Path, make_llm: Callable[..., Any], name: str
) -> None:
    size, engine, work = GROUPS[name]
    alone = serve_all(make_llm(num_kv_pages=200).engine)
    with group(tiny_model, size, engine, work) as found:
        answer = found.answer()
        assert answer["tokens"] == alone
        assert answer["recoveries"] == ("fail_at" in work)
        assert (answer["prefix hits"] > 0) == engine.get("enable_prefix_caching", True)
        if "num_kv_pages" in engine:
            assert answer["swaps" if "host_kv_memory_bytes" in engine else "recomputes"] > 0
        seconds, statuses = found.lose(size - 1, signal.SIGSTOP)
        assert statuses == [LOST_STATUS] * (size - 1)
        assert seconds < DEATH_S, "the group outlived a host that hangs"


@pytest.mark.skipif(not ALL, reason="make multihost runs it")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_serve_every_kind_of_cache(
    family: str, tmp_path: Path, tiny_model: Path, make_llm: Callable[..., Any]
) -> None:
    model = write_family(family, tmp_path, tiny_model)
    alone = serve_all(make_llm(model=str(model), num_kv_pages=200).engine)
    with group(model, 2, {}, {"fail_at": 30}) as found:
        answer = found.answer()
        assert answer["tokens"] == alone
        assert answer["recoveries"] == 1
        assert (answer["prefix hits"] > 0) == (family != "recurrent")  # 64 tokens are not shared


@pytest.mark.skipif(not ALL, reason="make multihost runs it")
@pytest.mark.parametrize("number", DEATHS, ids=lambda number: number.name)
@pytest.mark.parametrize("index", [0, 1])
def test_every_death_ends_the_group(tiny_model: Path, index: int, number: signal.Signals) -> None:
    with group(tiny_model, 2, {}, {}) as found:
        found.answer()
        seconds, [status] = found.lose(index, number)
        # A follower that JAX tells of its coordinator's death first is aborted by it.
        assert status == LOST_STATUS or (index == 0 and status == -signal.SIGABRT)
        assert seconds < DEATH_S


@pytest.mark.skipif(not ALL, reason="make multihost runs it")
def test_a_leader_that_ends_ends_its_followers(tiny_model: Path) -> None:
    with group(tiny_model, 2, {}, {}) as found:
        found.answer()
        assert found.end() == [0, 0]


@pytest.mark.skipif(not ALL, reason="make multihost runs it")
def test_another_model_is_refused_by_both(tiny_model: Path, tmp_path: Path) -> None:
    from tests.engine.conftest import write_tiny_model

    other = write_tiny_model(tmp_path, seed=1)
    with group(tiny_model, 2, {}, {}, {"model": str(other)}) as found:
        for member in found.members:
            error = member.communicate(timeout=START_S)[1]
            assert "InvalidConfigError: model = " in error
            assert "as on host 0" in error
            assert member.returncode == 1


@pytest.mark.skipif(not ALL, reason="make multihost runs it")
def test_a_host_that_is_a_turn_ahead_is_found(tiny_model: Path) -> None:
    with group(tiny_model, 2, {"num_decode_steps": 1}, {}, None, 12) as found:
        error = found.members[0].communicate(timeout=START_S)[1]
        steps = re.findall(r"host 1 computed another step (\d+) than the leader", error)
        assert steps, error[-3000:]
        assert 12 <= int(steps[0]) <= 16
        assert "is lost" not in error
        assert all(member.wait(60) for member in found.members)
