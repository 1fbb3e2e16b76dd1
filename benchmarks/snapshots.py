"""Prompt tokens that prefix snapshots of recurrent states spare, by workload and number of places.

    python -m benchmarks.snapshots --rows 8

The scheduler is the real one, over a simulated device that checks every plan. A turn's prompt is
the prompt before it, that turn's answer and some tokens of its own. Pages are never short, so that
a token which is not found lacks a snapshot. "all" has as many places as are ever asked for: what
there is to find.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from octavo.engine.core import EngineCore
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.checked_executor import CheckedExecutor
from octavo.engine.simulation.executor import output_tokens
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.step_time import ConstantStepTime
from octavo.engine.simulation.virtual_clock import VirtualClock
from octavo.engine.simulation.workloads.traffic import END_TOKEN

SNAPSHOT_TOKENS = 64
STEP_S = 0.02
ALL = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request to come.

    Attributes:
        at_s: when it is sent.
        prompt: its tokens.
        num_turns: that it and those after it are.
        num_branches: conversations that go on from its answer side by side, and none from those.
    """

    at_s: float
    prompt: list[int]
    num_turns: int = 1
    num_branches: int = 1


class Traffic:
    """People and agents in a closed loop: who hears an answer thinks, and goes on from it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"snapshots {seed}")

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(1 << 40) for _ in range(self.rng.randint(low, high))]

    def following(self, turn: Turn, answer: list[int], now_s: float) -> Iterator[Turn]:
        if turn.num_turns > 1:
            for _ in range(turn.num_branches):
                yield replace(
                    turn,
                    at_s=now_s + self.rng.uniform(0.5, 8.0),
                    prompt=turn.prompt + answer + self.tokens(64, 256),
                    num_turns=turn.num_turns - 1,
                    num_branches=1,
                )


def conversations(
    count: int, *, num_turns: int = 5, system: int = 0, every_s: float = 0.0
) -> Callable[[Traffic], list[Turn]]:
    """So many conversations, at once or one after the other, with a system prompt or none."""

    def turns(traffic: Traffic) -> list[Turn]:
        shared = traffic.tokens(system, system)
        return [
            Turn(
                at_s=index * every_s + traffic.rng.uniform(0, 4),
                prompt=shared + traffic.tokens(64, 384),
                num_turns=num_turns,
            )
            for index in range(count)
        ]

    return turns


def one_shots(count: int, every_s: float) -> Callable[[Traffic], list[Turn]]:
    return conversations(count, num_turns=1, system=1024, every_s=every_s)


def agents(count: int, num_branches: int) -> Callable[[Traffic], list[Turn]]:
    """Agents with one system prompt, whose first answer sets off so many that go on from it."""

    def turns(traffic: Traffic) -> list[Turn]:
        whole = conversations(count, system=1024, num_turns=5, every_s=15.0)(traffic)
        return [replace(turn, num_branches=num_branches) for turn in whole]

    return turns


def huge_among(count: int) -> Callable[[Traffic], list[Turn]]:
    """One conversation of eighty turns, quickly answered, among so many of five, one by one."""

    def turns(traffic: Traffic) -> list[Turn]:
        huge, *_ = conversations(1, num_turns=80)(traffic)
        return [huge, *conversations(count, every_s=8.0)(traffic)]

    return turns


WORKLOADS: dict[str, Callable[[Traffic], list[Turn]]] = {
    "4 conversations": conversations(4),
    "8 conversations": conversations(8),
    "16 conversations": conversations(16),
    "8 conversations, one system prompt": conversations(8, system=1024),
    "60 conversations, one after the other": conversations(60, every_s=4.0),
    "32 users at once, one system prompt": one_shots(32, 0.0),
    "32 users by and by, one system prompt": one_shots(32, 1.0),
    "users and 8 conversations": lambda traffic: [
        *one_shots(60, 1.0)(traffic), *conversations(8)(traffic)
    ],
    "agents that branch in four": agents(8, 4),
    "a huge conversation among 30": huge_among(30),
}  # fmt: skip


def share_found(
    workload: Callable[[Traffic], list[Turn]], *, rows: int, places: int, seed: int
) -> float:
    """Cached tokens as a share of all prompt tokens."""
    traffic, clock = Traffic(seed), VirtualClock()
    limits = replica_limits(
        kv_tokens=2_000_000, num_rows=rows, max_model_len=65_536, max_num_batched_tokens=2048
    )
    limits = replace(limits, has_states=True, num_snapshots=places, snapshot_tokens=SNAPSHOT_TOKENS)
    executor = CheckedExecutor(limits, clock, ConstantStepTime(STEP_S))
    scheduler = Scheduler(limits, policy="fcfs", enable_prefix_caching=True)
    core = EngineCore(scheduler, executor, clock, overlap=True)
    waiting: list[tuple[float, int, Turn]] = []
    sent: dict[str, Turn] = {}
    number = num_found = num_all = 0

    def push(turn: Turn) -> None:
        nonlocal number
        heapq.heappush(waiting, (turn.at_s, number, turn))
        number += 1

    for turn in workload(traffic):
        push(turn)
    while waiting or core.has_work:
        if not core.has_work:
            clock.advance_to(waiting[0][0])
        while waiting and waiting[0][0] <= clock.now_s():
            _, own, turn = heapq.heappop(waiting)
            name, num_output = str(own), traffic.rng.randint(32, 160)
            request = Request(
                request_id=name,
                prompt_token_ids=turn.prompt,
                sampling_params=SamplingParams(max_tokens=num_output),
                seed=own,
                eos_token_ids=(END_TOKEN,),
                max_tokens=num_output,
                arrival_s=clock.now_s(),
            )
            executor.learn_output(name, own, num_output)
            sent[name] = turn
            core.add(request)
        for request, _, _, _, is_finished, _ in core.step().items:
            if is_finished:
                turn = sent.pop(request.request_id)
                num_found += request.num_cached_tokens
                num_all += len(turn.prompt)
                answer = list(output_tokens(request.seed, len(request.output_token_ids)))
                executor.forget_output(request.request_id)
                for each in traffic.following(turn, answer, clock.now_s()):
                    push(each)
    scheduler.check_integrity()
    return num_found / num_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", help="workloads whose name holds this")
    args = parser.parse_args()
    rows = args.rows
    all_places = [max(1, rows // 4), rows // 2, rows, 3 * rows // 2, 2 * rows, ALL]
    print("| workload |", " | ".join(map(str, all_places[:-1])), "| all |")
    print("|---" * (len(all_places) + 1) + "|")
    for name, workload in WORKLOADS.items():
        if args.only and args.only not in name:
            continue
        found = []
        for places in all_places:
            shares = [
                share_found(workload, rows=rows, places=places, seed=seed)
                for seed in range(args.seeds)
            ]
            found.append(sum(shares) / len(shares))
        print(f"| {name} |", " | ".join(f"{share:.2f}" for share in found), "|", flush=True)


if __name__ == "__main__":
    main()
