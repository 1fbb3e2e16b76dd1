"""What `octavo bench accuracy` counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.measuring.accuracy import TEXT_FILE, Predictions, compare, predict
from octavo.engine.sampling_params import SamplingParams
from octavo.server.cli.accuracy import MODES, parse_modes
from octavo.server.cli.main import main


def test_perplexity_is_that_of_the_mean_loss() -> None:
    certain = Predictions([0.0, 0.0], [1, 2], [1, 2])
    coin = Predictions([math.log(0.5)] * 2, [1, 7], [1, 2])
    assert certain.perplexity == 1
    assert coin.perplexity == pytest.approx(2)
    found = compare(certain, coin)
    assert found["perplexity_ratio"] == pytest.approx(2)
    assert found["top1_agreement"] == 0.5
    assert found["mean_abs_logprob_change"] == pytest.approx(math.log(2))


def test_predictions_of_different_texts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different texts"):
        compare(Predictions([0.0], [1], [1]), Predictions([0.0], [1], [2]))


def test_every_token_but_the_first_of_a_window_is_scored(make_llm: Callable[..., Any]) -> None:
    engine = make_llm(warm_up="coarse").engine
    for window in (1, 512, 100_000):
        with pytest.raises(InvalidConfigError, match=f"window = {window}"):
            predict(engine, "a text", window)
    text = TEXT_FILE.read_text(encoding="utf-8")[:150]
    ids = engine.tokenizer.encode(text)
    found = predict(engine, text, 40)
    starts = range(0, len(ids), 40)
    assert list(found.token_ids) == [t for s in starts for t in ids[s + 1 : s + 40]]
    # The likeliest token after a window's beginning is what greedy decoding says there.
    for length in (1, 20, 39):
        output = engine_says(engine, ids[40 : 40 + length])
        assert found.top_ids[39 + length - 1] == output
    again = predict(engine, text, 40)
    assert compare(found, again)["top1_agreement"] == 1


def engine_says(engine: Any, ids: list[int]) -> int:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.submit(engine.inputs.process("one", ids, params, now_s=engine.clock.now_s()))
    while True:
        for output in engine.step():
            if output.finished:
                return int(output.outputs[0].token_ids[0])


def test_modes_are_checked_before_anything_is_loaded() -> None:
    assert list(parse_modes(",".join(MODES))) == list(MODES)
    for bad in ("int8", "int4/auto", "int8/float16", ""):
        with pytest.raises(InvalidConfigError):
            parse_modes(bad)


def test_the_command_compares_each_mode_with_float32(
    tiny_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "accuracy", "--model", str(tiny_model), "--modes", "int8/int8"]
    assert main([*command, "--window", "200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rounded = report["modes"]["int8/int8"]
    assert 0.5 < rounded["top1_agreement"] < 1
    assert rounded["mean_abs_logprob_change"] > 0
