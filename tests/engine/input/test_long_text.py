"""Text of any length: what cannot fit is refused by its length, what can holds up nobody."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from octavo.engine.errors import InvalidRequestError, ModelLoadError, shorten
from octavo.engine.input.input_processor import InputProcessor
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.tokenizer import SHORT_TEXT_CHARS, Tokenizer

CONTEXT = 64
LONGEST = "a" * 32


def write_tokenizer(directory: Path, split: str | None = None) -> Tokenizer:
    """One token a byte, "ab" of two and runs of "a" of up to 32."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens += ["a" * (1 << power) for power in range(1, 6)]
    merges = [("a", "b"), *(("a" * (1 << p), "a" * (1 << p)) for p in range(5))]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = byte_level
    if split is not None:
        cut = pre_tokenizers.Split(Regex(split), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.from_source(directory)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_tokenizer(tmp_path_factory.mktemp("plain"))


def inputs_of(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(
        tokenizer, vocab_size=300, max_model_len=CONTEXT, eos_token_ids=(1,), seed=0
    )


def process(inputs: InputProcessor, prompt: Any, **params: Any) -> Any:
    params = {"max_tokens": 1} | params
    return inputs.process("x", prompt, SamplingParams(**params), now_s=0.0)


class ForbiddenError(BaseException):
    """Of a tokenizer that must not be asked."""


def test_text_that_cannot_fit_is_refused_without_being_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(tokenizer)

    def encode(*_: Any, **__: Any) -> list[int]:
        raise ForbiddenError

    monkeypatch.setattr(tokenizer, "encode", encode)
    for text in ("a" * 4_000_000, "\U0001f600" * 100_000, " " * (SHORT_TEXT_CHARS + 1)):
        with pytest.raises(InvalidRequestError, match=r"characters, at least .*max_model_len 64"):
            process(inputs, text)
    with pytest.raises(ForbiddenError):  # it will be cut: its length says nothing
        inputs.tokenize("a" * 4_000_000, is_cut=True)


def test_a_prompt_of_the_longest_tokens_that_fits_is_served(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    inputs = InputProcessor(
        tokenizer, vocab_size=300, max_model_len=1000, eos_token_ids=(1,), seed=0
    )
    text = LONGEST * 999
    assert len(text) > SHORT_TEXT_CHARS
    (sequence,) = process(inputs, text).sequences
    assert len(sequence.prompt_token_ids) == 999
    with pytest.raises(InvalidRequestError, match="1000 tokens"):
        process(inputs, LONGEST * 1000)


def test_too_many_token_ids_are_refused_before_each_is_looked_at(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="1000000 tokens"):
        process(inputs_of(tokenizer), [object()] * 1_000_000)


def test_a_long_text_has_the_tokens_of_its_parts(tokenizer: Tokenizer) -> None:
    words = [f"word{number} " for number in range(2_000)]
    parts = [token for word in words for token in tokenizer.encode(word)]
    assert len("".join(words)) > SHORT_TEXT_CHARS
    assert tokenizer.decode(tokenizer.encode("".join(words))) == tokenizer.decode(parts)


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer) -> None:
    """The interpreter is given up: a second thread counts on, far past its turns before and after.

    Not a time: with the lock held the count would stay where it was when the call began.
    """
    counts = [0]
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            counts[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        before = [0]
        backend = tokenizer._backend

        class Watched:
            def encode_batch_fast(self, *args: Any, **kwargs: Any) -> Any:
                before[0] = counts[0]
                encoded = backend.encode_batch_fast(*args, **kwargs)
                before.append(counts[0])
                return encoded

        tokenizer._backend = Watched()
        try:
            tokenizer.encode("z" * 1_000_000)
        finally:
            tokenizer._backend = backend
    finally:
        ended.set()
        counter.join()
    assert before[1] - before[0] > 1_000


@pytest.fixture(scope="module")
def panics(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A real one: its regular expression gives up on some texts, in Rust code, by a panic."""
    return write_tokenizer(tmp_path_factory.mktemp("panics"), split="(a+)+$")


@pytest.mark.parametrize("length", [40, SHORT_TEXT_CHARS])
def test_a_panic_of_the_tokenizer_is_a_refusal(panics: Tokenizer, length: int) -> None:
    text = "a" * length + "b"
    with pytest.raises(BaseException, match="Onig") as panic:
        panics._backend.encode(text)
    assert not isinstance(panic.value, Exception)
    with pytest.raises(InvalidRequestError, match="tokenizer can read"):
        panics.encode(text)
    assert panics.encode("harmless") == panics.encode("harmless")


def test_a_tokenizer_that_panics_while_it_loads_is_a_bad_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)

    class Backend:
        @staticmethod
        def from_file(path: str) -> None:
            raise ForbiddenError("a panic")

    monkeypatch.setattr(tokenizers, "Tokenizer", Backend)
    with pytest.raises(ModelLoadError, match="a panic"):
        Tokenizer.from_source(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_configuration_nested_too_deep_is_a_bad_checkpoint(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_source(tmp_path)


@pytest.mark.parametrize(
    ("params", "wrong"),
    [
        ({"bad_words": ["a" * 10**6]}, "bad_words = 'a"),
        ({"bad_words": ["a"] * 10**5}, "bad_words = '100000 strings'"),
        ({"stop": ["a" * 10**6]}, "stop = 'a"),
        ({"stop": ["a"] * 10**5}, "stop = '100000 strings'"),
        ({"allowed_token_ids": list(range(10**6))}, "allowed_token_ids = '1000000 ids'"),
        ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids = '2'"),
        ({"logit_bias": dict.fromkeys(range(10**5), 1.0)}, "logit_bias = '100000 token ids'"),
        ({"logit_bias": {"1" * 5_000: 1.0}}, "logit_bias = '111"),
        ({"logit_bias": {"9" * 10: 1.0}}, "logit_bias = 9999999999"),
        ({"seed": 10**5_000}, "seed = a value of type int"),
    ],
)
def test_every_list_and_string_has_a_limit(params: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**params)
    assert str(refusal.value).startswith(wrong)
    assert len(str(refusal.value)) < 300


def test_the_most_that_is_allowed_is_taken() -> None:
    params = SamplingParams(
        bad_words=["b" * 256] * 64,
        stop=["s" * 256] * 16,
        allowed_token_ids=range(16_384),
        logit_bias={str(number): 1.0 for number in range(4_096)},
    )
    assert params.logit_bias is not None
    assert len(params.logit_bias) == 4_096


def test_an_error_shows_the_beginning_of_any_value() -> None:
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    for value in ("x" * 10**6, ["x" * 10**6] * 10**5, {"x" * 10**6: {"y": ["z"] * 10**6}}, deep):
        assert len(shorten(value)) <= 80
    assert shorten([{"role": "user", "content": "hi"}]) == "[{'role': 'user', 'content': 'hi'}]"
