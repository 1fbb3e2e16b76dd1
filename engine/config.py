"""Engine arguments: what a user may set, checked and resolved once."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from octavo.engine.errors import InvalidConfigError

DEFAULT_MODEL = "smollm2-135m"
"""The model served when none is named; it installs from PyPI."""

DEFAULT_ROUTER = "least_work"
"""Which of several engines takes a request: `forecast` has not been measured live."""
SERVING_BATCHED_TOKENS = 512
"""Default token budget of a step where requests are streamed: short steps, short stalls."""
OFFLINE_BATCHED_TOKENS = 1024
"""Default token budget of a step where a whole batch is waited for."""

FEW_ROWS, FEW_TOKENS = 8, 128
"""Rows, and tokens of a step, of an engine for a handful of requests: a program of more tokens
would compute them all, however short the prompt, and a long one in steps of so many takes little
longer than in one."""

_PATHS = ("tokenizer", "chat_template", "compile_cache_dir")
"""Where ~ is the user's folder. The model's name may be what clients call it, and stays."""
_DTYPES = ("auto", "float32", "bfloat16")
_QUANTIZATIONS = ("none", "int8", "fp8", "stored")
_KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8", "fp8")
KV_CACHE_ALIASES = {"fp8_e4m3": "fp8"}
"""Other engines' names."""
ATTENTION_BACKENDS = ("auto", "xla", "reference", "mosaic_tpu", "mosaic_gpu")

WarmUp = Literal["early", "full", "coarse", "few"]
"""What is compiled before the engine is ready; see `EngineConfig.warm_up`."""

Role = Literal["both", "prefill", "decode"]
"""What a replica is for: prompts, decoding, or both."""

