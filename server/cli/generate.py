"""`octavo generate`: text from prompts; one prompt streams to the terminal. With `--task embed`,
embeddings of a file's texts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.engine.config import FEW_ROWS, SERVING_BATCHED_TOKENS
from octavo.engine.errors import InvalidConfigError
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.cli.engine_args import add_engine_args, checked_engine_args
from octavo.server.cli.prompts import Prompt, add_prompt_args, read_prompts
from octavo.server.cli.sampling_args import add_sampling_args, sampling_params

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

DEFAULTS = {"max_tokens": 128, "temperature": 0.0}
MANY_ROWS = 2000
"""Requests for which steps of twice as many tokens gain more than compiling them takes."""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "generate",
        description="Generate text. One prompt streams; several run as one batch. With --task "
        "embed, --input and --output, embeddings.",
    )
    add_prompt_args(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object a prompt: prompt, prompt_token_ids, token_ids, text, "
        "finish_reason, timings",
    )
    batch = parser.add_argument_group("batches from a file")
    batch.add_argument(
        "--output", metavar="FILE",
        help="results of --input, one JSON line each, as they end; a file with some of them is "
        "gone on with",
    )  # fmt: skip
    batch.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop",
        help="at a line that can never be served: end the run, or write its error as its result "
        "(default: stop)",
    )  # fmt: skip
    batch.add_argument("--overwrite", action="store_true", help="begin --output anew")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no rates")
    add_sampling_args(parser, DEFAULTS)
    add_engine_args(parser, leave_out=("seed",))


def run(args: argparse.Namespace) -> int:
    """Generates; 0."""
    if args.input is not None:
        return _from_file(args)
    for name in ("output", "overwrite"):
        if getattr(args, name):
            raise InvalidConfigError(name, getattr(args, name), "given together with --input")
    given = checked_engine_args(args)
    if given.get("task") == "embed":
        raise InvalidConfigError("task", "embed", "embed together with --input and --output")
    prompts = read_prompts(args, sampling_params(args))
    arguments = sized_for(sum(params.n for _, params in prompts), given)
    if len(prompts) == 1 and prompts[0][1].n == 1 and not args.json:
        engine, load_s = _load_streaming(arguments, args.quiet)
        asyncio.run(_stream(engine, *prompts[0], load_s=load_s, quiet=args.quiet))
    else:
        _batch(args, prompts, arguments)
    return 0


def _from_file(args: argparse.Namespace) -> int:
    """Runs a batch from file to file."""
    from octavo.server.batch.results import ResultsFile, count_lines

    if args.output is None:
        raise InvalidConfigError("output", None, "a file for the results of --input")
    try:
        open(args.input, "rb").close()
    except OSError as error:
        raise InvalidConfigError(
            "input", args.input, f"a file that can be read ({error.strerror})"
        ) from error
    if os.path.exists(args.output) and os.path.samefile(args.input, args.output):
        raise InvalidConfigError("output", args.output, "another file than --input")
    defaults, arguments = sampling_params(args), checked_engine_args(args)
    with open(args.input, "rb"), ResultsFile(args.output, overwrite=args.overwrite) as results:
        from octavo.engine.llm import LLM
        from octavo.server.batch.run import BatchRun

        sizes = sized_for(count_lines(args.input), arguments)
        llm = LLM(progress=not args.quiet, **sizes)
        try:
            batch = BatchRun(
                llm.engine, args.input, results,
                defaults=defaults, on_error=args.on_error, progress=not args.quiet,
                report=lambda text: print(f"octavo: skipped {text}", file=sys.stderr),
            )  # fmt: skip
            done = batch.run()
        finally:
            llm.close()
    if not args.quiet:
        earlier = f", {done.num_found} by an earlier run" if done.num_found else ""
        without = done.num_bad + done.num_failed
        print(
            f"{done.num_done} lines answered{earlier}, {without} with an error, "
            f"{done.num_tokens} tokens",
            file=sys.stderr,
        )
    return 0


def sized_for(num_rows: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments for so many rows: of a size with `octavo serve`, so that each of them finds
    the programs that the other left. A handful is over before finer programs would be compiled.
    `given` go before."""
    if num_rows > MANY_ROWS:
        return dict(given)
    max_num_seqs = given.get("max_num_seqs", 0)
    budget = max(SERVING_BATCHED_TOKENS, max_num_seqs if isinstance(max_num_seqs, int) else 0)
    few = {"warm_up": "few"} if num_rows <= FEW_ROWS else {}
    return {"max_num_batched_tokens": budget, **few, **given}


