"""An engine built from its configuration: text in, text out, one step at a time.

`LLM` drives it from the caller's thread, `AsyncEngine` from a thread of its own. The module is long
because an engine is put together here, from its configuration to its programs.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from tqdm import tqdm

from octavo.engine.clock import Clock, MonotonicClock
from octavo.engine.config import EngineConfig, Task
from octavo.engine.core import EngineCore
from octavo.engine.device_start import of_one_engine, start_device
from octavo.engine.errors import (
    AsleepError,
    InvalidRequestError,
    ModelLoadError,
    shorten,
)
from octavo.engine.execution.programs.compile_cache import cache_counts, open_compile_cache
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.input.input_processor import InputProcessor, Submission
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv_transfer.page_transfer import PageTransfer
from octavo.engine.observability.load import EngineLoad
from octavo.engine.observability.recent_schedule import RecentSchedule
from octavo.engine.observability.schedule import Schedule
from octavo.engine.output.output_processor import OutputProcessor
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.output.transcript import Transcript
from octavo.engine.pooling.make_pooler import make_pooler
from octavo.engine.request import Priority, Request, RequestStatus
from octavo.engine.sampling_defaults import sampling_defaults
from octavo.engine.sampling_params import MAX_STOP_IDS
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.structured.masks import TokenMasks
from octavo.engine.text.byte_tokenizer import byte_tokenizer
from octavo.engine.text.chat_template_file import read_chat_template
from octavo.engine.text.huggingface_tokenizer import has_tokenizer
from octavo.engine.text.tokenizer import Tokenizer
from octavo.models.config import ModelConfig
from octavo.models.loading.checkpoint_digest import checkpoint_digest
from octavo.models.loading.load import OpenedModel
from octavo.sharding.mesh import platform

if TYPE_CHECKING:
    from octavo.engine.hosts.group import LeadingHosts

logger = logging.getLogger(__name__)

ProgramListener = Callable[[str, float, bool, int, int], None]
"""Told of each program that is there before an engine is ready: its name, its seconds, whether the
persistent cache had it, how many are done and how many will be."""


class Engine:
    """A loaded model, its tokenizer, and the loop that serves it. Not thread-safe.

    Args:
        config: engine arguments.
        progress: show a bar while programs compile.
        on_program: told of each program; see `ProgramListener`.
        clock: where time comes from.
        host_memory_bytes: of the host's memory that it may fill; None takes what is available.
        incarnation: begins the ids of requests; see `RequestIds`.
        hosts: that the engine spans; None is this one alone.

    Raises:
        ModelLoadError: the checkpoint cannot be used.
        InvalidConfigError: arguments that do not fit the model or the machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = False,
        on_program: ProgramListener | None = None,
        clock: Clock | None = None,
        host_memory_bytes: int | None = None,
        incarnation: str | None = None,
        hosts: LeadingHosts | None = None,
    ) -> None:
        self.config = of_one_engine(config)
        self.sampling_defaults = sampling_defaults(config)
        self.clock = clock or MonotonicClock()
        self.masks = TokenMasks()
        self._num_prompt_tokens = 0
        self.sleep_level = 0
        """How deep it sleeps; 0 while it serves."""
        cache_counts()  # from here on
        self._cache = cache = open_compile_cache(self.config.resolved_compile_cache_dir())
        with cache.in_use():
            start = start_device(
                self.config,
                cache,
                masks=self.masks,
                host_memory_bytes=host_memory_bytes,
                hosts=hosts,
            )
            self._start, self.executor, self._hosts = start, start.executor, hosts
            self._describe(start.model)
            self.limits, self.max_model_len = start.setup.limits, start.setup.limits.max_model_len
            self.tokenizer = _tokenizer(self.config, start.model)
            start.set_weights()
            self.scheduler = _scheduler(self.config, self.limits)
            self._build_loop(start.model)
            self._build_text(incarnation, start.task, start.model)
            self._warm_up(progress, on_program)
        if hosts is not None:
            hosts.go_live(self.executor.awaited(self.config.warm_up)[0])

    def _describe(self, model: OpenedModel) -> None:
        """What fronts say of the model and its devices."""
        self.model_config = model.config
        self.model_name = self.config.served_model_name or self.config.model
        self.dtype = str(model.dtype)
        self.platform, self.num_devices = platform(), jax.device_count()

    def _build_loop(self, model: OpenedModel) -> None:
        self.core = EngineCore(
            self.scheduler,
            self.executor,
            self.clock,
            overlap=self.config.overlap,
            survives_bugs=True,
        )
        self.core.masks = self.masks
        self._recent: RecentSchedule | None = None
        self.transfer: PageTransfer | None = None
        if self.scheduler.transfers.can_exchange and self._hosts is None:
            # Not of the model itself, which may hold what it was read from.
            digest = partial(checkpoint_digest, model.source)
            about = _about_pages(model, self.max_model_len)
            self.transfer = PageTransfer(self.core, self.executor, lambda: f"{digest()}, {about}")

    def _build_text(self, incarnation: str | None, task: Task, model: OpenedModel) -> None:
        """The ways in and out: prompts to requests, tokens to texts and vectors."""
        pooler = None if task == "generate" else make_pooler(self.config, model, self.tokenizer)
        self.eos_token_ids = _eos_token_ids(self.tokenizer, self.model_config)
        self.inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            seed=self.config.seed,
            incarnation=incarnation,
            pooler=pooler,
            generates=task != "embed",
            default_max_tokens=self.sampling_defaults.max_tokens,
        )
        self.grammars = self.inputs.grammars
        self.outputs = OutputProcessor(self.tokenizer, self.core.finish, pooler)

    def _warm_up(self, progress: bool, on_program: ProgramListener | None) -> None:
        mode = self.config.warm_up
        total = len(self.executor.awaited(mode)[0])
        stats = self.executor.programs.stats

        def on_compiled(shape: StepShape) -> None:
            name = str(shape)
            bar.set_postfix_str(f"{name}: {stats.seconds[name]:.1f} s", refresh=False)
            bar.update()
            if on_program is not None:
                done = len(stats.seconds)
                on_program(name, stats.seconds[name], name in stats.from_cache, done, total)

        with tqdm(total=total, desc="Compiling steps", disable=not progress) as bar:
            self.executor.warm_up(mode, on_compiled)
        if self.executor.page_copy_s is not None:
            self.scheduler.forecast.page_copy_s = self.executor.page_copy_s

    @property
    def num_rows(self) -> int:
        """Sequences that can run at once."""
        return self.limits.max_num_seqs

    @property
    def compile_s(self) -> Mapping[str, float]:
        """Seconds that each program took to be there."""
        return self.executor.programs.stats.seconds

    @property
    def waited_s(self) -> float:
        """Seconds that `advance` has waited for the device."""
        return self.core.waited_s

    @property
    def is_usable(self) -> bool:
        """Whether it can serve; one that cannot any more raises as it advances."""
        return True

    def wake(self) -> None:
        """Ends a wait of `advance` for anything but a device; from any thread."""

    def prepare_grammars(self) -> None:
        """Makes ready for structured outputs, which the first of them would else wait for."""
        self.grammars.prepare()

    def wait_until_compiled(self) -> None:
        """Waits for the programs that are compiled behind; the engine serves without them too."""
        self.executor.programs.wait()

    def close(self) -> None:
        """Ends what runs behind. The engine must not be used after it."""
        self.executor.close()
        self.grammars.close()
        self.masks.close()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do: requests, steps on their way, or copies whose
        host memory is not free before their end was heard of."""
        return (
            self.core.has_work
            or len(self.outputs) > 0
            or self.scheduler.num_transfers > 0
            or (self.transfer is not None and self.transfer.is_busy)
        )

    def recover(self, error: Exception) -> None:
        """Starts over after an exception of the engine's own code outside of a step."""
        self.core.recover(error)

    def submit(self, submission: Submission) -> None:
        """Takes a checked submission, whole or not at all; or what is left of one that another
        engine had.

        Raises:
            InvalidRequestError: a sequence of it could never fit.
            AsleepError: the engine sleeps.
        """
        assert submission.request_id not in self.outputs, submission.request_id
        if self.sleep_level:
            raise AsleepError("the engine sleeps: wake_up comes first")
        added: list[Request] = []
        try:
            for request in submission.sequences:
                if request.status.is_finished:
                    continue
                self.core.add(request)
                added.append(request)
                if submission.grammar is not None:
                    self.masks.open(request, submission.grammar)
        except Exception:
            for request in added:
                self.core.withdraw(request.request_id)
                self.masks.drop(request.request_id)
            raise
        self.outputs.add(submission)
        self._num_prompt_tokens += len(submission.sequences[0].prompt_token_ids)

    def abort(
        self,
        request_id: str,
        status: RequestStatus = RequestStatus.CANCELLED,
        error: Exception | None = None,
    ) -> bool:
        """Ends a live submission; its last output is told by the next `step`.

        Returns:
            Whether there was one with this id, the engine's own.
        """
        ended = [
            self.core.cancel(request.request_id, status, error)
            for request in self.outputs.requests_of(request_id)
        ]
        return any(ended)

    def release(self, request_id: str) -> Transcript | None:
        """Lets go of a live submission that another engine goes on with; its full pages stay
        cached.

        Returns:
            What it has to tell until then; None if there is none with this id, the engine's own.
        """
        transcript = self.outputs.remove(request_id)
        for sequence in () if transcript is None else transcript.sequences:
            self.core.cancel(sequence.request.request_id)
        return transcript

    def page_names(self, request_id: str) -> list[PageHash]:
        """Names of the full pages of a live submission's tokens, each once, for `PageTransfer`."""
        names: dict[PageHash, None] = {}
        for request in self.outputs.requests_of(request_id):
            names |= dict.fromkeys(self.core.page_names(request.request_id))
        return [*names]

    def num_over_page(self, request_id: str) -> int | None:
        """Most computed tokens of a live submission's sequences that are in no full page; None
        where another step changes nothing about that, as none is decoded."""
        sequences = self.outputs.requests_of(request_id)
        decoded = [each for each in sequences if each.slot is not None and each.output_token_ids]
        over = [(each.num_tokens - 1) % self.limits.page_size for each in decoded]
        return max(over, default=None)

    def flush_prefix_cache(self) -> tuple[int, int]:
        """Forgets every cached prefix; running requests go on.

        Returns:
            Pages that held prefixes alone, on the device and on the host.
        """
        return self.scheduler.flush_prefixes()

    def sleep(self, level: int = 1) -> None:
        """Gives back the memory of weights and KV pages, until `wake_up`; does nothing if it sleeps
        already. Cached prefixes are forgotten.

        Args:
            level: 1 keeps the weights in the host's memory, where those of a CPU are anyway; 2
                keeps none, so that they are read again.

        Raises:
            InvalidRequestError: an unknown level, or requests that have not ended.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise InvalidRequestError("level", level, "1 (weights are kept) or 2 (read again)")
        if self.has_unfinished:
            num_live = len(self.outputs)
            allowed = f"asked for when no request is under way ({num_live} have not ended)"
            raise InvalidRequestError("sleep", level, allowed)
        if self.sleep_level:
            return
        self.scheduler.flush_prefixes()
        self.executor.sleep(keep_weights=level == 1)
        self.sleep_level = level

    def wake_up(self) -> None:
        """Serves again, after `sleep`.

        Raises:
            ModelLoadError: weights that were not kept cannot be read any more.
        """
        if not self.sleep_level:
            return
        if self.sleep_level == 2:
            with self._cache.in_use():
                if self._hosts is not None:
                    self._hosts.read_weights()
                self._start.set_weights()
        self.executor.wake_up()
        self.sleep_level = 0

    def schedules(self) -> list[Schedule]:
        """What steps did for each row in the last seconds, and why: see `RecentSchedule`. It is
        noted from the first call on until nobody has asked for a while. The thread that steps
        calls it.

        Returns:
            One.
        """
        now_s = self.clock.now_s()
        if self._recent is None:
            self._recent = RecentSchedule(now_s, self._forget_schedule)
            self.core.observe(self._recent)
            self.scheduler.explain(True)
        return [self._recent.look(now_s)]

    def _forget_schedule(self) -> None:
        assert self._recent is not None
        self.core.unobserve(self._recent)
        self.scheduler.explain(False)
        self._recent = None

    def abort_all(self) -> None:
        """Ends every live submission and takes in the steps on their way, telling nobody: pages,
        rows and host memory are free afterwards."""
        for request_id in self.outputs.live_ids:
            self.abort(request_id)
        while self.has_unfinished:
            self.step()

    def step(self) -> list[RequestOutput]:
        """One turn of the engine; what each touched request has to tell."""
        return [output for each in self.advance() for output in each.readings()]

    def advance(self) -> list[Transcript]:
        """As `step`, for who reads later, or in another thread: see `OutputProcessor.take`."""
        news = self.core.step()
        self.masks.take()  # masks are made while texts are
        transcripts = self.outputs.take(news)
        self.masks.take()
        if self.transfer is not None and self.transfer.is_busy:
            self.transfer.poll()
        return transcripts

    def load(self, num_prompt_tokens: int = 1, priority: Priority = Priority.NORMAL) -> EngineLoad:
        """How busy the engine is, and how soon a request of this size and class would speak."""
        now_s = self.clock.now_s()
        load, stats = self.scheduler.load(now_s), self.executor.stats
        refusals = self.scheduler.refusals
        probes = refusals.probes.load()
        wall_s = stats.busy_s + stats.idle_s
        return EngineLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_pages=load.num_pages - load.num_owned_pages,
            num_total_pages=load.num_pages,
            kv_cache_usage=load.kv_usage,
            kv_waste=load.kv_waste,
            num_preemptions=load.num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self.outputs.num_generation_tokens,
            prefix_cache_queries=load.prefix_queried_tokens,
            prefix_cache_hits=load.prefix_hit_tokens,
            num_steps=stats.num_steps,
            padding_waste=1 - stats.num_tokens / max(1, stats.num_padded_tokens),
            compiles_after_ready=self.executor.programs.stats.num_after_ready,
            host_s_per_step=self.core.host_s / max(1, stats.num_steps),
            device_idle_share=stats.idle_s / wall_s if wall_s else 0.0,
            queues=load.queues,
            num_cached_pages=load.num_cached_pages,
            num_projected_pages=load.num_projected_pages,
            num_rejected=load.num_rejected,
            num_swaps=load.num_swaps,
            num_swapped_tokens=load.num_swapped_tokens,
            num_recomputed_tokens=load.num_recomputed_tokens,
            swap_cost_s=load.swap_cost_s,
            recompute_cost_s=load.recompute_cost_s,
            num_step_tokens=stats.num_tokens,
            num_step_slots=stats.num_padded_tokens,
            steps_by_tokens=tuple(stats.steps_by_tokens),
            device_busy_s=stats.busy_s,
            device_idle_s=stats.idle_s,
            num_step_times=self.scheduler.forecast.step_time.num_observed,
            step_time_error=self.scheduler.forecast.step_time.error_sum,
            predicted_ttft_s=self.scheduler.predict_ttft_s(num_prompt_tokens, now_s, priority),
            num_step_failures=self.core.recovery.num_recoveries,
            num_quarantined=self.core.recovery.num_quarantined,
            num_unattainable=refusals.num_unattainable,
            num_probes=probes.num_probes,
            num_wrong_refusals=probes.num_wrong,
            num_probe_tokens=probes.num_tokens,
            num_pages_given=0 if self.transfer is None else self.transfer.num_given,
            num_pages_taken=0 if self.transfer is None else self.transfer.num_taken,
            standing=self.scheduler.standing(now_s),
        )

    def held_pages(self) -> tuple[int, float]:
        """Pages held by live requests, and the share of their places nothing is written to."""
        load = self.scheduler.load()
        return load.num_owned_pages, load.kv_waste

    def check_integrity(self) -> None:
        """Proves that every page and row is accounted for."""
        self.scheduler.check_integrity()


def _about_pages(model: OpenedModel, max_model_len: int) -> str:
    """What beside the checkpoint makes keys and values of two engines the same. Of some models,
    whose rotary embedding depends on the context that is served, it is a part."""
    layers = model.config.for_context(max_model_len).layers
    rotary = zlib.crc32(repr(dict.fromkeys(layer.rotary for layer in layers)).encode())
    return f"{model.dtype}, quantization {model.quantization}, rotary {rotary:08x}"


def _scheduler(config: EngineConfig, limits: StepLimits) -> Scheduler:
    return Scheduler(
        limits,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        watermark=config.watermark,
        num_decode_steps=config.num_decode_steps,
    )


def _tokenizer(config: EngineConfig, model: OpenedModel) -> Tokenizer:
    source = Path(config.tokenizer or model.tokenizer_source)
    if config.tokenizer is None and model.metadata is not None:
        tokenizer = Tokenizer.from_gguf_metadata(model.metadata)
    elif config.load_format == "dummy" and source.is_dir() and not has_tokenizer(source):
        logger.warning("%s holds no tokenizer: a byte is a token", source)
        tokenizer = Tokenizer(byte_tokenizer(model.config.vocab_size))
    else:
        tokenizer = Tokenizer.from_source(source)
    if config.chat_template is None:
        return tokenizer
    return tokenizer.with_chat_template(read_chat_template(config.chat_template))


def _eos_token_ids(tokenizer: Tokenizer, model: ModelConfig) -> tuple[int, ...]:
    """The ids that end a text: the tokenizer's, as far as the model can produce them, and its own.

    Raises:
        ModelLoadError: there are more than a row on a device has room for.
    """
    found = dict.fromkeys((*tokenizer.eos_token_ids, *model.eos_token_ids))
    eos = tuple(token_id for token_id in found if token_id < model.vocab_size)
    if len(eos) > MAX_STOP_IDS:
        raise ModelLoadError(
            f"eos_token_id = {shorten(eos)} of tokenizer and model together is not allowed: "
            f"at most {MAX_STOP_IDS} token ids can end a text"
        )
    return eos
