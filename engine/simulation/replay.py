"""A recorded log, fed to a fresh scheduler: does it decide the same?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.engine.errors import InvalidConfigError, OctavoError
from octavo.engine.observability.event_log import FORMAT, plan_record
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority, Request, RequestStatus
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.forced_tokens import Unblocked
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import RowTokens, StepLimits, StepPlan, StepResult
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass
from octavo.engine.structured.params import StructuredOutputsParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay found.

    Attributes:
        num_events: lines replayed.
        num_plans: plans compared.
        num_tokens: output tokens that ended up in requests.
        difference: the first decision that was another one, as text; None if all were the same.
    """

    num_events: int
    num_plans: int
    num_tokens: int
    difference: str | None


class _DifferentError(Exception):
    """A decision that is not the recorded one."""


def read_log(path: str | Path) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The first line of a log, and the others.

    Raises:
        InvalidConfigError: the file cannot be read or is no log.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        head = json.loads(lines[0])
        if head.get("octavo_log") != FORMAT:
            raise ValueError(f"octavo_log = {head.get('octavo_log')!r}")
        head["limits"]["token_edges"] = tuple(head["limits"]["token_edges"])
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise InvalidConfigError(
            "log", Path(path), f"a log that --record wrote ({error!r})"
        ) from None
    return head, _parsed(path, lines[1:])


def _parsed(path: str | Path, lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 2):
        try:
            event = json.loads(line)
        except ValueError:
            if number == len(lines) + 1:
                return  # cut off in the middle of writing: the engine was killed
            raise InvalidConfigError("log", Path(path), f"JSON in line {number}") from None
        yield event


def replay(path: str | Path) -> Replay:
    """Feeds a log to a scheduler made as the recorded one was, up to the first difference.

    Raises:
        InvalidConfigError: the file is no log.
    """
    head, events = read_log(path)
    scheduler = Scheduler(StepLimits.from_json(head["limits"]), **head["scheduler"])
    player = _Player(scheduler)
    num_events = 0
    difference = None
    for event in events:
        num_events += 1
        try:
            player.play(event)
        except _DifferentError as error:
            difference = f"line {num_events + 1}, at {event['t']:.6f} s: {error}"
            break
    return Replay(
        num_events=num_events,
        num_plans=player.num_plans,
        num_tokens=player.num_tokens,
        difference=difference,
    )


class _Player:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.plans: dict[int, StepPlan] = {}
        self.num_plans = 0
        self.num_tokens = 0

    def play(self, event: dict[str, Any]) -> None:
        for kind in (
            "add", "cancel", "finish", "turn", "commit", "fail", "only", "pages_named",
            "pages_wanted", "pages_came",
        ):  # fmt: skip
            if kind in event:
                getattr(self, f"_{kind}")(event, float(event["t"]))
                return

    def _add(self, event: dict[str, Any], now_s: float) -> None:
        refused, request = None, request_from_record(event["add"])
        if self.scheduler.get(request.request_id) is not None:
            raise _DifferentError(f"request {request.request_id} is added while it is live")
        try:
            self.scheduler.add(request, now_s)
        except OctavoError as error:
            refused = type(error).__name__
        _same("refused", event.get("refused"), refused)

    def _cancel(self, event: dict[str, Any], now_s: float) -> None:
        status = RequestStatus(event["status"])
        found = self.scheduler.cancel(event["cancel"], now_s, status) is not None
        _same("cancelled", event["found"], found)

    def _finish(self, event: dict[str, Any], now_s: float) -> None:
        request = self.scheduler.get(event["finish"])
        found = request is not None and self.scheduler.finish(
            request, RequestStatus.STOPPED, event["stop_reason"], now_s
        )
        _same("finished", event["found"], found)

    def _pages_named(self, event: dict[str, Any], now_s: float) -> None:
        del now_s
        self.scheduler.page_names(event["pages_named"])

    def _pages_wanted(self, event: dict[str, Any], now_s: float) -> None:
        names = [bytes.fromhex(name) for name in event["pages_wanted"]]
        copy = self.scheduler.transfers.bring_to_host(names, now_s)
        _same("copy to the host", event["copy"], copy)

    def _pages_came(self, event: dict[str, Any], now_s: float) -> None:
        del now_s
        names = [bytes.fromhex(name) for name in event["pages_came"]]
        pages = self.scheduler.transfers.take_in(names)
        _same("host pages", event["host_pages"], [*pages.values()])

    def _turn(self, event: dict[str, Any], now_s: float) -> None:
        ended = self._unblock(event.get("ready", ()), now_s)
        for transfer_id, ok, *seconds in event.get("transfers", ()):
            self.scheduler.complete_transfer(transfer_id, ok, now_s, *seconds)
        ended += self.scheduler.expire(now_s)
        plan = self.scheduler.plan(now_s)
        ended += self.scheduler.take_ended()
        found = None if plan is None else plan_record(plan)
        recorded = event["turn"]
        if recorded is not None or found is not None:
            for name in {*(recorded or {}), *(found or {})}:
                _same(f"plan's {name}", (recorded or {}).get(name), (found or {}).get(name))
        _same("ended", event.get("ended", []), _ends(ended))
        if plan is not None:
            self.plans[plan.step_id] = plan
            self.num_plans += 1

    def _unblock(self, ready: Iterable[list[Any]], now_s: float) -> list[Request]:
        """Unblocks requests and offers what their grammars force; which of them end by that."""
        offers, recorded = [], {}
        for request_id, num_tokens, *forced in ready:
            self.scheduler.unblock(request_id, num_tokens)
            if forced:
                offers.append(Unblocked(request_id, num_tokens, tuple(forced[0])))
                recorded[request_id] = forced[1]
        news = self.scheduler.append_forced(offers, now_s)
        found = {item.request.request_id: len(item.new_token_ids) for item in news}
        _same("appended", recorded, {name: found.get(name, 0) for name in recorded})
        self.num_tokens += sum(found.values())
        return [item.request for item in news if item.finished]

    def _commit(self, event: dict[str, Any], now_s: float) -> None:
        rows = tuple(RowTokens(tuple(token_ids)) for token_ids in event["rows"])
        result = StepResult(
            rows=rows,
            duration_s=event["duration_s"],
            broken=tuple(event.get("broken", ())),
            barred=tuple(event.get("barred", ())),
        )
        committed = self.scheduler.commit(self.plans.pop(event["commit"]), result, now_s)
        self.num_tokens += sum(len(item.new_token_ids) for item in committed)
        ended = _ends(item.request for item in committed if item.finished)
        _same("ended", event.get("ended", []), ended)

    def _fail(self, event: dict[str, Any], now_s: float) -> None:
        self.plans.clear()
        self.scheduler.recover(now_s, event["fail"])

    def _only(self, event: dict[str, Any], now_s: float) -> None:
        self.scheduler.only(event["only"])


