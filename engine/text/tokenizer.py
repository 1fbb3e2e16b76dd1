"""Text to tokens and back, from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from octavo.engine.errors import NOT_FAILURES, InvalidRequestError, ModelLoadError
from octavo.engine.text.chat_template import ChatTemplate, template_of_request
from octavo.engine.text.gguf_tokenizer import build_gguf_tokenizer
from octavo.engine.text.huggingface_tokenizer import load_huggingface_tokenizer
from octavo.engine.text.least_tokens import TokenSizes, token_sizes
from octavo.engine.text.token_bytes import TextAssembler, TokenBytes
from octavo.engine.text.tokenizer_parts import TokenizerParts
from octavo.models.loading.gguf_file import GGUFFile

MAX_TOKEN_ID = 2**32 - 1
NO_TEMPLATE = "a plain prompt, because this model has no chat template"
SHORT_TEXT_CHARS = 4_096
"""Characters that take a few milliseconds at most to encode, whatever they are."""


class Tokenizer:
    """A model's tokenizer. Immutable; its methods may be called from several threads.

    Attributes:
        vocab_size: one more than the largest token id.
        bos_token_id: the beginning-of-sequence token, if there is one.
        eos_token_ids: the tokens that end a generation, the main one first.
        special_ids: ids that `skip_special_tokens` leaves out.
        chat_template: Jinja source, or None for a model without one.
        model_type: the model's family, as the files beside the tokenizer name it; "" if none does.
        named_tokens: "bos_token", "eos_token", … -> text, as templates use them.
        token_bytes: token id -> bytes.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._affixes = parts.affixes
        self.named_tokens = parts.named_tokens
        self.vocab_size = parts.vocab_size
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_ids = parts.special_ids
        self.chat_template = parts.chat_template
        self.model_type = parts.model_type
        self.token_bytes = TokenBytes(parts.backend)

    @classmethod
    def from_source(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face directory, a tokenizer.json in one, or a GGUF file.

        Raises:
            ModelLoadError: nothing is there, or it is damaged.
            UnsupportedModelError: a kind of tokenizer that Octavo does not know.
        """
        path = Path(path)
        if path.is_dir():
            return cls(load_huggingface_tokenizer(path))
        if path.name == "tokenizer.json" and path.is_file():
            return cls(load_huggingface_tokenizer(path.parent))
        if path.is_file():
            return cls.from_gguf_metadata(GGUFFile(path).metadata)
        raise ModelLoadError(f"tokenizer = {str(path)!r} is neither a directory nor a file")

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a GGUF file that is open already. Raises as `from_source`."""
        return cls(build_gguf_tokenizer(metadata))

    def save(self, directory: Path) -> None:
        """Writes the tokenizer as Hugging Face's files, which `transformers` reads too.

        Args:
            directory: an existing one; tokenizer.json and tokenizer_config.json are written.
        """
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        if self._affixes is not None:
            prefix, suffix = ([self._backend.id_to_token(i) for i in ids] for ids in self._affixes)
            ids = [i for affix in self._affixes for i in affix]
            backend.post_processor = tokenizers.processors.TemplateProcessing(
                single=[*prefix, "$A", *suffix],
                pair=[*prefix, "$A", "$B", *suffix],
                special_tokens=[(self._backend.id_to_token(i), i) for i in dict.fromkeys(ids)],
            )
        backend.save(str(directory / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.named_tokens}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids; special tokens written out in it are recognised.

        Args:
            text: any valid Unicode text.
            add_special_tokens: put BOS and EOS where the model wants them.

        Raises:
            InvalidRequestError: not a string, a string with half a surrogate pair in it, or one
                that the model's tokenizer fails at.
        """
        if not isinstance(text, str):
            raise InvalidRequestError("prompt", text, "a string")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError("prompt", text, "valid Unicode text") from None
        own = add_special_tokens and self._affixes is None
        try:
            ids = self._encode(text, own)
        except NOT_FAILURES:
            raise
        except BaseException as error:  # a panic of its Rust code is no Exception
            allowed = f"text that the model's tokenizer can read ({error})"
            raise InvalidRequestError("prompt", text, allowed) from error
        if add_special_tokens and self._affixes is not None:
            prefix, suffix = self._affixes
            return [*prefix, *ids, *suffix]
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= SHORT_TEXT_CHARS:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        # Of the library's calls, those for batches alone let other threads run meanwhile.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = batch[0].ids
        return ids  # noqa: RET504 (typed as it is above)

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than these does the text have, by its length; 0 where that says nothing.

        Takes milliseconds for millions of characters.
        """
        return 0 if self.token_sizes is None else self.token_sizes.least_tokens(text)

    @functools.cached_property
    def token_sizes(self) -> TokenSizes | None:
        """How many bytes of a text one token takes; None for a tokenizer that sets no limit."""
        return token_sizes(self._backend)

    @functools.cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens by their text."""
        named = {token_id: self.id_to_token(token_id) for token_id in sorted(self.special_ids)}
        return {text: token_id for token_id, text in named.items() if text is not None}

    def has_special_token(self, text: str) -> bool:
        """Whether a text has a special token in it."""
        return self._special_pattern.search(text) is not None

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")

    def with_chat_template(self, source: str) -> Tokenizer:
        """A copy with another chat template."""
        changed = copy.copy(self)
        changed.__dict__.pop("_template", None)
        changed.chat_template = source
        return changed

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The tokens' text; bytes that are no character become U+FFFD, unknown ids nothing.

        Raises:
            InvalidRequestError: a negative id, or one that no vocabulary reaches.
        """
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:
            raise InvalidRequestError("token_ids", list(token_ids), f"0 to {self.vocab_size - 1}")
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return TextAssembler(self.token_bytes, skipped).join(token_ids).decode(errors="replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None if there is none with this id."""
        if not 0 <= token_id <= MAX_TOKEN_ID:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if there is no such token."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, as the model's template writes it.

        Args:
            messages: {"role": …, "content": text or a list of text parts} each.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end within the last message, for the model to go on with it.
            chat_template: Jinja source in place of the model's own.
            variables: passed to the template (`tools`, `documents`, its own switches).

        Raises:
            InvalidRequestError: the messages are malformed or the template refuses them, or the
                model has no template.
        """
        template = self._template
        if chat_template is not None:
            template = template_of_request(chat_template, self.named_tokens)
        if template is None:
            raise InvalidRequestError("messages", messages, NO_TEMPLATE)
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        **variables: Any,
    ) -> list[int]:
        """`apply_chat_template`, encoded. Raises the same.

        Args:
            add_special_tokens: put BOS and EOS where the model wants them; most templates write
                them themselves.
            Others as for `apply_chat_template`.
        """
        text = self.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )
        return self.encode(text, add_special_tokens=add_special_tokens)

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        if self.chat_template is None:
            return None
        return ChatTemplate(self.chat_template, self.named_tokens)
