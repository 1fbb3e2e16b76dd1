"""Block sizes measured on a device: data, found by what they were measured for.

A table is a JSON file that `octavo tune` wrote: the device, the date and the command, one entry a
shape and part, and which library is to compute a CPU's products (`product_library.py`). Tables are
looked for in `OCTAVO_TUNING_DIR`, else in the user's cache folder, and then among those shipped;
where none matches, block sizes are computed from the device's properties. A table that cannot be
read, or asks for what a kernel does not have, ends the engine's start.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import jax.numpy as jnp

from octavo.engine.errors import InvalidConfigError
from octavo.pallas_kernels.compat import device_kind

Part = Literal["decode", "prefill"]
ProductLibrary = Literal["ynnpack", "eigen"]
Tiles = TypeVar("Tiles", bound=Any)
CPU = "cpu "
"""How the name of a CPU begins."""
_FAMILY = ", family "
MAY_BE_ZERO = frozenset({"native_decode", "score_sums", "num_raw"})
"""Names in `tiles`; all others are at least 1."""
_OLD_NAMES = {"int8_split": "sliced", "bounded_argmax": "screened", "block_quantized": "packed"}
"""Of `Products` in tables that an earlier `octavo tune` wrote."""
SHIPPED = Path(__file__).resolve().parent / "tuning_tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningKey:
    """What block sizes were measured for.

    Attributes:
        device: `tuning_device()`'s name.
        backend: of attention.
        part: decode rows or prefill chunks.
        dtype, kv_dtype: names, of queries and of the pool.
        num_heads, num_kv_heads, head_dim: on one device; `head_dim` as in the pool.
        page_size: tokens.
        num_cores: of a CPU that the process may run on; 0 for any number, and on other devices.
    """

    device: str
    backend: str
    part: Part
    dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_cores: int = 0


def tuning_key(
    backend: str,
    part: Part,
    q_shape: tuple[int, ...],
    q_dtype: Any,
    pool_shape: tuple[int, ...],
    kv_dtype: Any,
    kind: str | None = None,
) -> TuningKey:
    """The key of queries [T, Hq, D] over a pool [N, 2, Hkv, P, D].

    Args:
        kind: a device's name; None is the one being compiled for.
    """
    device = kind or tuning_device()
    return TuningKey(
        device=device,
        backend=backend,
        part=part,
        dtype=jnp.dtype(q_dtype).name,
        kv_dtype=jnp.dtype(kv_dtype).name,
        num_heads=q_shape[1],
        num_kv_heads=pool_shape[2],
        head_dim=q_shape[2],
        page_size=pool_shape[3],
        num_cores=num_cores() if device.startswith(CPU) else 0,
    )


def tuned(key: TuningKey) -> Mapping[str, int] | None:
    """Measured block sizes, by name; None where nothing was measured.

    Raises:
        InvalidConfigError: a table cannot be read.
    """
    found = _find(key)
    return None if found is None else found.tiles


Span: TypeAlias = tuple[int, int]
"""The least and the most."""


class Products(NamedTuple):
    """How a CPU's products are to be computed.

    Attributes:
        library: the faster one of XLA's two.
        int8_split: the least and the most tokens of steps that are faster still with such weights
            (`int8_split_linear`); None where none is, or nobody has looked.
        bounded_argmax: the least and the most rows whose likeliest tokens are found faster by
            bounds of logits (`bounded_argmax`) than from all logits; None as for `int8_split`.
        block_quantized: the most rows of decode steps that are faster still with such weights,
            where a checkpoint has them (`block_quantized_linear`); None where nobody has looked.
    """

    library: ProductLibrary
    int8_split: Span | None = None
    bounded_argmax: Span | None = None
    block_quantized: int | None = None


def tuned_products(dtype: str) -> Products | None:
    """What was measured to be the fastest for products on this CPU; None where nothing was.

    Args:
        dtype: its name.

    Raises:
        InvalidConfigError: a table cannot be read.
    """
    for directory in directories():
        products = _tables(str(directory)).products
        for device in _names(tuning_device()):
            found = products.get((device, num_cores(), dtype))
            if found is not None:
                return found
    return None


def with_tuned(tiles: Tiles, key: TuningKey) -> Tiles:
    """Block sizes with what was measured for `key` in place of what was computed.

    Args:
        tiles: a frozen dataclass of sizes; it comes back as it is where nothing was measured.

    Raises:
        InvalidConfigError: a table cannot be read, or names sizes that the kernel does not have.
    """
    found = tuned(key)
    if found is None:
        return tiles
    names = [each.name for each in fields(tiles)]
    unknown = sorted(found.keys() - set(names))
    if unknown:
        raise bad_tiles(key, found, f"sizes named {', '.join(names)}")
    return replace(tiles, **found)


def bad_tiles(key: TuningKey, tiles: Mapping[str, int], allowed: str) -> InvalidConfigError:
    """The error for an entry that a kernel cannot take."""
    found = _find(key)
    table = "tuning table" if found is None else f"tuning table {found.path}"
    where = f"{table}, {key.backend} {key.part} of {key.device}"
    return InvalidConfigError(where, dict(tiles), f"{allowed} (`octavo tune` measures anew)")


def check_tables() -> None:
    """Reads all tables.

    Raises:
        InvalidConfigError: one cannot be read.
    """
    for directory in directories():
        _tables(str(directory))


def tuning_device() -> str:
    """The device being compiled for: JAX's kind of it, or a CPU's model and its L2 cache."""
    kind = device_kind()
    return _cpu_name() if kind == "cpu" else kind


def user_directory() -> Path:
    """Where `octavo tune` writes unless told otherwise."""
    given = os.environ.get("OCTAVO_TUNING_DIR")
    if given:
        return Path(given)
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "octavo" / "tuning"


def directories() -> tuple[Path, ...]:
    """Folders of tables, the first found first."""
    return user_directory(), SHIPPED


def forget_tables() -> None:
    """Reads the tables anew when next asked: one was just written."""
    _tables.cache_clear()


def write_table(
    path: Path,
    about: Mapping[str, Any],
    entries: list[dict[str, Any]],
    products: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes a table; entries of keys that it does not measure anew stay.

    Args:
        about: device, date, command and whatever else explains the figures.
        entries: each a key's fields, `tiles`, and figures.
        products: each `dtype`, `num_cores`, `library`, and figures; the rest of `Products`.
    """

    def identity(entry: Mapping[str, Any]) -> TuningKey:
        return _key(about["device"], entry)

    kept: list[dict[str, Any]] = []
    kept_products: list[dict[str, Any]] = []
    if path.exists():
        known = {identity(entry) for entry in entries}
        measured = {(each["dtype"], each["num_cores"]) for each in products}
        old = json.loads(path.read_text("utf-8"))
        if old.get("device") == about["device"]:
            kept = [entry for entry in old["entries"] if identity(entry) not in known]
            kept_products = [
                each
                for each in old.get("products", ())
                if (each["dtype"], each["num_cores"]) not in measured
            ]
    table = {**about, "entries": [*kept, *entries], "products": [*kept_products, *products]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    forget_tables()


def key_fields(key: TuningKey) -> dict[str, Any]:
    """A key as an entry states it: its device is the table's."""
    return {name: value for name, value in asdict(key).items() if name != "device"}


class _Entry(NamedTuple):
    """What was measured for a key, and the table that says so."""

    tiles: Mapping[str, int]
    path: Path


class _Tables(NamedTuple):
    """What the tables of a folder say."""

    entries: dict[TuningKey, _Entry]
    products: dict[tuple[str, int, str], Products]  # by device, cores and dtype


def _find(key: TuningKey) -> _Entry | None:
    for directory in directories():
        entries = _tables(str(directory)).entries
        for device in _names(key.device):
            for cores in dict.fromkeys((key.num_cores, 0)):
                found = entries.get(replace(key, device=device, num_cores=cores))
                if found is not None:
                    return found
    return None


@functools.lru_cache(maxsize=8)
def _tables(directory: str) -> _Tables:
    found = _Tables({}, {})
    for path in sorted(Path(directory).glob("*.json")):
        try:
            table = json.loads(path.read_text("utf-8"))
            found.entries.update((key, _Entry(tiles, path)) for key, tiles in _tiles(table))
            found.products.update(_products(table))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            allowed = f"a table that `octavo tune` wrote ({type(error).__name__}: {error})"
            raise InvalidConfigError("tuning table", path, allowed) from error
    return found


def _tiles(table: Any) -> Iterator[tuple[TuningKey, Mapping[str, int]]]:
    for entry in table["entries"]:
        key = _key(table["device"], entry)
        for name, value in entry["tiles"].items():
            least = 0 if name in MAY_BE_ZERO else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} = {value!r} in tiles: want an integer of at least {least}"
                )
        yield key, dict(entry["tiles"])