Task = Literal["auto", "generate", "embed", "both"]
"""What requests ask for; see `EngineConfig.task`."""
LoadFormat = Literal["auto", "safetensors", "gguf", "orbax", "dummy"]
"""What is read of a model; see `EngineConfig.load_format`."""
Reranker = Literal["auto", "none", "qwen3"]
"""How pairs of texts are scored; see `EngineConfig.reranker`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. Immutable; checked on construction.

    Attributes:
        model: a packaged model's name, or a path to a Hugging Face directory, a GGUF file or an
            Orbax checkpoint.
        tokenizer: a path when it is not beside the model; None takes the model's.
        served_model_name: the name clients use; None takes `model`.
        chat_template: a file of a Jinja chat template, or the template itself, in place of the
            model's own.
        tool_call_parser: how the model writes calls of tools: "auto" tells by its chat template and
            family, a name chooses a format (docs/tools.md lists them), "none" reads no calls.
        reasoning_parser: how it marks its thoughts: "auto", a name (docs/reasoning.md), or "none",
            which leaves thoughts in the text.
        task: what requests ask for: "generate", "embed" (embeddings and scores) or "both" at once,
            which compiles programs for each; "auto" is "embed" for a checkpoint that says it is
            made for embeddings, and "generate" for any other.
        dtype: of weights, activations and KV: "float32", "bfloat16", or "auto" (float32 on CPU, the
            checkpoint's own elsewhere).
        load_format: "auto" reads whatever the model is; "safetensors", "gguf" and "orbax" refuse
            any other; "dummy" reads no weights, which need not be there, and draws random ones: a
            model of the same shapes, in `dtype`, whose texts mean nothing and whose speed and
            memory can be measured from its config.json alone.
        quantization: of weights: "none", "int8" or "fp8" rounds linear layers and the output layer
            to eight bits as they are loaded, and their inputs in each step; "stored" leaves those
            that the checkpoint stores in blocks of small codes as they are, and dequantizes them in
            each step, for less memory and the same numbers; docs/quantization.md
            states what that costs in accuracy.
        packed_weights: on a CPU that computes in float32, keep what a GGUF or another quantized
            checkpoint holds in blocks beside the float32 weights, and have decode steps of few rows
            read it instead: the same numbers in a sixth to a quarter of the bytes.
        sliced_weights: on a CPU that computes in float32, where tuning tables say that it is
            faster, multiply in steps of many tokens with three int8 digits of each weight, kept
            beside it: as accurate as float32 within a factor of four.
        screened_argmax: on a CPU that computes in float32, where tuning tables say that it is
            faster, find greedy rows' tokens by bounds from a bfloat16 copy of the output layer, and
            few logits in float32: the same tokens.
        kv_cache_dtype: of KV: "auto" (that of the activations), "float32", "bfloat16", or "int8" or
            "fp8" (also "fp8_e4m3"), which keep a scale for each token and head beside the pages.
        reranker: how pairs of texts are scored: "qwen3" asks the model whether one answers the
            other, in the words that Qwen3-Reranker was trained on, and takes the odds of yes;
            "none" compares embeddings; "auto" is "qwen3" for a Qwen 3 whose name says reranker.
        max_model_len: most tokens of prompt and output together; None takes the model's, at most
            8,192.
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens computed in one step; None takes 512 where requests are
            streamed and 1,024 in `LLM`, whose batches gain from longer steps and see no stalls; at
            least max_num_seqs.
        enable_chunked_prefill: split prompts over steps; off means a prompt must fit one step.
        enable_prefix_caching: keep finished pages for later prompts that begin alike.
        num_state_snapshots: recurrent states kept for prompts that begin alike, of a model with
            recurrent layers; None is as many as `max_num_seqs`, or as 1 GiB holds, but a quarter
            at least; 0 none, and no prefix cache. Conversations that take turns want one each,
            and what they share one more.
        block_size: tokens in a KV page, a power of two; None picks by platform.
        num_kv_pages: KV pages in the pool, each of one group of layers; None sizes it from memory.
        kv_cache_memory_bytes: bytes for the pool; None takes a share of free memory.
        host_kv_memory_bytes: host memory for pages of preempted sequences and evicted prefixes, of
            all hosts together where several share a mesh; 0 turns swapping off.
        gpu_memory_utilization: share of a device's memory the engine may fill.
        watermark: share of pages kept free at admission, so that running rows can grow.
        scheduling_policy: a policy's name, with parameters if need be: "slo",
            "fcfs:token_budget=512". "auto" is first come, first served while no request has a
            target, and "slo" as soon as one does; see `octavo.engine.scheduler.policies`.
        num_decode_steps: most decode iterations in one dispatch.
        overlap: plan and dispatch step N+1 while N runs.
        tensor_parallel_size: devices that share each layer.
        data_parallel_size: engines that share the requests, each in a process with a part of a
            host's cores, or with `tensor_parallel_size` GPUs, of its own. `max_num_seqs`, KV memory
            and the like are those of each. On a CPU, one for each core gives the most tokens a
            second, and each takes memory for weights of its own.
        replica_roles: what each of several engines is for, separated by commas: "prefill" (prompts
            alone), "decode" or "both"; with `host_kv_memory_bytes`, by way of which pages of keys
            and values go from one to another. Empty is both for all.
        replica_router: which of several engines takes a request: "least_work" (that has done with
            it first), "forecast" (where it is in time at the least harm), "round_robin",
            "power_of_two" or "prefix_affinity", with parameters if need be.
        replica_timeout_s: seconds without a sign of life, or in one turn of its loop, after which a
            replica hangs: its process is killed and started again, and its requests go on
            elsewhere. Longer than any step.
        seed: seeds requests that bring none, and random weights.
        generation_config: where the sampling parameters of requests that say nothing of them come
            from (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens): "auto" is
            the model's own generation_config.json, if it has one; "vllm" none, which leaves those
            of `SamplingParams`; or a folder with such a file.
        override_generation_config: a JSON object of the same parameters, which go before those of
            the file, such as '{"temperature": 0.6}'; null takes one away. In Python also a dict.
        attention_backend: "auto", "xla", "reference", "mosaic_tpu" or "mosaic_gpu"; a kernel that
            cannot take the model on this device is refused when the engine is built.
        warm_up: "early" is ready with the largest step programs, which serve everything, and
            compiles the finer ones behind; "full" compiles all first, for steady measurements;
            "coarse" compiles the largest alone; "few" runs at most 8 sequences at once, in steps of
            at most 128 tokens, with programs of these sizes that the cache has, whichever start
            left them, or else compiles the small ones.
        compile_cache_dir: persistent compile cache; None takes the user's cache folder, "" is off.
        trust_remote_code: must stay False; Octavo never runs a checkpoint's code.
        revision: accepted for familiarity; only local files are read.
        fail_on_compile: raise when a step compiles after ready (tests).
    """

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    served_model_name: str | None = None
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    task: Task = "auto"
    dtype: str = "auto"
    load_format: LoadFormat = "auto"
    quantization: str = "none"
    packed_weights: bool = True
    sliced_weights: bool = True
    screened_argmax: bool = True
    kv_cache_dtype: str = "auto"
    reranker: Reranker = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    num_state_snapshots: int | None = None
    block_size: int | None = None
    num_kv_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    host_kv_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    watermark: float = 0.01
    scheduling_policy: str = "auto"
    num_decode_steps: int = 4
    overlap: bool = True
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    replica_roles: str = ""
    replica_router: str = DEFAULT_ROUTER
    replica_timeout_s: float = 60.0
    seed: int = 0
    generation_config: str = "auto"
    override_generation_config: str = ""
    attention_backend: str = "auto"
    warm_up: WarmUp = "early"
    compile_cache_dir: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    fail_on_compile: bool = False

    def __post_init__(self) -> None:
        for name, (kind, optional) in _kinds().items():
            value = getattr(self, name)
            if kind is str and isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif name in _PATHS and isinstance(value, str) and value.startswith("~"):
                object.__setattr__(self, name, os.path.expanduser(value))
            elif name == "override_generation_config" and isinstance(value, Mapping):
                object.__setattr__(self, name, _as_json(name, value))
            elif not (_is_a(kind, value) or (optional and value is None)):
                allowed = _NAMES[kind] + (" or None" if optional else "")
                raise InvalidConfigError(name, value, allowed)
        for name in ("max_num_seqs", "tensor_parallel_size", "data_parallel_size"):
            _at_least(name, getattr(self, name), 1)
        if not 1 <= self.num_decode_steps <= 32:
            raise InvalidConfigError("num_decode_steps", self.num_decode_steps, "1 to 32")
        for name in ("max_model_len", "num_kv_pages", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 2)
        _at_least("host_kv_memory_bytes", self.host_kv_memory_bytes, 0)
        if self.num_state_snapshots is not None:
            _at_least("num_state_snapshots", self.num_state_snapshots, 0)
        if self.max_num_batched_tokens is not None:
            _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
            if self.max_num_batched_tokens < self.max_num_seqs:
                raise InvalidConfigError(
                    "max_num_batched_tokens",
                    self.max_num_batched_tokens,
                    f"at least max_num_seqs ({self.max_num_seqs}): every running row decodes each "
                    "step",
                )
        if self.block_size is not None and (self.block_size not in (8, 16, 32, 64, 128, 256)):
            raise InvalidConfigError("block_size", self.block_size, "8, 16, 32, 64, 128 or 256")
        if self.dtype not in _DTYPES:
            raise InvalidConfigError("dtype", self.dtype, " or ".join(_DTYPES))
        if self.quantization not in _QUANTIZATIONS:
            raise InvalidConfigError("quantization", self.quantization, " or ".join(_QUANTIZATIONS))
        kv_cache_dtype = KV_CACHE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        if kv_cache_dtype not in _KV_CACHE_DTYPES:
            names = (*_KV_CACHE_DTYPES, *KV_CACHE_ALIASES)
            raise InvalidConfigError("kv_cache_dtype", kv_cache_dtype, " or ".join(names))
        object.__setattr__(self, "kv_cache_dtype", kv_cache_dtype)
        if set(self.roles) != {"both"}:
            if not self.host_kv_memory_bytes:
                allowed = f"above 0, for pages to move between replicas ({self.replica_roles})"
                raise InvalidConfigError("host_kv_memory_bytes", 0, allowed)
            if not self.enable_prefix_caching:
                allowed = f"True, for pages to move between replicas ({self.replica_roles})"
                raise InvalidConfigError("enable_prefix_caching", False, allowed)
        _check_policy(self.scheduling_policy)
        _check_router(self.replica_router)
        _check_parsers(self.tool_call_parser, self.reasoning_parser)
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise InvalidConfigError(
                "attention_backend", self.attention_backend, ", ".join(ATTENTION_BACKENDS)
            )
        if self.task not in get_args(Task):
            raise InvalidConfigError("task", self.task, " or ".join(get_args(Task)))
        if self.load_format not in get_args(LoadFormat):
            allowed = f"{', '.join(get_args(LoadFormat))}; auto reads every kind of checkpoint"
            raise InvalidConfigError("load_format", self.load_format, allowed)
        if self.reranker not in get_args(Reranker):
            raise InvalidConfigError("reranker", self.reranker, " or ".join(get_args(Reranker)))
        if self.warm_up not in get_args(WarmUp):
            raise InvalidConfigError("warm_up", self.warm_up, " or ".join(get_args(WarmUp)))
        if not self.replica_timeout_s > 0:
            raise InvalidConfigError(
                "replica_timeout_s", self.replica_timeout_s, "a number of seconds above 0"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidConfigError(
                "gpu_memory_utilization", self.gpu_memory_utilization, "a number in (0, 1]"
            )
        if not 0 <= self.watermark < 1:
            raise InvalidConfigError("watermark", self.watermark, "a number in [0, 1)")
        if self.trust_remote_code:
            raise InvalidConfigError(
                "trust_remote_code", True, "False: Octavo never runs a checkpoint's code"
            )

    @property
    def roles(self) -> tuple[Role, ...]:
        """What each replica is for."""
        if not self.replica_roles:
            both: tuple[Role, ...] = ("both",)
            return both * self.data_parallel_size
        known: dict[str, Role] = {name: name for name in get_args(Role)}
        listed = [name.strip() for name in self.replica_roles.split(",")]
        names: tuple[Role, ...] = tuple(known[name] for name in listed if name in known)
        if not len(names) == len(listed) == self.data_parallel_size:
            allowed = (
                f"{', '.join(get_args(Role))}, one for each of {self.data_parallel_size} replicas "
                "(data_parallel_size), separated by commas"
            )
            raise InvalidConfigError("replica_roles", self.replica_roles, allowed)
        for need in ("prefill", "decode"):
            if not {need, "both"} & set(names):
                allowed = f"roles of which one takes {need}, of {self.data_parallel_size} replicas"
                raise InvalidConfigError("replica_roles", self.replica_roles, allowed)
        return names

    def with_token_budget(self, default: int) -> EngineConfig:
        """A copy whose token budget is set: its own, or else `default` and a token for each row."""
        if self.max_num_batched_tokens is not None:
            return self
        return self.replace(max_num_batched_tokens=max(default, self.max_num_seqs))

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with some arguments changed, checked again."""
        return dataclasses.replace(self, **changes)

    def resolved_compile_cache_dir(self) -> str | None:
        """The persistent compile cache's folder, or None when it is off."""
        if self.compile_cache_dir == "":
            return None
        if self.compile_cache_dir is not None:
            return self.compile_cache_dir
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return os.path.join(root, "octavo", "xla")


def of_one_engine(config: EngineConfig, name: str, value: object) -> None:
    """Refuses a setting that watches steps where other processes run them.

    Args:
        name, value: the setting; None is none.

    Raises:
        InvalidConfigError: it is given, and there are several replicas.
    """
    if value is not None and config.data_parallel_size > 1:
        raise InvalidConfigError(name, value, "given with data_parallel_size = 1 alone")


def _check_router(text: str) -> None:
    if text != DEFAULT_ROUTER:
        from octavo.engine.routing.policies import get_live_policy

        get_live_policy(text, "replica_router")


def _check_policy(name: str) -> None:
    from octavo.engine.scheduler.policies import get_policy  # needs NumPy, which `--help` does not

    get_policy(name)


def _check_parsers(calls: str, reasoning: str) -> None:
    if {calls, reasoning} <= {"auto", "none"}:
        return
    from octavo.engine.text.assistant.formats import FORMATS
    from octavo.engine.text.assistant.reasoning import REASONING_FORMATS

    for name, value, formats in (
        ("tool_call_parser", calls, FORMATS),
        ("reasoning_parser", reasoning, REASONING_FORMATS),
    ):
        known = ["auto", "none", *sorted(each.name for each in formats)]
        if value not in known:
            raise InvalidConfigError(name, value, ", ".join(known))


def _as_json(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value)) if value else ""
    except (TypeError, ValueError):
        raise InvalidConfigError(name, value, "what JSON can say") from None


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidConfigError(name, value, f"an integer of at least {low}")


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@functools.cache
def _kinds() -> dict[str, tuple[type, bool]]:
    """Field -> the type of its values, and whether it may be None."""
    kinds = {}
    for name, hint in get_type_hints(EngineConfig).items():
        named = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
        # A `Literal`'s arguments are its values, all of one type.
        kind = named[0] if isinstance(named[0], type) else type(named[0])
        kinds[name] = (kind, type(None) in get_args(hint))
    return kinds


def _is_a(kind: type, value: object) -> bool:
    """Whether a value is of that type; a number may be an integer, neither may be a flag."""
    if kind is bool:
        return isinstance(value, bool)
    wanted = (int, float) if kind is float else kind
    return isinstance(value, wanted) and not isinstance(value, bool)
