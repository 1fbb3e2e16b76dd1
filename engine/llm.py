"""`LLM`: offline batches, from prompts to texts."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, Unpack

from tqdm import tqdm

from octavo.engine.any_engine import engine_of_this_process, open_engine
from octavo.engine.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, search_all
from octavo.engine.config import OFFLINE_BATCHED_TOKENS
from octavo.engine.engine import Engine
from octavo.engine.engine_arguments import engine_config
from octavo.engine.errors import EngineDeadError, InvalidRequestError
from octavo.engine.input.input_processor import POOLED, PromptLike, Submission, text_or_ids
from octavo.engine.input.tokenization import AS_THE_MODEL_WANTS, Tokenization
from octavo.engine.input.unserved import Unserved, refuse_unserved
from octavo.engine.observability.metrics import Metric, engine_metrics
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
    scored,
)
from octavo.engine.pooling.params import PoolingParams, as_pooling_params
from octavo.engine.pooling.scoring import plan_scores
from octavo.engine.process.held_interrupts import held_interrupts
from octavo.engine.request import Priority
from octavo.engine.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    as_plain,
)
from octavo.engine.text.assistant.tool_request import read_tool_use
from octavo.engine.text.assistant.turn_plan import (
    check_thought_budget,
    model_formats,
    set_messages,
)
from octavo.engine.text.tokenizer import Tokenizer
from octavo.models.pooling_config import Pooling

Message = Mapping[str, Any]
PriorityLike = Priority | str | int


class LLM:
    """A model to generate with. Calls from several threads take turns; `AsyncEngine` serves
    requests of many callers together.

    Args:
        model: a packaged model's name, or a path; None takes the packaged SmolLM2.
        progress: show a bar while programs compile.
        **engine_args: fields of `EngineConfig`.

    Raises:
        InvalidConfigError: an argument that is unknown or cannot work.
        ModelLoadError: the checkpoint cannot be used.

    Example:
        >>> llm = LLM()
        >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0]
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: bool = True,
        **engine_args: Any,
    ) -> None:
        config = engine_config(model, engine_args).with_token_budget(OFFLINE_BATCHED_TOKENS)
        self.engine = open_engine(config, progress=progress)
        self._is_closed = False
        self._process_id = os.getpid()
        self._turn = threading.RLock()
        """Whose holder alone may step the engine, or change what a step reads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs behind: finer programs being compiled, processes of replicas. It generates
        nothing after. The end of a `with` statement calls it."""
        self._is_closed = True
        self.engine.close()

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Has the engine for itself.

        Raises:
            EngineDeadError: it was closed, or it was made in another process.
        """
        if os.getpid() != self._process_id:
            # A fork has none of JAX's threads, and would wait for them for ever.
            raise EngineDeadError(
                "this LLM was made before a fork, which has no devices: make one in the new "
                "process, started with multiprocessing's spawn"
            )
        with self._turn:
            if self._is_closed:
                raise EngineDeadError("this LLM was closed: make another one")
            yield

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` take that are given none: the model's own, as far as its
        generation_config.json names some (see `EngineConfig.generation_config`)."""
        return self.engine.sampling_defaults.params()

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: PriorityLike | Sequence[PriorityLike] | None = None,
        **unserved: Unpack[Unserved],
    ) -> list[RequestOutput]:
        """Generates for all prompts at once.

        Args:
            prompts: one prompt or several, in a list or anything that yields them; each a text or
                a list (or array) of token ids, or one of these by name: `{"prompt": text}` or
                `{"prompt_token_ids": ids}`, with a `cache_salt` beside it if it shares cached
                prefixes with prompts of the same salt only.
            sampling_params: for all, or one for each prompt; None takes those of
                `get_default_sampling_params`.
            use_tqdm: show a bar with the rate of tokens.
            priority: a class for all, or one for each prompt.
            **unserved: arguments of vLLM that are not served, such as `lora_request`: only None.

        Returns:
            One output a prompt, in the prompts' order.

        Raises:
            InvalidRequestError: a prompt or its parameters can never be served; none has begun.
        """
        refuse_unserved("generate", unserved)
        listed = _as_prompts(prompts)
        params = [
            self.engine.sampling_defaults.of(
                each, "a SamplingParams, or a list of one for each prompt"
            )
            for each in _for_each("sampling_params", sampling_params, len(listed))
        ]
        priorities = _for_each("priority", priority, len(listed))
        now_s = self.engine.clock.now_s()
        submissions = [
            self.engine.inputs.process(
                None,
                prompt,
                each.replace(output_kind=RequestOutputKind.FINAL_ONLY),
                now_s=now_s,
                priority=priorities[index],
            )
            for index, (prompt, each) in enumerate(zip(listed, params, strict=True))
        ]
        return self._run(submissions, "Generating", use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        **unserved: Unpack[Unserved],
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt.

        Args:
            prompts: as for `generate`.
            params: of the search, for all.
            use_tqdm: show a bar with the rounds.
            concurrency_limit: prompts whose beams run side by side; None for all.
            **unserved: arguments of vLLM that are not served, such as `lora_request`: only None.

        Returns:
            One output a prompt, in the prompts' order.

        Raises:
            InvalidRequestError: a prompt can never be served, or leaves no room for `max_tokens`.
        """
        refuse_unserved("beam_search", unserved)
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError("params", params, "a BeamSearchParams")
        listed = [text_or_ids(prompt) for prompt in _as_prompts(prompts)]
        size = len(listed) if concurrency_limit is None else concurrency_limit
        if isinstance(size, bool) or not isinstance(size, int) or (listed and size < 1):
            raise InvalidRequestError(
                "concurrency_limit", size, "an integer of at least 1, or None"
            )
        searches = []
        for prompt in listed:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            if len(ids) + params.max_tokens > self.engine.max_model_len:
                allowed = (
                    f"at most {max(0, self.engine.max_model_len - len(ids))} after "
                    f"{len(ids)} tokens of a prompt (max_model_len {self.engine.max_model_len})"
                )
                raise InvalidRequestError("max_tokens", params.max_tokens, allowed)
            searches.append(BeamSearch(params, ids, self.engine.eos_token_ids))
        num_rounds = params.max_tokens * -(-len(listed) // max(size, 1))
        with tqdm(total=num_rounds, desc="Beam search", disable=not use_tqdm) as bar:
            for first in range(0, len(searches), max(size, 1)):
                search_all(searches[first : first + size], params, self._generate_quietly, bar)
        return [search.result(self.tokenizer) for search in searches]

    def _generate_quietly(
        self, prompts: list[list[int]], params: SamplingParams
    ) -> list[RequestOutput]:
        return self.generate(prompts, params, use_tqdm=False)

    def embed(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
        priority: PriorityLike | Sequence[PriorityLike] | None = None,
        tokenization: Tokenization = AS_THE_MODEL_WANTS,
        **unserved: Unpack[Unserved],
    ) -> list[EmbeddingRequestOutput]:
        """The embeddings of all prompts, behind the model's own instruction if it has one.

        Args:
            prompts: as for `generate`; each may fill the context.
            pooling: of which tokens: "last", "mean" or "cls", the first; None is the model's own.
            normalize: scale vectors to length 1; None is the model's own.
            dimensions: numbers of each vector that are kept, before it is normalized.
            prompt_name: which of the model's prompts stands before each text, such as "query";
                None is the model's default, if it has one.
            tokenization: special tokens, and truncation of what is too long.

        The other arguments are those of `generate`.

        Returns:
            One output a prompt, in the prompts' order.

        Raises:
            InvalidRequestError: a prompt can never be served, or the engine was started with
                `task="generate"`.
        """
        refuse_unserved("embed", unserved)
        pooler = self.engine.inputs.pooler_or_refuse()
        params = PoolingParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        listed = [pooler.prompted(text_or_ids(each), prompt_name) for each in _as_prompts(prompts)]
        return self.encode(
            listed, params, use_tqdm=use_tqdm, priority=priority, tokenization=tokenization
        )

    def encode(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling: Pooling | None = None,
        use_tqdm: bool = True,
        priority: PriorityLike | Sequence[PriorityLike] | None = None,
        tokenization: Tokenization = AS_THE_MODEL_WANTS,
        **unserved: Unpack[Unserved],
    ) -> list[EmbeddingRequestOutput]:
        """The pooled hidden states of all prompts, just as they are given.

        Args:
            pooling_params: for all, or one for each prompt; None is the model's own pooling.
            pooling: in place of `pooling_params`, "last", "mean" or "cls".

        Else as `embed`.
        """
        refuse_unserved("encode", unserved)
        if pooling is not None:
            if pooling_params is not None:
                raise InvalidRequestError("pooling", pooling, "None beside pooling_params")
            pooling_params = PoolingParams(pooling=pooling)
        listed = _as_prompts(prompts)
        params = [
            as_pooling_params(each)
            for each in _for_each("pooling_params", pooling_params, len(listed))
        ]
        priorities = _for_each("priority", priority, len(listed))
        now_s = self.engine.clock.now_s()
        submissions = [
            self.engine.inputs.process(
                None,
                prompt,
                POOLED,
                now_s=now_s,
                priority=priorities[index],
                tokenization=tokenization,
                pooling=each,
            )
            for index, (prompt, each) in enumerate(zip(listed, params, strict=True))
        ]
        outputs = self._run(submissions, "Embedding", use_tqdm=use_tqdm)
        return [EmbeddingRequestOutput.of(output) for output in outputs]

    def score(
        self,
        text_1: PromptLike | Iterable[PromptLike],
        text_2: PromptLike | Iterable[PromptLike],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
        priority: PriorityLike | None = None,
        tokenization: Tokenization = AS_THE_MODEL_WANTS,
        **unserved: Unpack[Unserved],
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: a reranker's odds that the second answers the first, from 0
        to 1; of other models, the cosine of the angle between their embeddings, from -1 to 1.

        Args:
            text_1: one text for all of `text_2`, or one for each.
            text_2: one text or several.
            instruction: what a reranker is asked; None is its own.

        The other arguments are those of `embed`.

        Returns:
            One output for each of `text_2`.

        Raises:
            InvalidRequestError: as `embed`; or the two are not of one length.
        """
        refuse_unserved("score", unserved)
        first, second = (
            [text_or_ids(each) for each in _as_prompts(texts)] for texts in (text_1, text_2)
        )
        pooler = self.engine.inputs.pooler_or_refuse()
        scoring = plan_scores(pooler, first, second, instruction)
        outputs = self.encode(
            scoring.texts,
            scoring.params,
            use_tqdm=use_tqdm,
            priority=priority,
            tokenization=scoring.tokenization(tokenization),
        )
        return scored(scoring, outputs)

    def classify(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        use_tqdm: bool = True,
        priority: PriorityLike | Sequence[PriorityLike] | None = None,
        tokenization: Tokenization = AS_THE_MODEL_WANTS,
        **unserved: Unpack[Unserved],
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the classes that the model's head knows, of all prompts.

        Args: as for `embed`.

        Raises:
            InvalidRequestError: as `embed`; or the model has no classification head.
        """
        refuse_unserved("classify", unserved)
        labels = self.engine.inputs.pooler_or_refuse().head_or_refuse().labels
        outputs = self.encode(
            prompts,
            PoolingParams(classify=True),
            use_tqdm=use_tqdm,
            priority=priority,
            tokenization=tokenization,
        )
        return [ClassificationRequestOutput.of(output, labels) for output in outputs]

    def _run(
        self, submissions: Sequence[Submission], name: str, *, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Serves all submissions; their outputs in the same order."""
        with self._in_turn(), held_interrupts() as let_in:
            return self._run_in_turn(submissions, name, let_in, use_tqdm=use_tqdm)

    def _run_in_turn(
        self,
        submissions: Sequence[Submission],
        name: str,
        let_in: Callable[[], None],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        submitted: list[str] = []
        begun_s = self.engine.clock.now_s()
        bar = tqdm(total=len(submissions), desc=name, unit="req", disable=not use_tqdm)
        try:
            for submission in submissions:
                self.engine.submit(submission)
                submitted.append(submission.request_id)
            num_tokens = 0
            while len(outputs) < len(submissions):
                let_in()
                for output in self.engine.step():
                    outputs[output.engine_id] = output
                    num_tokens += sum(len(c.token_ids) for c in output.outputs)
                    if num_tokens:
                        elapsed_s = max(1e-9, self.engine.clock.now_s() - begun_s)
                        rate = f"{num_tokens / elapsed_s:.1f} output tok/s"
                        bar.set_postfix_str(rate, refresh=False)
                    bar.update()
        finally:
            bar.close()
            if len(outputs) < len(submissions):
                self._abandon(submitted)
        return [outputs[submission.request_id] for submission in submissions]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        thinking_token_budget: int | None = None,
        priority: PriorityLike | Sequence[PriorityLike] | None = None,
        **unserved: Unpack[Unserved],
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered by the model's chat template.

        Args:
            messages: a conversation ({"role", "content"} each) or a list of them.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end within the last message, for the model to go on with it.
            chat_template: Jinja source in place of the model's own.
            chat_template_kwargs: further names for the template.
            tools: functions that the model may call, as OpenAI's API has them.
            tool_choice: "none", "auto" (also None), "required", or the function to call.
            parallel_tool_calls: whether a turn may make several calls; None is true.
            thinking_token_budget: most tokens of a thought, which is then closed; None or -1 for no
                limit.

        The other arguments are those of `generate`.

        Returns:
            One output a conversation. `output.outputs[0].message` is the turn as an
            `AssistantMessage`: content, calls of tools and, where the model marks them, thoughts.

        Raises:
            InvalidRequestError: messages or tools that the template refuses, or a model without
                one; tools, and a model that is not known to call any; a budget, and a model whose
                thoughts have no limit.
        """
        refuse_unserved("chat", unserved)
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        names = dict(chat_template_kwargs or {})
        use = read_tool_use(tools, tool_choice, parallel_tool_calls)
        if use is not None:
            names["tools"] = list(use.shown)
        texts = [
            self.tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **names,
            )
            for conversation in conversations
        ]
        params = [
            self.engine.sampling_defaults.of(
                each, "a SamplingParams, or a list of one for each conversation"
            )
            for each in _for_each("sampling_params", sampling_params, len(texts))
        ]
        budget = check_thought_budget(thinking_token_budget)
        plan = model_formats(self.engine.config, self.tokenizer).plan(use, budget)
        plans = [None if plan is None else plan.opened_by(text) for text in texts]
        made: dict[tuple[int, bool], SamplingParams] = {}
        for index, (each, its_plan) in enumerate(zip(params, plans, strict=True)):
            if its_plan is not None:  # the grammar of many tools takes a while: once for all
                key = id(each), its_plan.is_open
                if key not in made:
                    made[key] = its_plan.constrained(each, self.tokenizer)
                params[index] = made[key]
        prompts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, priority=priority)
        for output, each, its_plan in zip(outputs, params, plans, strict=True):
            set_messages(output, its_plan, self.tokenizer, each)
        return outputs

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics at this moment: what `/metrics` shows of it, as typed values."""
        return list(engine_metrics(self.engine.load()))

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; true, as there is nothing that could keep it from that."""
        with self._in_turn():
            self.engine.flush_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Gives back the memory of weights and KV pages, until `wake_up`. Cached prefixes are
        forgotten; generating meanwhile raises `AsleepError`.

        Args:
            level: 1 keeps the weights in the host's memory, where those of a CPU are anyway; 2
                keeps none, so that they are read again.

        Raises:
            InvalidRequestError: an unknown level.
            InvalidConfigError: the engine is several replicas.
        """
        with self._in_turn():
            engine_of_this_process(self.engine, "sleep", level).sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Serves again, after `sleep`; does nothing otherwise.

        Args:
            tags: None alone: weights and pages come back together.

        Raises:
            InvalidRequestError: tags.
            ModelLoadError: weights that were not kept cannot be read any more.
        """
        if tags is not None:
            raise InvalidRequestError("tags", tags, "None: weights and pages come back together")
        if isinstance(self.engine, Engine):
            with self._in_turn():
                self.engine.wake_up()

    def is_sleeping(self) -> bool:
        """Whether it sleeps."""
        return isinstance(self.engine, Engine) and self.engine.sleep_level > 0

    def _abandon(self, request_ids: list[str]) -> None:
        """Ends what an exception or an interrupt left in flight, so that the engine serves on."""
        for request_id in request_ids:
            self.engine.abort(request_id)
        while self.engine.has_unfinished:
            self.engine.step()


def _as_prompts(prompts: PromptLike | Iterable[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = as_plain(prompts)
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray | set):
        raise InvalidRequestError("prompts", prompts, "text, token ids, or a list of either")
    listed: list[Any] = as_plain([*prompts])
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed


def _for_each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise InvalidRequestError(
                name, f"{len(value)} entries", f"one, or as many as prompts ({count})"
            )
        return list(value)
    return [value] * count
