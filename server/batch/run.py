"""A batch from file to file: a window of lines in the engine, results as they end.

Grammars are compiled in threads beside, so that a line whose grammar takes long holds up nobody's
tokens but its own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from tqdm import tqdm

from octavo.engine.errors import InvalidRequestError, OctavoError, OverloadedError
from octavo.engine.input.input_processor import Submission
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.structured.compiler import COMPILE_THREADS
from octavo.engine.structured.grammar import CompiledGrammar
from octavo.server.batch.results import ResultsFile, count_lines
from octavo.server.batch.tasks import (
    BadLineError,
    Task,
    custom_id_of,
    read_lines,
    read_task,
)

if TYPE_CHECKING:
    from octavo.engine.any_engine import AnyEngine

OnError: TypeAlias = Literal["stop", "skip"]
LINES_PER_ROW = 2
"""Lines read ahead for each row of the engine: those that run, and as many that wait."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class BatchSummary:
    """What became of a batch.

    Attributes:
        num_done: lines answered in this run.
        num_found: lines that an earlier run had answered.
        num_bad: lines that could never be served.
        num_failed: lines whose request failed.
        num_tokens: tokens generated in this run, and those of texts that were embedded.
    """

    num_done: int = 0
    num_found: int = 0
    num_bad: int = 0
    num_failed: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Checked:
    """A task that can be served, what the engine takes of it, and how much of that it has taken."""

    task: Task
    submissions: list[Submission]
    num_taken: int = 0


@dataclass(slots=True)
class _Running:
    """A task in the engine, and those of its outputs that have come, by place."""

    task: Task
    outputs: dict[int, RequestOutput] = field(default_factory=dict)


