"""What the server writes to standard error: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass

from octavo.engine.errors import InvalidConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is logged and how. Immutable; checked on construction.

    Attributes:
        log_level: debug, info, warning or error; each request has a line at info.
        log_format: text, or json for one object a line.
        log_prompts: write prompts and messages of errors about them, too. They are what users said
            in confidence: off unless asked for.
    """

    log_level: str = "warning"
    log_format: str = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if self.log_level.lower() not in LEVELS:
            raise InvalidConfigError("log_level", self.log_level, " or ".join(LEVELS))
        object.__setattr__(self, "log_level", self.log_level.lower())
        if self.log_format not in FORMATS:
            raise InvalidConfigError("log_format", self.log_format, " or ".join(FORMATS))


def start_logging(config: LogConfig) -> None:
    """Sends every record to standard error as the configuration says."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    # At info it tells of each kind of device that is not there, which is no news of this server.
    quiet = logging.NOTSET if config.log_level == "debug" else logging.WARNING
    logging.getLogger("jax").setLevel(quiet)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, object] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """A line with the record's `fields` behind the message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; a traceback follows on its own lines."""
        fields = getattr(record, "fields", {})
        parts = [_moment(record), record.levelname, record.name, record.getMessage()]
        # repr: what a client named its request must not begin a new line.
        parts += [f"{key}={value!r}" for key, value in fields.items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _moment(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
