"""Skip-join multi-level feedback queue: new and short answers first, without knowing lengths.

A request joins the level whose quantum its prompt fits, and sinks a level with every quantum of
service it has used. A level is worth a fixed time of waiting, so that nobody starves.

Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (FastServe), 2023.
"""

from __future__ import annotations

from octavo.engine.request import Request
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.live_request import Place
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.victims_by_place import last_in_order
from octavo.engine.scheduler.policy import Policy

PROMPT_TOKENS_PER_OUTPUT_TOKEN = 32
"""Prompt tokens that count like one output token: about what a step computes of each."""


def level(request: Request, quantum: int) -> int:
    """0 for the first level: quanta of 1, 2, 4, … times `quantum` output tokens' worth."""
    service = request.num_prompt_tokens / PROMPT_TOKENS_PER_OUTPUT_TOKEN
    service += len(request.output_token_ids)
    return int(service / quantum + 1).bit_length() - 1


def make(parameters: Parameters) -> Policy:
    """Skip-join MLFQ: `quantum` (tokens of the first level, default 32), `promote_s` (seconds of
    waiting that outweigh a level, default 5) and `token_budget` as for FCFS."""
    quantum = parameters.integer("quantum", 32, least=1)
    promote_s = parameters.number("promote_s", 5.0)

    def place(request: Request, forecast: Forecast) -> Place:
        return (request.arrival_s + level(request, quantum) * promote_s, request.arrival_s)

    return Policy(
        name="mlfq",
        place=place,
        choose_victims=last_in_order(place),
        budget=parameters.static_budget(),
        preempts_for_waiting=True,
        merges_prompts=True,
        max_skipped=16,
    )