class BatchRun:
    """Runs the lines of a file that have no result yet.

    Args:
        engine: nobody else's for the while.
        source: the file of requests.
        results: takes the results.
        defaults: parameters of plain lines.
        on_error: what a bad line does: "stop" ends the run, once those before it are answered;
            "skip" writes its error in place of a result.
        report: told of each bad line that is skipped.
        progress: show a bar.
    """

    def __init__(
        self,
        engine: AnyEngine,
        source: str | Path,
        results: ResultsFile,
        *,
        defaults: SamplingParams,
        on_error: OnError = "stop",
        report: Callable[[str], None] = _log.warning,
        progress: bool = True,
    ) -> None:
        self._engine = engine
        self._source = source
        self._results = results
        self._defaults = defaults
        self._on_error = on_error
        self._report = report
        self._window = LINES_PER_ROW * engine.num_rows
        self._compiling: dict[Future[CompiledGrammar | None], _Checked] = {}
        self._ready: deque[_Checked] = deque()
        self._running: dict[int, _Running] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="octavo-batch")
        self._bad: BadLineError | None = None
        self.summary = BatchSummary()
        self._bar = tqdm(
            total=count_lines(source),
            desc="Generating" if engine.inputs.generates else "Embedding",
            unit="line",
            disable=not progress,
        )

    def run(self) -> BatchSummary:
        """Runs to the end.

        Raises:
            BadLineError: a line can never be served, under `on_error` "stop".
            InvalidRequestError: the results are of other requests.
        """
        tasks = self._tasks()
        begun_s = self._engine.clock.now_s()
        try:
            while True:
                self._take_compiled()
                self._fill(tasks)
                if not self._running:
                    # Nor is one ready: an idle engine takes what it ever will.
                    if not self._compiling:
                        break
                    wait(self._compiling, return_when=FIRST_COMPLETED)
                    continue
                for output in self._engine.step():
                    self._take(output)
                elapsed_s = max(1e-9, self._engine.clock.now_s() - begun_s)
                rate = self.summary.num_tokens / elapsed_s
                unit = "output tok/s" if self._engine.inputs.generates else "tok/s"
                self._bar.set_postfix_str(f"{rate:.1f} {unit}", refresh=False)
        finally:
            self._bar.close()
            self._abandon()
        if self._bad is not None:
            raise self._bad
        return self.summary

    def _tasks(self) -> Iterator[Task]:
        """Tasks of lines without a result; none after a bad line that ends the run."""
        for number, line in read_lines(self._source):
            if self._results.is_done(number):
                self._check_name(number, line)
                self.summary.num_found += 1
                self._pass_over()
                continue
            try:
                yield read_task(number, line, self._defaults, self._engine)
            except BadLineError as error:
                if not self._skips(error):
                    return

    def _pass_over(self) -> None:
        """Moves the bar without a line's time, which would make the time left look short."""
        if not self._bar.disable:
            self._bar.initial += 1
            self._bar.n += 1

    def _check_name(self, number: int, line: bytes) -> None:
        names = self._results.names
        if number in names and names[number] != custom_id_of(line):
            found = f"line {number} is {names[number]!r}"
            allowed = f"results of {self._source}, whose line is {custom_id_of(line)!r}"
            raise InvalidRequestError("output", found, f"{allowed}; or --overwrite")

    def _skips(self, error: BadLineError) -> bool:
        """Whether the run goes on after a bad line."""
        if self._on_error == "stop":
            self._bad = self._bad or error
            return False
        self._report(str(error))
        self._results.append(error.number, error.record)
        self.summary.num_bad += 1
        self._bar.update()
        return True

    def _fill(self, tasks: Iterator[Task]) -> None:
        """Hands over what is ready, and reads on until the window is full."""
        while True:
            while self._ready and self._submit(self._ready[0]):
                self._ready.popleft()
            num_begun = len(self._running) + len(self._compiling)
            if self._ready or self._bad is not None or num_begun >= self._window:
                return
            task = next(tasks, None)
            if task is None:
                return
            self._check(task)

    def _check(self, task: Task) -> None:
        """Makes what the engine takes of a task; its grammar is left to a thread."""
        options = {name: value for name, value in task.options.items() if value is not None}
        try:
            submissions = [
                self._engine.inputs.process(
                    None, prompt, task.params,
                    now_s=self._engine.clock.now_s(), compile_grammar=False, **options,
                )
                for prompt in task.prompts
            ]  # fmt: skip
        except InvalidRequestError as error:
            self._refuse(task, error)
            return
        checked = _Checked(task, submissions)
        if task.params.structured_outputs is None:
            self._ready.append(checked)
        else:
            future = self._threads.submit(self._engine.inputs.grammar_of, task.params)
            self._compiling[future] = checked

    def _take_compiled(self) -> None:
        """Makes ready those whose grammars have been compiled."""
        for future in [future for future in self._compiling if future.done()]:
            checked = self._compiling.pop(future)
            try:
                grammar = future.result()
            except InvalidRequestError as error:
                self._refuse(checked.task, error)
            else:
                made = [replace(each, grammar=grammar) for each in checked.submissions]
                self._ready.append(_Checked(checked.task, made))

    def _refuse(self, task: Task, error: InvalidRequestError) -> None:
        self._skips(BadLineError(task.number, error, task.failure(error)))

    def _submit(self, checked: _Checked) -> bool:
        """Hands a task to the engine; whether it was taken, or is done with.

        What an engine that is full has taken of it goes on: the next call hands over the rest.
        """
        task = checked.task
        self._running.setdefault(task.number, _Running(task))
        try:
            while checked.num_taken < len(checked.submissions):
                submission = checked.submissions[checked.num_taken]
                self._engine.submit(submission)
                self._places[submission.request_id] = task.number, checked.num_taken
                checked.num_taken += 1
        except OverloadedError:
            if not checked.num_taken:
                del self._running[task.number]
            if not self._places:
                raise
            return False
        except InvalidRequestError as error:
            del self._running[task.number]
            for submission in checked.submissions[: checked.num_taken]:
                if self._places.pop(submission.request_id, None) is not None:
                    self._engine.abort(submission.request_id)
            self._refuse(task, error)
        return True

    def _take(self, output: RequestOutput) -> None:
        if not output.finished or output.engine_id not in self._places:
            return
        number, place = self._places.pop(output.engine_id)
        running = self._running[number]
        self.summary.num_tokens += (
            sum(len(completion.token_ids) for completion in output.outputs)
            if output.pooled is None
            else len(output.prompt_token_ids)
        )
        running.outputs[place] = output
        if len(running.outputs) < len(running.task.prompts):
            return
        del self._running[number]
        outputs = [running.outputs[place] for place in sorted(running.outputs)]
        error = next((item.error for item in outputs if item.error is not None), None)
        if error is None:
            self._results.append(number, running.task.result(outputs))
            self.summary.num_done += 1
        else:
            typed = error if isinstance(error, OctavoError) else OctavoError(str(error))
            self._report(f"line {number}: {typed}")
            self._results.append(number, running.task.failure(typed))
            self.summary.num_failed += 1
        self._bar.update()

    def _abandon(self) -> None:
        """Ends what an exception left in flight, so that the engine serves on."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for request_id in self._places:
            self._engine.abort(request_id)
        self._places.clear()
        self._running.clear()
        while self._engine.has_unfinished:
            self._engine.step()
