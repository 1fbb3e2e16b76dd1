"""Compiles requests' grammars in a thread of their own, and remembers the last ones."""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.structured.grammar import CompiledGrammar, compile_grammar
from octavo.engine.structured.params import FIELD, StructuredOutputsParams, parts_of
from octavo.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

COMPILE_TIMEOUT_S = 10.0
"""For a grammar to be compiled, the wait for those before it included."""
MAX_CACHED = 256
COMPILE_THREADS = 2


class GrammarCompiler:
    """Compiled grammars of one model. Safe from any thread.

    Args:
        tokenizer: of the model.
        vocab_size: width of its logits.
        eos_token_ids: what ends its sequences.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputsParams, Future[CompiledGrammar]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._vocabulary: LLTokenizer | None = None

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The compiled grammar; waits for it.

        Raises:
            InvalidRequestError: it cannot be compiled, or not within `COMPILE_TIMEOUT_S`; or this
                installation, or this model, has no structured outputs.
        """
        future = self._future(params)
        try:
            return future.result(COMPILE_TIMEOUT_S)
        except FutureTimeoutError:
            allowed = f"what can be compiled within {COMPILE_TIMEOUT_S:.0f} s"
            raise InvalidRequestError(*params.shown(), allowed) from None
        except InvalidRequestError as error:
            if params.turn is not None:
                raise InvalidRequestError(error.field, error.value, error.allowed) from None
            # Its like may have been asked for under another name before.
            raise InvalidRequestError(params.shown()[0], error.value, error.allowed) from None

    def prepare(self) -> None:
        """Reads the vocabulary now, as a server does before it is ready.

        The library keeps the interpreter to itself meanwhile, half a second at 49,152 tokens, in
        which no other request would get a token. Does nothing where there are no structured
        outputs.
        """
        if self._eos_token_ids and importlib.util.find_spec("llguidance") is not None:
            self._get_vocabulary()

    def close(self) -> None:
        """Ends the threads."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = None

    def _future(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        with self._lock:
            future = self._cache.get(params)
            if future is not None and not future.cancelled():
                self._cache.move_to_end(params)
                return future
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    COMPILE_THREADS, thread_name_prefix="octavo-grammar"
                )
            future = self._cache[params] = self._pool.submit(self._compile, params)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
            return future

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        vocabulary = self._get_vocabulary()
        if params.turn is not None and params.kind is not None:
            # Alone, a text that nothing matches is refused; behind what may be empty, as the line
            # breaks before a turn's text may, the library computes a mask for ever.
            alone = dataclasses.replace(params, turn=None)
            compile_grammar(alone, vocabulary, self._vocab_size)
        try:
            return compile_grammar(params, vocabulary, self._vocab_size)
        except InvalidRequestError:
            for part in parts_of(params):  # the one at fault is named, if it is one alone
                compile_grammar(part, vocabulary, self._vocab_size)
            raise

    def _get_vocabulary(self) -> LLTokenizer:
        """The vocabulary as the library wants it, made for the first grammar."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _make_vocabulary(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            allowed = f"not given, unless octavo[structured] is installed ({error})"
            raise InvalidRequestError(FIELD, "a grammar", allowed) from None
        if not self._eos_token_ids:
            allowed = "not given: this model has no token that ends a text"
            raise InvalidRequestError(FIELD, "a grammar", allowed)
        words = _Words(self._tokenizer, self._eos_token_ids)
        return LLTokenizer(
            TokenizerWrapper(words), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


class _Words:
    """A tokenizer in the shape that `llguidance.TokenizerWrapper` takes."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        pieces = tokenizer.token_bytes
        # The bytes that our own detokenizer writes: the text that comes out is what was matched.
        self.tokens = [pieces.piece(i, first=False) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | set(eos_token_ids))

    def __call__(self, text: Any) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)
