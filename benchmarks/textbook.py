"""The textbook workload: 80 requests, 24 rows, 120 pages, a token a step, by the real scheduler.

    python benchmarks/textbook.py [--json] [--policy slo --cost swap]

Prints, for each policy and cost model, how many requests were on time (`goodput`), the steps
played, the preemptions, and the most pages that rows held in any step, checked in every one.

How the workload's rules become the real scheduler's:
- A row with prompt p that has emitted k tokens needs ceil((p + k + 1) / 16) pages: just what the
  scheduler gives a prompt of p + 1 tokens, so that is what it is given.
- Prefill costs nothing: a step has room for any number of tokens.
- Step t runs from t - 1 to t: it is planned at t - 1, its tokens are there at t. A request of
  arrival a may be in step a.
- swap: whoever comes back is computed again within its first step, for nothing.
- recompute: whoever comes back computes 16 tokens a step, and emits nothing until its last one.
- restart: a preempted request is taken out and comes back as a new one, with nothing emitted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.engine.errors import OverloadedError, UnattainableTargetError
from octavo.engine.request import Request, RequestStatus
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.policies import get_policy
from octavo.engine.scheduler.policy import Policy, Snapshot
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import RowTokens, StepLimits, StepPlan, StepResult
from octavo.engine.scheduler.step_time_model import StepTimeModel

NUM_ROWS = 24
NUM_PAGES = 120
PAGE_SIZE = 16
COST_MODELS = ("swap", "recompute", "restart")
POLICIES = (
    "fcfs",
    "fcfs-shed:lengths=declared",
    "sjf:lengths=declared",
    "edf",
    "edf-shed:lengths=declared",
    "least-slack:lengths=declared",
    "slo:lengths=declared",
    "slo:lengths=declared (class means)",
)
MAX_STEPS = 3000
END_TOKEN = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the workload; times in steps."""

    arrival: int
    prompt: int
    output: int
    deadline: int

    @property
    def class_mean(self) -> int:
        """What is known of its output's length if only its class is."""
        return 20 if self.prompt <= 40 else 240


def jobs() -> list[Job]:
    """The workload, sorted by arrival."""
    rng = random.Random(7)
    drawn = []
    for _ in range(80):
        arrival = rng.randint(0, 200)
        if rng.random() < 0.7:
            prompt, output, slack = rng.randint(8, 40), rng.randint(8, 32), rng.randint(30, 60)
        else:
            prompt, output, slack = (
                rng.randint(64, 200),
                rng.randint(160, 320),
                rng.randint(220, 360),
            )
        drawn.append(Job(arrival, prompt, output, arrival + slack))
    return sorted(drawn, key=lambda job: job.arrival)


