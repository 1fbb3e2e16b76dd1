"""What requests take that do not say otherwise: a model's own sampling parameters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.engine import sampling_defaults as module
from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError, InvalidRequestError, ModelLoadError
from octavo.engine.sampling_defaults import SamplingDefaults, sampling_defaults
from octavo.engine.sampling_params import SamplingParams
from tests.engine.conftest import CONTEXT, write_tiny_model

OF_QWEN = {
    "do_sample": True, "eos_token_id": [1], "temperature": 0.6, "top_p": 0.95, "top_k": 20,
    "transformers_version": "4.51.0",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def given(folder: Path, values: object) -> None:
    text = values if isinstance(values, str) else json.dumps(values)
    (folder / "generation_config.json").write_text(text)


def of(model: Path, **arguments: Any) -> dict[str, float]:
    return dict(sampling_defaults(EngineConfig(model=str(model), **arguments)).values)


def test_a_checkpoint_has_parameters_of_its_own(model: Path) -> None:
    given(model, OF_QWEN | {"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 99})
    assert of(model) == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05,
        "max_tokens": 99,
    }  # fmt: skip
    assert of(model, generation_config="vllm") == {}


@pytest.mark.parametrize("values", [None, {}, {"temperature": None, "eos_token_id": 1}])
def test_a_checkpoint_that_says_nothing_leaves_all_as_it_is(model: Path, values: Any) -> None:
    if values is not None:
        given(model, values)
    assert of(model) == {}
    assert sampling_defaults(EngineConfig(model=str(model))).params() == SamplingParams()


def test_packaged_models_and_gguf_files_have_none(tmp_path: Path) -> None:
    given(tmp_path, OF_QWEN)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert of(file) == of(Path("smollm2-135m")) == {}


def test_another_folder_may_say_it(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    given(model, OF_QWEN)
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(InvalidConfigError, match=r"^generation_config = .*auto, vllm, or a folder"):
        of(model, generation_config=str(other))
    given(other, {"top_k": 3})
    assert of(model, generation_config=str(other)) == {"top_k": 3}


@pytest.mark.parametrize("is_text", [True, False])
def test_an_override_goes_before_the_file(model: Path, is_text: bool) -> None:
    given(model, OF_QWEN)
    values = {"temperature": 0, "top_p": None, "max_new_tokens": 7}
    override = json.dumps(values) if is_text else values
    expected = {"temperature": 0, "top_k": 20, "max_tokens": 7}
    assert of(model, override_generation_config=override) == expected
    assert of(model, override_generation_config={}) == of(model)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{", "a JSON object with temperature"),
        ("[1]", "a JSON object with temperature"),
        ({"temprature": 1}, "a JSON object with temperature"),
        ({"temperature": object()}, "what JSON can say"),
        ({"temperature": 9}, "override_generation_config: temperature = 9 is not allowed"),
        ({"top_k": "many"}, "override_generation_config: top_k = 'many' is not allowed"),
    ],
)
def test_an_override_that_cannot_be_is_refused(model: Path, override: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match="override_generation_config") as refused:
        of(model, override_generation_config=override)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", 3.5), ("temperature", float("nan")),
        ("temperature", 10**400), ("top_p", 0), ("top_k", 2.5), ("min_p", [0.1]),
        ("repetition_penalty", -1), ("max_new_tokens", 0), ("max_new_tokens", True),
    ],
)  # fmt: skip
def test_a_value_that_no_request_may_have_is_left_out_with_a_warning(
    model: Path, field: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module._warn.cache_clear()
    other = {"top_p": 0.5} if field != "top_p" else {"top_k": 4}
    given(model, {field: value} | other)
    for _ in range(2):
        assert of(model) == other
    [record] = caplog.records
    assert f"{model / 'generation_config.json'}: {field}: " in record.getMessage()


def test_fields_that_are_not_read_may_be_anything(model: Path) -> None:
    given(model, {"do_sample": "perhaps", "num_beams": {}, "length_penalty": "x", "top_k": 4})
    assert of(model) == {"top_k": 4}


def test_a_file_that_is_no_json_is_named(model: Path) -> None:
    given(model, "{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json cannot be read"):
        of(model)


def test_what_a_request_says_goes_before() -> None:
    defaults = SamplingDefaults((("temperature", 0.6), ("top_k", 20)))
    assert defaults.params(temperature=0.0, n=1) == SamplingParams(temperature=0.0, top_k=20)
    assert defaults.of(None) == SamplingParams(temperature=0.6, top_k=20)
    own = SamplingParams(max_tokens=3)
    assert defaults.of(own) is own
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        defaults.of({"temperature": 1})


def test_llm_takes_them_where_it_is_given_none(make_llm: Any, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    given(model, {"temperature": 0.0, "max_new_tokens": 10 * CONTEXT})
    llm = make_llm(model=str(model))
    own = llm.get_default_sampling_params()
    assert own == SamplingParams(temperature=0.0, max_tokens=10 * CONTEXT)
    room = llm.engine.max_model_len - 5
    greedy = SamplingParams(temperature=0.0, max_tokens=room)
    prompt = [5, 6, 7, 8, 9]
    alone, alike = (llm.generate([prompt], params)[0].outputs[0] for params in (None, greedy))
    assert alone.token_ids == alike.token_ids  # as far as the context goes, and not refused
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        llm.generate([prompt], greedy.replace(max_tokens=room + 1))


def test_a_default_limit_leaves_a_cut_prompt_its_tokens(make_llm: Any) -> None:
    from octavo.engine.input.tokenization import Tokenization

    llm = make_llm(override_generation_config={"max_new_tokens": 10 * CONTEXT})
    submission = llm.engine.inputs.process(
        None,
        "a" * 2 * CONTEXT,
        llm.get_default_sampling_params(),
        now_s=0.0,
        tokenization=Tokenization(truncate_prompt_tokens=-1),
    )
    assert len(submission.sequences[0].prompt_token_ids) == llm.engine.max_model_len - 1


def test_a_copy_of_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    from octavo.models.loading.convert import convert

    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model)
    given(model, OF_QWEN)
    expected = of(model)
    convert(model, tmp_path / "orbax")
    shutil.rmtree(model)
    assert of(tmp_path / "orbax") == expected == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
