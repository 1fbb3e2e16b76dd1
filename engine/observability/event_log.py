"""Everything the engine's loop was told and decided, one JSON object a line.

A log holds what a scheduler's decisions depend on and the decisions themselves, so that
`octavo simulate --replay` can feed the first to a fresh scheduler and hold it to the second.
It holds prompts as token ids: treat it as what clients wrote.

Lines, each with `t`, the time in seconds on the engine's clock:

    {"octavo_log": 1, "limits": …, "scheduler": …, …}   first of all
    {"t", "add": {request's fields}, "refused"?: error type}
    {"t", "cancel": id, "status", "found"}      {"t", "finish": id, "stop_reason", "found"}
    {"t", "turn": plan or null, "transfers"?: [[id, ok, seconds]],
     "ready"?: [[id, tokens] or [id, tokens, [forced token ids], how many of them were appended]],
     "ended"?: [[id, status]], "why"?: [[id, decision, reason, for whom, tokens, seconds]] of a
     scheduler that explains itself}
    {"t", "commit": step id, "rows": [[token ids]], "duration_s", "priced_s": what the step-time
     model expected it to take, "ended"?: [[id, status]]}
    {"t", "fail": [ids of requests whose KV was not finite]}
    {"t", "only": [ids of requests on trial] or null}
    {"t", "pages_named": id of the request whose pages can be found from now on}
    {"t", "pages_wanted": [names of prefix pages, in hexadecimal], "copy": its number or null}
    {"t", "pages_came": [names of prefix pages from another engine], "host_pages": those they got}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from octavo.engine.executor import TransferDone
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.request import Request
from octavo.engine.scheduler.forced_tokens import Unblocked
from octavo.engine.scheduler.step_plan import StepLimits, StepPlan, StepResult

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.engine.core import EngineCore

FORMAT = 1

_REQUEST_FIELDS = (
    "request_id", "prompt_token_ids", "seed", "eos_token_ids", "max_tokens", "arrival_s",
    "priority", "deadline_s", "tenant", "cache_salt", "ttft_target_s", "tpot_target_s",
    "e2e_target_s", "output_len_class", "known_output_len", "label",
)  # fmt: skip
_SAMPLING_FIELDS = ("min_tokens", "stop_token_ids", "prompt_logprobs")


class EventLines:
    """Makes a log's lines as things happen. One thread, the loop's own, calls it.

    Args:
        write: takes a line, as plain values.
    """

    def __init__(self, write: Callable[[dict[str, Any]], object]) -> None:
        self._take_line = write
        self._was_idle = False

    def added(self, request: Request, now_s: float, refusal: Exception | None) -> None:
        """A request was offered; `refusal` is why it was not taken."""
        extra = {} if refusal is None else {"refused": type(refusal).__name__}
        self._write(t=now_s, add=request_record(request), **extra)

    def cancelled(self, request_id: str, status: str, found: bool, now_s: float) -> None:
        """A client left, or the engine's front ended a request."""
        self._write(t=now_s, cancel=request_id, status=status, found=found)

    def finished(self, request_id: str, stop_reason: Any, found: bool, now_s: float) -> None:
        """A request's text met a stop string."""
        self._write(t=now_s, finish=request_id, stop_reason=stop_reason, found=found)

    def turned(
        self,
        plan: StepPlan | None,
        transfers: Sequence[TransferDone],
        ready: Sequence[Unblocked],
        ended: Iterable[Request],
        now_s: float,
    ) -> None:
        """The scheduler was told of copies' ends, of requests that may go on from so many tokens
        and what they must go on with, and asked for a plan."""
        extra: dict[str, Any] = {}
        if transfers:
            extra["transfers"] = [list(done) for done in transfers]
        if ready:
            extra["ready"] = [list(item if item.forced else item[:2]) for item in ready]
        if ends := _ends(ended):
            extra["ended"] = ends
        if plan is not None and plan.reasons:
            extra["why"] = [
                [reason.request_id, reason.decision.value, *reason[2:]] for reason in plan.reasons
            ]
        is_idle = plan is None and not extra
        if is_idle and self._was_idle:
            return  # a loop that waits says so once
        self._write(t=now_s, turn=None if plan is None else plan_record(plan), **extra)
        self._was_idle = is_idle

    def committed(
        self, plan: StepPlan, result: StepResult, ended: Iterable[Request], now_s: float
    ) -> None:
        """A step's result was taken in."""
        ends = _ends(ended)
        rows = [list(row.token_ids) for row in result.rows]
        self._write(
            t=now_s, commit=plan.step_id, rows=rows, duration_s=result.duration_s,
            priced_s=round(plan.priced_s, 9),
            **({"broken": list(result.broken)} if result.broken else {}),
            **({"barred": list(result.barred)} if result.barred else {}),
            **({"ended": ends} if ends else {}),
        )  # fmt: skip

    def failed(self, broken: Iterable[str], now_s: float) -> None:
        """A step failed, and every step on its way and the device's state were lost."""
        self._write(t=now_s, fail=list(broken))

    def only(self, request_ids: Iterable[str] | None, now_s: float) -> None:
        """Some requests are tried apart from all others; None ends it."""
        self._write(t=now_s, only=None if request_ids is None else list(request_ids))

    def pages_named(self, request_id: str, now_s: float) -> None:
        """The names of a request's pages were asked for, which makes them findable."""
        self._write(t=now_s, pages_named=request_id)

    def pages_wanted(
        self, names: Iterable[PageHash], transfer_id: int | None, now_s: float
    ) -> None:
        """Prefix pages are to be copied to the host, for another engine."""
        self._write(t=now_s, pages_wanted=[name.hex() for name in names], copy=transfer_id)

    def pages_came(
        self, names: Iterable[PageHash], host_pages: Iterable[int], now_s: float
    ) -> None:
        """Prefix pages came from another engine."""
        named = [name.hex() for name in names]
        self._write(t=now_s, pages_came=named, host_pages=list(host_pages))

    def _write(self, **line: Any) -> None:
        self._was_idle = False
        self._take_line(line)


