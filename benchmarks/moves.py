"""Requests that move between two replicas, and prompts computed apart from decoding.

    python -m benchmarks.moves pause [--moves 100]     how long a reader waits as its request moves
    python -m benchmarks.moves soak [--moves 1000]     moved at random: tokens differ only where the
                                                       model is undecided, or it fails;
                                                       with --kills, as replicas are killed too
    python -m benchmarks.moves apart [--rate 1.0]      one replica for prompts and one for decoding,
                                                       against two for both

Each has two replicas, a core each. `apart` serves chats and long prompts that arrive at random, the
same ones for both, twice in turn, and tells what readers see: seconds to the first token, and
seconds between tokens of chats.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import about_machine
from benchmarks.tiny_server import write_tiny_model
from benchmarks.undecided import TIE, PlainModel
from octavo.engine.config import EngineConfig
from octavo.engine.replicas import replica
from octavo.engine.replicas.replicated_engine import ReplicatedEngine
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams

HOST_BYTES = 1 << 30
MOST_PROMPT, MOST_TOKENS = 250, 200
"""Of a request in a soak."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@dataclass(slots=True)
class Stream:
    """What a reader has: tokens, and when each piece came."""

    arrival_s: float
    is_chat: bool = True
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class Driver:
    """Serves requests as they come, and reads what comes of them."""

    def __init__(self, **arguments: Any) -> None:
        config: dict[str, Any] = {
            "model": "smollm2-135m", "data_parallel_size": 2, "max_num_seqs": 32,
            "host_kv_memory_bytes": HOST_BYTES, "kv_cache_memory_bytes": 1 << 30,
        }  # fmt: skip
        self.engine = ReplicatedEngine(EngineConfig(**config | arguments), progress=True)
        self.engine.wait_until_compiled()
        self.streams: dict[str, Stream] = {}
        self.live: set[str] = set()

    def submit(self, prompt: list[int], params: SamplingParams, **about: Any) -> str:
        """Hands over a request; its id."""
        now_s = self.engine.clock.now_s()
        submission = self.engine.inputs.process(None, prompt, params, now_s=now_s, **about)
        self.streams[submission.request_id] = Stream(now_s)
        self.live.add(submission.request_id)
        self.engine.submit(submission)
        return submission.request_id

    def read(self) -> None:
        """Takes what has come, waiting a moment for something to come."""
        for output in self.engine.step():
            if output.error is not None:
                raise output.error
            stream = self.streams[output.engine_id]
            if output.finished:
                self.live.discard(output.engine_id)
            if output.outputs[0].token_ids:
                stream.token_ids += output.outputs[0].token_ids
                stream.times_s.append(self.engine.clock.now_s())

    def is_live(self, name: str) -> bool:
        """Whether a request has not ended."""
        return name in self.live

    def finish(self) -> None:
        """Reads all that is left."""
        while self.engine.has_unfinished:
            self.read()


def prompt_of(rng: random.Random, num_tokens: int, vocab_size: int = 40_000) -> list[int]:
    """Random tokens."""
    return [rng.randrange(100, vocab_size) for _ in range(num_tokens)]


