"""Named settings: a replica, and traffic for it at any rate."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Priority
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.executor import SwapLink
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME, StepTime
from octavo.engine.simulation.workloads.arrivals import (
    Traffic,
    checked_rate,
    gamma_arrivals,
    lengths_like,
    spread_classes,
    superpose,
    thin,
    window,
)
from octavo.engine.simulation.workloads.traces import read_arrivals
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

CHAT = TrafficClass(name="chat", ttft_target_s=1.0, tpot_target_s=0.05)
CODE = TrafficClass(name="code", ttft_target_s=1.5, tpot_target_s=0.05)
BATCH = TrafficClass(name="batch", e2e_target_s=60.0, priority=Priority.LOW)
REASONING = TrafficClass(name="reasoning", ttft_target_s=5.0, tpot_target_s=0.06)
SLOW_BATCH = TrafficClass(name="batch", e2e_target_s=300.0, priority=Priority.LOW)

WINDOW_S = 400.0
FIRST_WINDOW_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One replica and its traffic.

    Attributes:
        name: of the setting.
        limits: of the replica; a policy with a token budget of its own gets it in its place.
        step_time: of the replica.
        link: to host memory.
        traffic: arrivals by rate and seed.
        rates: at which policies are compared, ascending.
        max_tokens: every request's limit.
        enable_prefix_caching: whether requests share pages of prompts that begin alike.
        max_request_len: tokens of the longest request that may come; 0: nobody said.
    """

    name: str
    limits: StepLimits
    step_time: StepTime
    link: SwapLink
    traffic: Traffic
    rates: tuple[float, ...]
    max_tokens: int
    enable_prefix_caching: bool = False
    max_request_len: int = 0


def replica_limits(
    *,
    kv_tokens: int,
    num_rows: int = 128,
    max_num_batched_tokens: int = 4096,
    page_size: int = 16,
    max_model_len: int = 16_384,
    max_num_steps: int = 1,
    host_kv_tokens: int = 0,
    windows: tuple[int | None, ...] = (None,),
) -> StepLimits:
    """Limits of a simulated replica; one of its pages more is the trash page.

    Args:
        kv_tokens: that have room if every cache group keeps all of them.
        windows: by cache group, see `PageNeeds`.
    """
    num_pages = kv_tokens // page_size * len(windows)
    return StepLimits(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=num_rows,
        max_num_steps=max_num_steps,
        max_prefill_rows=num_rows,
        max_pages_per_seq=min(-(-max_model_len // page_size), num_pages),
        page_size=page_size,
        num_pages=num_pages + 1,
        max_model_len=max_model_len,
        token_edges=token_edges(max_num_batched_tokens),
        num_host_pages=host_kv_tokens // page_size * len(windows),
        windows=windows,
    )


def token_edges(most: int) -> tuple[int, ...]:
    """Bucket edges as a finely compiled engine has them: every 64 tokens up to 1,024, then four to
    every doubling."""
    edges = [16, 32]
    while edges[-1] < most:
        step = 64 if edges[-1] < 1024 else 1 << (edges[-1].bit_length() - 3)
        edges.append(edges[-1] // step * step + step)
    return (*(edge for edge in edges if edge < most), most)


def azure_setting(trace_dir: str | Path) -> Setting:
    """Real arrivals on a published replica: conversations and code completions of Azure, 2023.

    Conversation (TTFT 1 s) and code (1.5 s) with 50 ms a token, a fifth of the conversations as
    batch work due within 60 s; 128 rows, 64,000 tokens of KV in pages of 16. About 8.4 requests
    a second as recorded; other rates by thinning, higher ones by superposing later windows.

    Args:
        trace_dir: folder of azure_2023_conv.csv and azure_2023_code.csv.

    Raises:
        InvalidConfigError: a trace cannot be read.

    Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace (CC-BY-4.0); Splitwise, ISCA'24.
    """
    return Setting(
        name="azure",
        limits=replica_limits(kv_tokens=64_000),
        step_time=NIYAMA_STEP_TIME,
        link=SwapLink(),
        traffic=_azure_traffic(trace_dir),
        rates=(1.66, 2.69, 3.65, 4.81, 8.41, 16.8),
        max_tokens=2048,
    )


def memory_bound_setting(trace_dir: str | Path) -> Setting:
    """The same replica with 16,000 tokens of KV, and outputs of thousands of tokens.

    Half of the requests are conversations as in `azure_setting`, three tenths reason (prompts of
    conversations, outputs log-normal around 1,500 tokens; TTFT 5 s, 60 ms a token), a fifth is
    batch work of the same lengths, due within 300 s. Poisson arrivals over 400 s; the host holds
    64,000 tokens of KV.

    Args and raises: as for `azure_setting`.
    """
    conversations = [
        arrival
        for arrival in read_arrivals(Path(trace_dir) / "azure_2023_conv.csv")
        if arrival.num_input <= 4096
    ]
    chat_lengths = lengths_like(conversations)

    def long_lengths(rng: random.Random) -> tuple[int, int]:
        num_input, _ = chat_lengths(rng)
        return num_input, min(6000, max(200, round(1500 * rng.lognormvariate(0.0, 0.6))))

    def traffic(rate: float, seed: int) -> list[Arrival]:
        kinds = ((0.5, CHAT, chat_lengths), (0.3, REASONING, long_lengths),
                 (0.2, SLOW_BATCH, long_lengths))  # fmt: skip
        return superpose(
            *(
                gamma_arrivals(
                    share * rate, WINDOW_S, lengths, seed=seed, traffic_class=kind,
                    prefix=f"{kind.name}-",
                )
                for share, kind, lengths in kinds
            )
        )  # fmt: skip

    return Setting(
        name="memory-bound",
        limits=replica_limits(kv_tokens=16_000, host_kv_tokens=64_000),
        step_time=NIYAMA_STEP_TIME,
        link=SwapLink(),
        traffic=traffic,
        rates=(0.2, 0.3, 0.4, 0.6, 0.9),
        max_tokens=8192,
    )


SETTINGS = {"azure": azure_setting, "memory-bound": memory_bound_setting}


def get_setting(name: str, trace_dir: str | Path | None) -> Setting:
    """The setting called `name`.

    Raises:
        InvalidConfigError: there is none, or it needs traces and no folder was given.
    """
    if name not in SETTINGS:
        raise InvalidConfigError("setting", name, " or ".join(sorted(SETTINGS)))
    if trace_dir is None:
        raise InvalidConfigError("trace_dir", trace_dir, "the folder of the Azure traces")
    return SETTINGS[name](trace_dir)


def _azure_traffic(trace_dir: str | Path) -> Traffic:
    conversations = read_arrivals(Path(trace_dir) / "azure_2023_conv.csv", CHAT, "chat-")
    code = read_arrivals(Path(trace_dir) / "azure_2023_code.csv", CODE, "code-")

    def one_window(index: int, seed: int) -> list[Arrival]:
        begin_s = FIRST_WINDOW_S + index * WINDOW_S
        end_s = begin_s + WINDOW_S
        chats = spread_classes(window(conversations, begin_s, end_s), 0.2, BATCH, seed)
        return superpose(chats, window(code, begin_s, end_s))

    base_rate = len(one_window(0, 0)) / WINDOW_S

    def traffic(rate: float, seed: int) -> list[Arrival]:
        checked_rate(rate)
        num_windows = max(1, math.ceil(rate / base_rate - 1e-3))
        arrivals = superpose(*(one_window(index, seed) for index in range(num_windows)))
        share = rate * WINDOW_S / len(arrivals)
        return thin(arrivals, min(1.0, share), seed)

    return traffic