def _load_streaming(arguments: dict[str, Any], quiet: bool) -> tuple[AsyncEngine, float]:
    """An engine, and the seconds it took. Outside of the event loop, so that Ctrl-C ends it."""
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.config import EngineConfig

    began_s = time.monotonic()
    engine = AsyncEngine(EngineConfig(**arguments), progress=not quiet)
    return engine, time.monotonic() - began_s


async def _stream(
    engine: AsyncEngine, prompt: Prompt, params: SamplingParams, *, load_s: float, quiet: bool
) -> None:
    await engine.start()
    try:
        params = params.replace(output_kind=RequestOutputKind.DELTA)
        num_tokens = 0
        stream: Any = engine.generate(prompt, params)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                num_tokens += len(output.outputs[0].token_ids)
                print(output.outputs[0].text, end="", flush=True)
        print(flush=True)
        if not quiet:
            _summarize([(output, num_tokens)], load_s)
    finally:
        await engine.shutdown()


def _batch(
    args: argparse.Namespace,
    prompts: list[tuple[Prompt, SamplingParams]],
    arguments: dict[str, Any],
) -> None:
    from octavo.engine.llm import LLM

    began_s = time.monotonic()
    llm = LLM(progress=not args.quiet, **arguments)
    load_s = time.monotonic() - began_s
    outputs = llm.generate(
        [prompt for prompt, _ in prompts],
        [params for _, params in prompts],
        use_tqdm=not args.quiet,
    )
    for output in outputs:
        if args.json:
            print(json.dumps(_as_json(output, load_s), ensure_ascii=False))
        else:
            _print_text(output)
    sys.stdout.flush()
    if not args.quiet:
        _summarize([(output, _num_tokens(output)) for output in outputs], load_s)


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)


def _print_text(output: RequestOutput) -> None:
    """The prompt and its completions, as a person reads them."""
    prompt = output.prompt if output.prompt is not None else output.prompt_token_ids
    print(f"--- {prompt}")
    for completion in output.outputs:
        print(completion.text)


def _as_json(output: RequestOutput, load_s: float) -> dict[str, Any]:
    completions = [
        {
            "token_ids": completion.token_ids,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        for completion in output.outputs
    ]
    record: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        **completions[0],
        "timings": _timings(output, load_s),
    }
    if len(completions) > 1:
        record["completions"] = completions
    return record


def _timings(output: RequestOutput, load_s: float) -> dict[str, float | None]:
    metrics, num_tokens = output.metrics, _num_tokens(output)
    tpot_s = metrics.tpot_s(len(output.outputs[0].token_ids))
    e2e_s = _end_s(output) - metrics.arrival_s
    return {
        "load_s": round(load_s, 3),
        "ttft_ms": _ms(metrics.ttft_s),
        "tpot_ms": _ms(tpot_s),
        "e2e_ms": _ms(e2e_s),
        "tokens_per_s": round(num_tokens / e2e_s, 2) if e2e_s > 0 else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _end_s(output: RequestOutput) -> float:
    metrics = output.metrics
    ends_s = [metrics.finished_s, metrics.last_token_s, metrics.arrival_s]
    return next(end_s for end_s in ends_s if end_s is not None)


def _summarize(results: list[tuple[RequestOutput, int]], load_s: float) -> None:
    """One line on stderr: how many tokens, how fast."""
    begin_s = min(output.metrics.arrival_s for output, _ in results)
    span_s = max(_end_s(output) for output, _ in results) - begin_s
    num_tokens = sum(count for _, count in results)
    first_s = [output.metrics.ttft_s for output, _ in results if output.metrics.ttft_s is not None]
    rate = f", {num_tokens / span_s:.1f} tok/s" if span_s > 0 else ""
    first = f", first token after {min(first_s) * 1000:.0f} ms" if first_s else ""
    print(
        f"{num_tokens} tokens in {span_s:.2f} s{rate}{first}, model ready after {load_s:.1f} s",
        file=sys.stderr,
    )