class EventLog(EventLines):
    """Writes a log.

    Args:
        file: text, written to line by line; the caller closes it, or leaves a `with` block.
        limits: the scheduler's.
        scheduler_args: what it was made with besides; values fit for JSON.
        about: more for the first line.
    """

    def __init__(
        self,
        file: TextIO,
        limits: StepLimits,
        scheduler_args: Mapping[str, Any] = {},
        **about: Any,
    ) -> None:
        super().__init__(lambda line: file.write(json.dumps(line, separators=(",", ":")) + "\n"))
        self._file = file
        self._write(
            octavo_log=FORMAT, limits=asdict(limits), scheduler=dict(scheduler_args), **about
        )

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def start_log(core: EngineCore, config: EngineConfig, path: str | Path) -> EventLog:
    """Has a live engine's loop record into a new file, from now on; it must be idle.

    Raises:
        OSError: the file cannot be written.
    """
    log = EventLog(
        open(path, "w", buffering=1, encoding="utf-8"),  # noqa: SIM115
        core.scheduler.limits,
        {
            "policy": config.scheduling_policy,
            "enable_prefix_caching": config.enable_prefix_caching,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "watermark": config.watermark,
            "num_decode_steps": config.num_decode_steps,
            "page_copy_s": core.scheduler.forecast.page_copy_s,
        },
        overlap=config.overlap,
    )
    core.log = log
    return log


def request_record(request: Request) -> dict[str, Any]:
    """What of a request a scheduler's decisions may depend on; defaults left out where empty."""
    record = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    params = {name: getattr(request.sampling_params, name) for name in _SAMPLING_FIELDS}
    if request.has_grammar:
        params["is_gated"] = True
    if request.pooling is not None:
        params["pooling"] = request.pooling.pooling
    if request.output_token_ids:
        params["output_token_ids"] = [*request.output_token_ids]
        params["first_token_s"] = request.metrics.first_token_s
    return {k: v for k, v in {**record, **params}.items() if v not in (None, "", ())}


def plan_record(plan: StepPlan) -> dict[str, Any]:
    """A plan as plain values: two plans are the same decision if their records are equal."""
    rows = plan.decode_rows
    record: dict[str, Any] = {
        "step": plan.step_id,
        "num_steps": plan.num_steps,
        "decode": [
            [request.request_id, slot, start, count]
            for request, slot, start, count in zip(
                rows.requests,
                rows.slots.tolist(),
                rows.starts.tolist(),
                rows.max_new_tokens.tolist(),
                strict=True,
            )
        ],
        "prefill": [
            [row.request.request_id, row.slot, row.start, row.num_tokens, row.samples,
             row.is_new, list(row.page_ids)]
            for row in plan.prefill_rows
        ],
        "pages": [list(update) for update in plan.page_updates],
    }  # fmt: skip
    if plan.preempted:
        record["preempted"] = list(plan.preempted)
    for name in ("copy_outs", "copy_ins"):
        copies = getattr(plan, name)
        if copies:
            record[name] = [
                [copy.transfer_id, copy.request_id, list(copy.device_pages), list(copy.host_pages)]
                for copy in copies
            ]
    return record


def _ends(requests: Iterable[Request]) -> list[list[str]]:
    return [[request.request_id, request.status.value] for request in requests]
