"""Compiled programs on disk, found by what they are made from.

JAX's own cache finds a program by its text, which has to be traced and lowered first: that takes
the interpreter lock for a third of a second a program. Here a program is found by what its text is
made from (`fingerprint.py`), so that a start which compiles nothing traces nothing either. If it is
not, because the source is another one, it is lowered and looked for by its text; and if that is not
there, it is compiled as ever, through JAX's cache.

Only what was compiled in this process is written down: XLA's CPU client can write what it loaded
itself, but the copy lacks its functions, which shows when it runs. A CPU's is written down without
its text (`light_program.py`) and loaded at once in place of what was compiled, which keeps it.

Of several processes that want a program at once, one makes it (`ProgramStore.claim`) and the others
load it then.

An entry is used only if its key, its length and its checksum are right. Like JAX's own, it is code
that the process will run: the folder must be writable by nobody who may not run code here.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import pickle
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import jax
from jax.sharding import Mesh

from octavo.engine.execution.programs.compile_cache import cache_counts
from octavo.engine.execution.programs.fingerprint import fingerprint, source_digest, traced_folders
from octavo.engine.execution.programs.light_program import UnknownFormatError, lighten
from octavo.pallas_kernels.compat import deserialize_program, serialize_program

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

FOLDER = "octavo-programs"
"""Inside the compile cache's folder."""
MAGIC = b"octavo program 1\n"
PROGRAM, POINTER, CLAIM = ".program", ".key", ".claim"
"""Suffixes: of programs by their text, of what names one by what it is made from, and of what is
locked while one is made."""
KEPT_VERSIONS = 4
"""Entries kept of one program: those of as many versions, machines or settings, newest first."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_COMPRESSION = 1
_LIGHT = "light"
"""Stands before the parts of a program without its text."""


class Claim:
    """A process's right to make a program, while it lives and has not released it.

    Args:
        path: of the locked file.
        file: that holds the lock.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file

    def release(self) -> None:
        """Lets others have it. (Who opened the file before it went may claim it beside who makes it
        anew: both then do the same work, and no harm.)"""
        if not self._file.closed:
            _remove(self._path)
            self._file.close()