def _key(device: str, entry: Mapping[str, Any]) -> TuningKey:
    names = TuningKey.__dataclass_fields__.keys() - {"device", "num_cores"}
    stated = {name: entry[name] for name in names}
    return TuningKey(device=device, num_cores=entry.get("num_cores", 0), **stated)


def _products(table: Any) -> Iterator[tuple[tuple[str, int, str], Products]]:
    known = get_args(ProductLibrary)
    for entry in table.get("products", ()):
        if entry["library"] not in known:
            raise ValueError(
                f"library = {entry['library']!r} in products: want {' or '.join(known)}"
            )
        key = table["device"], entry["num_cores"], entry["dtype"]
        yield (
            key,
            Products(
                entry["library"],
                int8_split=_span(*_named("int8_split", entry)),
                bounded_argmax=_span(*_named("bounded_argmax", entry)),
                block_quantized=_rows(*_named("block_quantized", entry)),
            ),
        )


def _named(name: str, entry: Mapping[str, Any]) -> tuple[str, Any]:
    """The name that an entry has for one of `Products`, and the value."""
    if name not in entry and _OLD_NAMES[name] in entry:
        name = _OLD_NAMES[name]
    return name, entry.get(name)


def _rows(name: str, value: Any) -> int | None:
    if value is None or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"{name} = {value!r} in products: want a number of rows, or null")


