"""Sends requests to a live engine when they are meant to be sent, however slow it is."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.errors import OctavoError, OverloadedError, UnattainableTargetError
from octavo.engine.input.targets import Targets
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.simulation.metrics import summarize
from octavo.engine.simulation.request_record import RequestRecord
from octavo.engine.simulation.workloads.traffic import Arrival, live_prompt


@dataclass(frozen=True, slots=True)
class OpenLoopRun:
    """How a live run went.

    Attributes:
        records: every offered request, as its client saw it.
        gaps_s: waits between outputs, all requests together.
        duration_s: first arrival meant to last event.
    """

    records: list[RequestRecord]
    gaps_s: array[float]
    duration_s: float

    def summary(self) -> dict[str, Any]:
        """Figures fit for JSON, as of a simulation."""
        return {**summarize(self.records, self.gaps_s), "duration_s": self.duration_s}


async def run_open_loop(
    engine: AsyncEngine,
    arrivals: Sequence[Arrival],
    *,
    seed: object = 0,
) -> OpenLoopRun:
    """Serves a workload open loop: late answers do not hold back later requests.

    Requests go with the longest limit that fits, and the client leaves when it has its tokens, so
    that the scheduler cannot know lengths from limits.

    Args:
        engine: started, idle.
        arrivals: requests with times from now on.
        seed: of the prompts' token ids; runs of different seeds find nothing of each other in the
            prefix cache.

    Returns:
        Times from the moment each request was *meant* to be sent.
    """
    await engine.start()
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    gaps_s = array("d")
    vocab_size = engine.model_config.vocab_size

    async def serve(arrival: Arrival, prompt: list[int]) -> RequestRecord:
        record = RequestRecord(
            request_id=arrival.request_id,
            arrival_s=arrival.arrival_s,
            num_input=arrival.num_input,
            traffic_class=arrival.traffic_class,
        )
        await asyncio.sleep(max(0.0, begin_s + arrival.arrival_s - loop.time()))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max(1, engine.max_model_len - arrival.num_input),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        traffic = arrival.traffic_class
        stream = engine.generate(
            prompt,
            params,
            arrival.request_id,
            priority=traffic.priority,
            targets=Targets(
                ttft_target_s=traffic.ttft_target_s,
                tpot_target_s=traffic.tpot_target_s,
                e2e_target_s=traffic.e2e_target_s,
            ),
            output_len_class=traffic.name,
            tenant=traffic.tenant,
        )
        try:
            async for output in stream:
                now_s = loop.time() - begin_s
                count = len(output.outputs[0].token_ids)
                record.cached_tokens = output.num_cached_tokens
                if count:
                    _take(record, min(count, arrival.num_output - record.num_output), now_s, gaps_s)
                if record.num_output >= arrival.num_output:
                    break
            record.status = "length" if record.num_output >= arrival.num_output else "failed"
        except (OverloadedError, UnattainableTargetError):
            record.status = "rejected"
        except OctavoError:
            record.status = "failed"
        finally:
            await stream.aclose()
        record.finished_s = loop.time() - begin_s
        return record

    tasks = []
    for arrival in arrivals:
        tasks.append(serve(arrival, live_prompt(arrival, vocab_size, seed)))
    begin_s = loop.time()  # making prompts took a while
    records = await asyncio.gather(*tasks)
    return OpenLoopRun(list(records), gaps_s, loop.time() - begin_s)


def _take(record: RequestRecord, count: int, now_s: float, gaps_s: array[float]) -> None:
    if record.last_token_s is None:
        record.first_token_s = now_s
    else:
        gap_s = now_s - record.last_token_s
        gaps_s.append(gap_s)
        record.max_stall_s = max(record.max_stall_s, gap_s)
    record.last_token_s = now_s
    record.num_output += count