def pause(args: argparse.Namespace) -> dict[str, Any]:
    """One stream at a time, moved to and fro in the middle."""
    driver, rng = Driver(num_decode_steps=1), random.Random(1)
    found = []
    for num_tokens in (128, 512, 1024):
        steps: list[float] = []
        pauses: list[float] = []
        pages = driver.engine.moves.num_pages
        for _ in range(max(1, args.moves // 3)):
            name = driver.submit(prompt_of(rng, num_tokens), GREEDY.replace(max_tokens=60))
            stream = driver.streams[name]
            while len(stream.token_ids) < 20:
                driver.read()
            num_moves = driver.engine.moves.num_moves
            where = driver.engine.where(name)
            assert where is not None
            driver.engine.move(name, 1 - where.index)
            driver.finish()
            assert driver.engine.moves.num_moves == num_moves + 1
            gaps = np.diff(stream.times_s)
            steps.append(float(np.median(gaps)))
            pauses.append(float(gaps.max()))
        num_pages = driver.engine.moves.num_pages - pages
        found.append(
            {
                "prompt_tokens": num_tokens,
                "moves": len(pauses),
                "pages_a_move": round(num_pages / len(pauses), 1),
                "step_ms": round(1e3 * statistics.median(steps), 2),
                "pause_p50_ms": round(1e3 * statistics.median(pauses), 1),
                "pause_p95_ms": round(1e3 * float(np.quantile(pauses, 0.95)), 1),
                "pause_in_steps": round(statistics.median(pauses) / statistics.median(steps), 1),
                "page_ms": round(1e3 * driver.engine.moves.page_s, 3),
            }
        )
    driver.engine.close()
    return {"pauses": found}


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Requests of all lengths, moved at random as replicas are killed, and the same left alone."""
    replica.MAX_DEATHS = args.kills + 3
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder))) if args.tiny else "smollm2-135m"
        driver = Driver(model=model, num_kv_pages=400, block_size=8)
        vocab_size = driver.engine.model_config.vocab_size
        asked: list[tuple[list[int], SamplingParams]] = []
        told: list[list[list[int]]] = []
        num_wanted, num_kills = 100, 0
        for is_moved in (True, False):
            rng, chance, names = random.Random(2), random.Random(3), list[str]()
            asked.clear()
            moves = driver.engine.moves
            while len(names) < num_wanted or (is_moved and moves.num_moves < args.moves):
                while sum(map(driver.is_live, names[-24:])) < 16:
                    tokens = prompt_of(rng, rng.randrange(20, MOST_PROMPT), min(vocab_size, 40_000))
                    seeded = GREEDY.replace(
                        max_tokens=rng.randrange(20, MOST_TOKENS),
                        temperature=rng.choice((0.0, 0.9)),
                        seed=len(names),
                    )
                    asked.append((tokens, seeded))
                    names.append(driver.submit(tokens, seeded))
                driver.read()
                live = [name for name in names[-24:] if driver.is_live(name)]
                if is_moved and live and chance.random() < 0.5:
                    name = chance.choice(live)
                    where = driver.engine.where(name)
                    if where is not None:
                        driver.engine.move(name, 1 - where.index)
                next_kill = (num_kills + 1) * args.moves / (args.kills + 1)
                if is_moved and num_kills < args.kills and moves.num_moves >= next_kill:
                    num_kills += _kill_one(driver, chance)
            driver.finish()
            driver.engine.check_integrity()
            told.append([driver.streams[name].token_ids for name in names])
            num_wanted = len(names)
        moved = driver.engine.moves
        driver.engine.close()
        plain = PlainModel(model, MOST_PROMPT + MOST_TOKENS)
        partings = [
            plain.parting(*each, one, other)
            for each, one, other in zip(asked, *told, strict=False)
            if one != other
        ]
    return {
        "soak": {
            "moves": moved.num_moves, "pages": moved.num_pages, "killed": num_kills,
            "compared": num_wanted, "tokens": sum(map(len, told[0])),
            "different": len(partings), "furthest_from_both": max(partings, default=0.0),
            "decided": sum(parting >= TIE for parting in partings),
        }
    }  # fmt: skip


def _kill_one(driver: Driver, chance: random.Random) -> bool:
    """Kills a replica that serves, if both do; whether it did."""
    victim = chance.choice(driver.engine.replicas)
    if victim.process_id is None or not all(each.ready for each in driver.engine.replicas):
        return False
    os.kill(victim.process_id, signal.SIGKILL)
    return True


def apart(args: argparse.Namespace) -> dict[str, Any]:
    """The same arrivals for two replicas of both kinds and for one of each."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(2):
        for roles in ("", "prefill,decode"):
            driver = Driver(replica_roles=roles, scheduling_policy=args.policy)
            found.setdefault(roles or "both,both", []).append(_serve(driver, args))
            driver.engine.close()
    return {"apart": found, "rate": args.rate, "seconds": args.seconds}


def _serve(driver: Driver, args: argparse.Namespace) -> dict[str, float]:
    rng = random.Random(4)
    arrivals: list[tuple[float, Callable[[], None]]] = []
    at_s = 0.0
    while at_s < args.seconds:
        at_s += rng.expovariate(args.rate)
        is_chat = rng.random() < 0.7
        prompt = prompt_of(rng, rng.randrange(20, 120) if is_chat else rng.randrange(600, 1400))
        params = GREEDY.replace(max_tokens=rng.randrange(60, 160) if is_chat else 16)

        def submit(prompt: list[int] = prompt, params: Any = params, chat: bool = is_chat) -> None:
            targets = {"ttft_target_s": args.ttft, "tpot_target_s": args.tpot} if args.ttft else {}
            driver.streams[driver.submit(prompt, params, **targets)].is_chat = chat

        arrivals.append((at_s, submit))
    begun_s = time.monotonic()
    for at_s, submit in arrivals:
        while (left_s := begun_s + at_s - time.monotonic()) > 0:
            if driver.engine.has_unfinished:
                driver.read()
            else:
                time.sleep(min(left_s, 0.005))
        submit()
    driver.finish()
    seconds = time.monotonic() - begun_s
    streams = driver.streams.values()
    chats = [stream for stream in streams if stream.is_chat]
    gaps = np.concatenate([np.diff(stream.times_s) for stream in chats])
    tpots = [
        (stream.times_s[-1] - stream.times_s[0]) / (len(stream.token_ids) - 1) for stream in chats
    ]
    first = {
        kind: [
            each.times_s[0] - each.arrival_s for each in streams if each.is_chat == (kind == "chat")
        ]
        for kind in ("chat", "long")
    }
    return {
        "requests": len(driver.streams),
        "tokens_per_s": round(sum(len(each.token_ids) for each in streams) / seconds, 1),
        **_quantiles("gap", gaps),
        **_quantiles("tpot", tpots),
        **_quantiles("chat_ttft", first["chat"]),
        **_quantiles("long_ttft", first["long"]),
        "moves": driver.engine.moves.num_moves,
        "page_ms": round(1e3 * driver.engine.moves.page_s, 3),
    }


def _quantiles(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    return {
        f"{name}_{label}_ms": round(1e3 * float(np.quantile(values, share)), 1)
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }


def main() -> int:
    """Prints what was found, as JSON; 1 if tokens differ where the model is decided."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pause", "soak", "apart"))
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--kills", type=int, default=0, help="of replicas, in a soak")
    parser.add_argument("--tiny", action="store_true", help="a random two-layer model, in a soak")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which requests arrive")
    parser.add_argument("--policy", default="slo")
    parser.add_argument(
        "--ttft", type=float, default=0.0, help="target of all, in seconds; 0: none"
    )
    parser.add_argument("--tpot", type=float, default=0.1, help="target of all, with --ttft")
    args = parser.parse_args()
    found = {"pause": pause, "soak": soak, "apart": apart}[args.what](args)
    print(json.dumps({**about_machine(), **found}, indent=1))
    return 1 if found.get("soak", {}).get("decided") else 0


if __name__ == "__main__":
    sys.exit(main())