def _span(name: str, value: Any) -> Span | None:
    if value is None:
        return None
    is_pair = isinstance(value, list) and [type(each) for each in value] == [int, int]
    if not is_pair or not 1 <= value[0] <= value[1]:
        raise ValueError(f"{name} = {value!r} in products: want [least, most] tokens, or null")
    return value[0], value[1]


@functools.cache
def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        text = ""
    return cpu_name(text, l2_bytes())


def cpu_name(cpuinfo: str, l2: int) -> str:
    """How tables name a CPU; one that names no family holds for every family of its name.

    Args:
        cpuinfo: what Linux says of it in /proc/cpuinfo; "" where nothing does.
        l2: bytes of a core's second-level cache.
    """
    first, _, _ = cpuinfo.partition("\n\n")
    about = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }
    name = about.get("model name") or platform.processor() or platform.machine()
    # A virtual machine's CPU may have one name for generations that differ by half in speed.
    if "cpu family" in about and "model" in about:
        name += f"{_FAMILY}{about['cpu family']} model {about['model']}"
    return f"{CPU}{name}, L2 {l2 >> 10} KiB"


def _names(device: str) -> tuple[str, ...]:
    """The names by which tables are looked for: a CPU's without its family is all families'."""
    return tuple(dict.fromkeys((device, re.sub(f"{_FAMILY}\\d+ model \\d+", "", device))))


def num_cores() -> int:
    """Cores that this process may run on: XLA's CPU compiler splits work over them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def l2_bytes() -> int:
    """A core's second-level cache; 1 MiB where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text("utf-8").strip()
        return int(text.rstrip("KM")) << (20 if text.endswith("M") else 10)
    except (OSError, ValueError):
        return 1 << 20