def request_from_record(record: dict[str, Any]) -> Request:
    """The request that `request_record` described."""
    values = dict(record)
    max_tokens = values["max_tokens"]
    is_gated = values.pop("is_gated", False)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json_object=True) if is_gated else None,
        max_tokens=max_tokens,
        min_tokens=values.pop("min_tokens", 0),
        stop_token_ids=values.pop("stop_token_ids", ()),
        prompt_logprobs=values.pop("prompt_logprobs", None),
    )
    if values.get("pooling") is not None:
        values["pooling"] = PoolingParams(pooling=values["pooling"])
    values["eos_token_ids"] = tuple(values.get("eos_token_ids", ()))
    values["priority"] = Priority(values.get("priority", Priority.NORMAL))
    first_token_s = values.pop("first_token_s", None)
    request = Request(sampling_params=params, **values)
    request.metrics.first_token_s = first_token_s
    return request


def arrivals_from_log(path: str | Path) -> list[Arrival]:
    """The recorded requests as a workload: the same arrivals for another policy or machine.

    Each is as long as it was; those that did not end there, as long as they came. Promises are
    those of the requests; prompts keep their lengths but share nothing.

    Raises:
        InvalidConfigError: the file is no log.
    """
    _, events = read_log(path)
    added: dict[str, dict[str, Any]] = {}
    plans: dict[int, list[str]] = {}
    num_output: dict[str, int] = {}
    cancelled: dict[str, float] = {}
    for event in events:
        if "add" in event:
            added[event["add"]["request_id"]] = event["add"]
        elif "turn" in event:
            if plan := event["turn"]:
                plans[plan["step"]] = [row[0] for row in (*plan["decode"], *plan["prefill"])]
            for request_id, _, *forced in event.get("ready", ()):
                num_output[request_id] = num_output.get(request_id, 0) + sum(forced[1:])
        elif "commit" in event:
            for request_id, row in zip(plans.pop(event["commit"]), event["rows"], strict=True):
                num_output[request_id] = num_output.get(request_id, 0) + len(row)
        elif event.get("cancel") and event["found"]:
            cancelled[event["cancel"]] = event["t"]
    begin_s = min((record["arrival_s"] for record in added.values()), default=0.0)
    return [
        Arrival(
            request_id=request_id,
            arrival_s=record["arrival_s"] - begin_s,
            num_input=len(record["prompt_token_ids"]),
            num_output=max(1, num_output.get(request_id, 1)),
            traffic_class=TrafficClass(
                name=record.get("output_len_class", ""),
                ttft_target_s=record.get("ttft_target_s"),
                tpot_target_s=record.get("tpot_target_s"),
                e2e_target_s=record.get("e2e_target_s"),
                priority=Priority(record.get("priority", Priority.NORMAL)),
                tenant=record.get("tenant", ""),
            ),
            cancel_s=cancelled[request_id] - begin_s if request_id in cancelled else None,
        )
        for request_id, record in sorted(added.items(), key=lambda item: item[1]["arrival_s"])
    ]


def _ends(requests: Iterable[Request]) -> list[list[str]]:
    return [[request.request_id, request.status.value] for request in requests]


def _same(what: str, recorded: Any, found: Any) -> None:
    if recorded != found:
        raise _DifferentError(f"{what} is {_short(found)}, recorded {_short(recorded)}")


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
