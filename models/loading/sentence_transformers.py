"""How a checkpoint's hidden states become embeddings, as the files of Sentence Transformers say.

``modules.json`` lists what a text goes through: the transformer, a pooling, and perhaps a
normalization. ``config_sentence_transformers.json`` holds prompts by name.

Source: https://github.com/huggingface/sentence-transformers (the files that `save` writes).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.families.table import is_base
from octavo.models.loading.json_file import read_json, read_json_list
from octavo.models.pooling_config import Pooling, PoolingConfig

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
TEXT_FILE = "sentence_bert_config.json"
MAX_MODULES, MAX_PROMPTS, MAX_PROMPT_CHARS = 8, 256, 16_384

_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
"""How the file names a pooling -> how it is named here."""
_NEW_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLD_KEY = "pooling_mode_"


def read_pooling(directory: Path) -> PoolingConfig:
    """The pooling of a Hugging Face directory; that of any causal model where it has no
    ``modules.json``.

    Raises:
        UnsupportedModelError: a module or a kind of pooling that is not served, by name.
        ModelLoadError: a file that is malformed.
    """
    prompts, default = _read_prompts(directory)
    generates = not is_base(read_json(directory / "config.json"))
    path = directory / MODULES_FILE
    if not path.is_file():
        return PoolingConfig(
            is_declared=not generates,
            generates=generates,
            prompts=prompts,
            default_prompt=default,
        )
    modules = read_json_list(path, MAX_MODULES)
    pooling, normalize, longest = None, False, None
    for index, module in enumerate(modules):
        kind = module.get("type")
        name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
        if name == "Transformer" and index == 0:
            longest = _read_longest(directory)
        elif name == "Pooling" and index == 1:
            pooling = _read_mode(_inside(directory, module), excludes_prompts=any(prompts.values()))
        elif name == "Normalize" and pooling is not None:
            normalize = True
        else:
            raise UnsupportedModelError(
                f"{path}: module {index}, {shorten(kind)}, is not supported: a Transformer, a "
                "Pooling, and a Normalize or none"
            )
    if pooling is None:
        raise UnsupportedModelError(f"{path} names no Pooling, which an embedding needs")
    return PoolingConfig(
        pooling=pooling,
        normalize=normalize,
        is_declared=True,
        generates=generates,
        prompts=prompts,
        default_prompt=default,
        max_seq_length=longest,
    )


def copy_pooling(source: Path, target: Path) -> None:
    """Copy the files that `read_pooling` reads, but for config.json."""
    for name in (MODULES_FILE, PROMPTS_FILE, TEXT_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if not (source / MODULES_FILE).is_file():
        return
    for module in read_json_list(source / MODULES_FILE, MAX_MODULES):
        path = _inside(source, module) / "config.json"
        if module.get("path") and path.is_file():
            copied = _inside(target, module)
            copied.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied / "config.json")


def _inside(directory: Path, module: dict[str, Any]) -> Path:
    """A module's folder, refused if it lies anywhere else."""
    name = module.get("path")
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelLoadError(
            f"{directory / MODULES_FILE}: path = {shorten(name)} is not allowed: a folder inside it"
        )
    return directory / name


def _read_mode(folder: Path, *, excludes_prompts: bool) -> Pooling:
    path = folder / "config.json"
    values = read_json(path)
    named = values.get("pooling_mode")
    if named is not None:
        modes = named if isinstance(named, list) else [named]
        known = _NEW_MODES
    else:
        flags = {name: flag for name, flag in values.items() if name.startswith(_OLD_KEY)}
        modes = [name.removeprefix(_OLD_KEY) for name, flag in flags.items() if flag]
        known = _MODES
    if len(modes) != 1 or modes[0] not in known:
        raise UnsupportedModelError(
            f"{path}: pooling mode {shorten(modes)} is not supported: one of {', '.join(known)}"
        )
    mode = known[modes[0]]
    if values.get("include_prompt", True) is not True and mode == "mean" and excludes_prompts:
        raise UnsupportedModelError(
            f"{path}: include_prompt = {shorten(values['include_prompt'])} is not supported with "
            "the mean of all tokens: true"
        )
    return mode


def _read_longest(directory: Path) -> int | None:
    """Most tokens of a text, if the file limits them."""
    path = directory / TEXT_FILE
    if not path.is_file():
        return None
    values = read_json(path)
    if values.get("do_lower_case"):
        raise UnsupportedModelError(f"{path}: do_lower_case = true is not supported: false")
    if "message" in (values.get("modality_config") or ()):
        raise UnsupportedModelError(
            f'{path}: modality_config = {{"message": …}} is not supported: Sentence Transformers '
            "embeds texts as messages of the chat template there, and here they are embedded as "
            "they are"
        )
    longest = values.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ModelLoadError(
            f"{path}: max_seq_length = {shorten(longest)} is not allowed: an integer of at least "
            "1, or null"
        )
    return longest


def _read_prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the name of the default one."""
    path = directory / PROMPTS_FILE
    if not path.is_file():
        return {}, None
    values = read_json(path)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    is_sound = isinstance(prompts, dict) and len(prompts) <= MAX_PROMPTS
    if not is_sound or not all(
        isinstance(text, str) and len(text) <= MAX_PROMPT_CHARS for text in prompts.values()
    ):
        raise ModelLoadError(
            f"{path}: prompts = {shorten(prompts)} is not allowed: at most {MAX_PROMPTS} texts of "
            f"at most {MAX_PROMPT_CHARS} characters, by name"
        )
    if default is not None and default not in prompts:
        raise ModelLoadError(
            f"{path}: default_prompt_name = {shorten(default)} is not allowed: "
            f"{', '.join(map(repr, prompts)) or 'null: there are no prompts'}"
        )
    return prompts, default