class ProgramStore:
    """The programs of one engine. Its methods may be called from several threads.

    Args:
        directory: where entries lie; made when the first is written.
        source: of what is traced.
        environment: what else decides what a text becomes: versions, settings, machine.
        purpose: what is common to the engine's programs: model, weights, state.
        devices: that they run on.
    """

    def __init__(
        self,
        directory: Path,
        *,
        source: str,
        environment: str,
        purpose: str,
        devices: Sequence[jax.Device],
    ) -> None:
        self._directory = directory
        self._source = source
        self._environment = environment
        self._purpose = purpose
        self._devices = tuple(devices)

    @property
    def identity(self) -> str:
        """Of all that decides which programs are kept here, but their names: two stores of one
        identity have the same."""
        return _digest(self._environment, self._purpose, self._source).hex()

    def has(self, name: str) -> bool:
        """Whether there is an entry, sound or not."""
        key = self._key(name, self._source)
        pointer = self._read(self._path(name, key, POINTER), key)
        return pointer is not None and self._path(name, pointer, PROGRAM).exists()

    def load(self, name: str) -> Any | None:
        """The program of this name, ready to be called; None where there is no sound entry."""
        key = self._key(name, self._source)
        path = self._path(name, key, POINTER)
        pointer = self._read(path, key)
        return None if pointer is None else self._load(name, pointer)

    def load_lowered(self, name: str, lowered: Any) -> Any | None:
        """As `load`, of a `jax.stages.Lowered` that another source came to as well."""
        key = self._text_key(name, lowered)
        program = self._load(name, key)
        if program is not None:
            self._point(name, key)
        return program

    def save(self, name: str, lowered: Any, program: Any) -> Any | None:
        """Writes a program down, unless this platform's cannot be: JAX's own cache is left then.

        Args:
            program: compiled from `lowered` in this process, not loaded from anywhere.

        Returns:
            The program as a later start would load it, where it takes less memory so; else None.
        """
        try:
            parts = tuple(serialize_program(program))
        except Exception as error:
            # Backends without serialization say so in many ways; none of them is in the way.
            logger.info("%s cannot be kept ready to load: %s", name, error)
            return None
        light, found = None, self._lightened(name, parts)
        if found is not None:
            try:
                light = deserialize_program(found, self._devices)
                parts = (_LIGHT, *found)
            except Exception as error:
                logger.warning("%s keeps its text: %s", name, error)
        self._save(self._text_key(name, lowered), name, parts)
        return light

    def claim(self, name: str) -> Claim | None:
        """The right to make a program; None while another process has it.

        Where files cannot be locked everybody has it.
        """
        path = self._path(name, self._key(name, self._source), CLAIM)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        except OSError as error:
            logger.info("%s cannot be written: %s", path, error)
            return Claim(path, io.BytesIO())
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            logger.info("%s cannot be locked: %s", path, error)
        self._drop_old(path)  # those of processes that were killed
        return Claim(path, file)

    def drop(self, name: str) -> None:
        """Forgets a program that loaded but did not run, so that no later start tries it."""
        key = self._key(name, self._source)
        path = self._path(name, key, POINTER)
        pointer = self._read(path, key)
        _remove(path)
        if pointer is not None:
            _remove(self._path(name, pointer, PROGRAM))

    def _load(self, name: str, key: bytes) -> Any | None:
        path = self._path(name, key, PROGRAM)
        payload = self._read(path, key)
        if payload is None:
            return None
        try:
            parts = pickle.loads(zlib.decompress(payload))
            if parts[0] == _LIGHT:
                parts = parts[1:]
            elif (light := self._lightened(name, parts)) is not None:
                parts = light  # an earlier version's
                self._save(key, name, (_LIGHT, *light))
            program = deserialize_program(parts, self._devices)
        except Exception as error:
            # Whatever a JAX that cannot use it says: compiling is always possible.
            _give_up(path, error)
            return None
        cache_counts().count_hit()
        return program

    def _lightened(self, name: str, parts: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A CPU's program without its text; None of others, and where it is not known how."""
        if self._devices[0].platform != "cpu":
            return None
        try:
            return lighten(parts)
        except UnknownFormatError as error:
            logger.info("%s keeps its text: %s", name, error)
            return None

    def _save(self, key: bytes, name: str, parts: tuple[Any, ...]) -> None:
        payload = zlib.compress(pickle.dumps(parts), _COMPRESSION)
        if self._write(self._path(name, key, PROGRAM), key, payload):
            self._point(name, key)

    def _point(self, name: str, key: bytes) -> None:
        """Notes that this source's program is the one of the text key."""
        own = self._key(name, self._source)
        self._write(self._path(name, own, POINTER), own, key)

    def _read(self, path: Path, key: bytes) -> bytes | None:
        """An entry's payload; None where there is no sound one."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s): compiling anew", path, error)
            return None
        start = len(MAGIC) + len(key) + _DIGEST_BYTES
        head, payload = data[:start], data[start:]
        if head != b"".join((MAGIC, key, hashlib.sha256(payload).digest())):
            _give_up(path, ValueError("another key or checksum"))
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the last to be dropped
        return payload

    def _write(self, path: Path, key: bytes, payload: bytes) -> bool:
        digest = hashlib.sha256(payload).digest()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._directory, suffix=".partial")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(b"".join((MAGIC, key, digest, payload)))
                os.replace(temporary, path)
            finally:
                _remove(Path(temporary))
            self._drop_old(path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)
            return False
        return True

    def _drop_old(self, path: Path) -> None:
        program = path.name.partition("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another start drops them too
            entries = sorted(
                self._directory.glob(f"{program}-*{path.suffix}"),
                key=lambda entry: entry.stat().st_mtime,
            )
            for entry in entries[:-KEPT_VERSIONS]:
                _remove(entry)

    def _text_key(self, name: str, lowered: Any) -> bytes:
        # The text says nothing of the trees that arguments and results are leaves of.
        return self._key(name, f"{lowered.in_tree}\n{lowered.out_tree}\n{lowered.as_text()}")

    def _key(self, name: str, made_from: str) -> bytes:
        return _digest(self._environment, self._purpose, name, made_from)

    def _path(self, name: str, key: bytes, suffix: str) -> Path:
        program = _digest(self._purpose, name).hex()[:24]
        return self._directory / f"{program}-{key.hex()[:40]}{suffix}"


def open_program_store(
    folder: Path | None, mesh: Mesh, about: tuple[Any, ...], arguments: Any
) -> ProgramStore | None:
    """Where the steps of an engine are kept between starts.

    Args:
        folder: the compile cache's; None is none.
        mesh: of the devices that they run on.
        about: what they are traced from, besides their names and arguments; its text must say all.
        arguments: tree of `jax.ShapeDtypeStruct`s with shardings that all steps take.

    Returns:
        The store; None where there is no compile cache, or it cannot be known what a step is made
        from: several processes run one program together, or there is no source to read.
    """
    source = source_digest(traced_folders())
    if folder is None or source is None or jax.process_count() > 1:
        return None
    purpose = [repr(about)]
    for path, leaf in jax.tree.leaves_with_path(arguments):
        form = (leaf.shape, leaf.dtype, leaf.sharding, getattr(leaf, "format", None))
        purpose.append(f"{jax.tree_util.keystr(path)} {form}")
    return ProgramStore(
        folder / FOLDER,
        source=source,
        environment=fingerprint(mesh),
        purpose="\n".join(purpose),
        devices=tuple(mesh.devices.flat),
    )


def _give_up(path: Path, error: Exception) -> None:
    logger.warning(
        "%s is not a sound program (%s: %s): compiling anew", path, type(error).__name__, error
    )
    _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _digest(*texts: str) -> bytes:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