def main() -> None:
    """Prints a table, or one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", action="append", help="a policy's name; default: several")
    parser.add_argument("--cost", action="append", choices=COST_MODELS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print(
            f"{'policy':36s}{'cost':>10s}{'on time':>9s}{'steps':>7s}{'preempt':>9s}{'pages':>7s}"
        )
    for figures in run(args.policy or POLICIES, args.cost or COST_MODELS):
        if args.json:
            print(json.dumps(figures))
        else:
            print(
                f"{figures['policy']:36s}{figures['cost_model']:>10s}{figures['goodput']:9d}"
                f"{figures['steps']:7d}{figures['preemptions']:9d}{figures['peak_pages']:7d}"
            )


def run(policies: tuple[str, ...], cost_models: tuple[str, ...]) -> Iterator[dict[str, object]]:
    """Figures of each policy under each cost model."""
    for policy in policies:
        for cost_model in cost_models:
            name, _, note = policy.partition(" ")
            machine = Machine(jobs(), name, cost_model, class_means=bool(note))
            machine.play()
            yield {"policy": policy, "cost_model": cost_model, **machine.figures()}


class Machine:
    """Plays jobs through the scheduler, a step a time unit.

    Args:
        workload: the jobs, in order of arrival.
        policy: its name.
        cost_model: what coming back costs.
        class_means: declare the mean length of a job's class, not its own.
    """

    def __init__(
        self, workload: list[Job], policy: str, cost_model: str, *, class_means: bool = False
    ) -> None:
        self.jobs = workload
        self.cost_model = cost_model
        self.class_means = class_means
        longest = max(j.prompt for j in workload) + max(j.output for j in workload) + 2
        limits = StepLimits(
            max_num_batched_tokens=NUM_ROWS * longest,
            max_num_seqs=NUM_ROWS,
            max_num_steps=1,
            max_prefill_rows=NUM_ROWS,
            max_pages_per_seq=-(-longest // PAGE_SIZE),
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES + 1,
            max_model_len=longest,
            token_edges=(NUM_ROWS * longest,),
        )
        chosen = get_policy(policy)
        if cost_model == "recompute":
            chosen = dataclasses.replace(chosen, chunk=slow_return)
        self.policy: Policy = chosen
        # A machine whose steps take one time unit whatever is in them, and says so.
        step_time = StepTimeModel(
            limits.token_edges, fixed_s=1.0, decode_row_s=0.0, prefill_token_s=0.0
        )
        self.scheduler = Scheduler(
            limits,
            policy=chosen,
            enable_prefix_caching=False,
            watermark=0.0,
            step_time=step_time,
        )
        self.requests: dict[str, tuple[Job, Request]] = {}
        self.done_at: dict[int, int] = {}
        self.num_restarts = 0
        self.num_steps = 0
        self.peak_pages = 0

    def play(self) -> None:
        """Plays until every job is done or given up."""
        arriving = list(enumerate(self.jobs))[::-1]
        step = 0
        while step < MAX_STEPS and (arriving or self.scheduler.has_work):
            now_s = float(step - 1)
            while arriving and arriving[-1][1].arrival <= step:
                index, job = arriving.pop()
                self._add(index, job, now_s)
            plan = self.scheduler.plan(now_s)
            self.scheduler.take_ended()
            if plan is not None:
                self._check_pages(plan)
                if self.cost_model == "restart":
                    self._restart(plan, now_s)
                self._commit(plan, step)
            step += 1
        self.num_steps = step

    def figures(self) -> dict[str, object]:
        """What came of it."""
        on_time = [
            index for index, done in self.done_at.items() if done <= self.jobs[index].deadline
        ]
        return {
            "goodput": len(on_time),
            "steps": self.num_steps,
            "preemptions": self.scheduler.load().num_preemptions,
            "peak_pages": self.peak_pages,
        }

    def _add(self, index: int, job: Job, now_s: float, attempt: int = 0) -> None:
        known = job.class_mean if self.class_means else job.output
        most = max(other.output for other in self.jobs)
        request = Request(
            request_id=f"{index}/{attempt}",
            prompt_token_ids=[7] * (job.prompt + 1),
            sampling_params=SamplingParams(max_tokens=most),
            seed=0,
            eos_token_ids=(END_TOKEN,),
            max_tokens=most,
            arrival_s=float(job.arrival - 1),
            e2e_target_s=float(job.deadline - job.arrival + 1),
            known_output_len=known,
            output_len_class="short" if job.prompt <= 40 else "long",
        )
        self.requests[request.request_id] = (job, request)
        # Refused at the door: missed.
        with contextlib.suppress(OverloadedError, UnattainableTargetError):
            self.scheduler.add(request, now_s)

    def _commit(self, plan: StepPlan, step: int) -> None:
        """Emits a token for each row that samples; ends those whose output is complete."""
        rows = [self._token(request) for request in plan.decode_rows.requests]
        rows += [self._token(r.request) if r.samples else RowTokens(()) for r in plan.prefill_rows]
        result = StepResult(rows=tuple(rows), duration_s=1.0)
        for news in self.scheduler.commit(plan, result, float(step)):
            if news.finished and news.request.status is RequestStatus.STOPPED:
                self.done_at[int(news.request.request_id.split("/")[0])] = step

    def _token(self, request: Request) -> RowTokens:
        job, _ = self.requests[request.request_id]
        is_last = len(request.output_token_ids) + 1 == job.output
        return RowTokens((END_TOKEN if is_last else 7,))

    def _restart(self, plan: StepPlan, now_s: float) -> None:
        """Takes out the preempted and lets them come back with nothing done."""
        for request_id in plan.preempted:
            index, attempt = map(int, request_id.split("/"))
            if self.scheduler.cancel(request_id, now_s) is not None:
                self._add(index, self.jobs[index], now_s, attempt + 1)
                self.num_restarts += 1

    def _check_pages(self, plan: StepPlan) -> None:
        """The workload's own rule, row by row, apart from the scheduler's books."""
        requests = [*plan.decode_rows.requests, *(row.request for row in plan.prefill_rows)]
        assert len(requests) <= NUM_ROWS
        num_pages = 0
        for request in requests:
            prompt, emitted = request.num_prompt_tokens - 1, len(request.output_token_ids)
            num_pages += -(-(prompt + emitted + 1) // PAGE_SIZE)
        num_owned = self.scheduler.load().num_owned_pages
        assert num_pages <= num_owned <= NUM_PAGES, (num_pages, num_owned)
        self.peak_pages = max(self.peak_pages, num_owned)


def slow_return(snapshot: Snapshot, request: Request, num_missing: int, budget: int) -> int:
    """A chunk of 16 tokens for whoever was preempted, the last known token in a step of its own."""
    if not request.metrics.num_preemptions:
        return min(num_missing, budget)
    return min(PAGE_SIZE, max(num_missing - 1, 1), budget)


if __name__ == "__main__":
    main()
