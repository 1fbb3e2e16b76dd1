"""How a server listens, whom it lets in, and how it stops."""

from __future__ import annotations

import json
import math
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidConfigError

if TYPE_CHECKING:
    import grpc

SPARE_CALLS = 1024
"""Calls above the limit of requests that may be open: load and tokenizing among them."""
IDLE_CONNECTION_MS = 300_000
"""Without a call, after which a gRPC connection is closed."""

_PATHS = (
    "batch_files_dir", "token_file", "admin_token_file", "profile_dir", "tls_cert", "tls_key",
    "tls_client_ca",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """A server's own settings. Immutable; checked on construction.

    Attributes:
        host: address to bind.
        grpc_port: port of the gRPC services; 0 takes a free one.
        http_port: port of the OpenAI-compatible HTTP API; 0 takes a free one, none is no HTTP.
        max_message_bytes: largest gRPC message and HTTP body accepted.
        max_header_bytes: largest HTTP header accepted.
        max_concurrent_requests: most requests in flight; more are refused at once, those of low
            priority an eighth earlier.
        max_connections: most connections of each port, fewer where the limit of open files says
            so. When HTTP holds them all, the one that has waited longest for its client makes room
            for a new one.
        request_timeout_s: most seconds a request may take; none sets no limit.
        receive_timeout_s: seconds in which an HTTP header, and then its body, must arrive, and a
            gRPC client's first frames and each call's message.
        drain_timeout_s: seconds that requests in flight get to finish when the server is told to
            stop.
        keepalive_s: a gRPC client silent this long is pinged, and dropped if it does not answer; an
            HTTP connection idle this long is closed.
        stream_interval_ms: tokens of a stream that come within so many milliseconds of one another
            leave in one message, within up to four times as many while the server's event loop has
            little time left; the first and the last leave at once. 0 sends each as it comes.
        trust_request_chat_template: whether a chat over HTTP may bring a `chat_template` of its
            own: a program, run in a sandbox.
        responses_store_bytes: most bytes of responses that /v1/responses keeps in memory for
            previous_response_id; 0 keeps none.
        responses_store_entries: most responses that are kept; those not used for longest make room.
        responses_store_age_s: seconds without use after which a response is forgotten.
        batch_files_dir: folder for files of /v1/files and for batches of /v1/batches, this server's
            own; none does not offer them.
        batch_file_bytes: largest file that may be uploaded.
        batch_files_bytes: most bytes of files that one tenant may keep.
        stuck_after_s: seconds in one engine step after which the server calls itself dead.
        kv_events: whether routers may follow what comes into the prefix cache and goes out of it,
            tokens of prompts included (SubscribeKvEvents of the service that smg speaks). Of pages
            of a tenant, or of a cache salt, nothing is told.
        kv_events_endpoint: where the same is published over ZeroMQ as vLLM does, such as
            tcp://0.0.0.0:5557; whoever reaches it may read. Needs octavo[kv-events].
        kv_events_replay_endpoint: where subscribers ask for what they missed.
        kv_events_topic: of what is published; llm-d's indexer wants kv@POD@MODEL.
        token_file: bearer tokens, one a line, each with its tenant and a colon before it or alone;
            read again when the file changes; none lets everybody in.
        admin_token_file: bearer tokens of the admin service alone, as in token_file; none does not
            offer that service.
        profile_dir: where the admin service records JAX profiles; none refuses to.
        otlp_traces_endpoint: OTLP collector (gRPC) that traces of requests are sent to, such as
            http://localhost:4317; none makes no traces.
        allowed_origins: origins whose pages may call the HTTP API from a browser: a JSON list, such
            as ["https://chat.example"], or ["*"] for all of them; none allows no other origin's.
        allowed_methods: methods that such pages may use, a JSON list.
        allowed_headers: header fields that such pages may set, a JSON list.
        allow_credentials: let such pages send cookies and the browser's own credentials. A bearer
            token that a page sets itself needs only allowed_headers.
        tls_cert, tls_key: certificate chain and its key, PEM files, given together.
        tls_client_ca: certificates that sign clients' own, PEM file; clients must then show one.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int | None = None
    max_message_bytes: int = 4 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_concurrent_requests: int = 2048
    max_connections: int = 8192
    request_timeout_s: float | None = None
    receive_timeout_s: float = 30.0
    trust_request_chat_template: bool = False
    responses_store_bytes: int = 0
    responses_store_entries: int = 4096
    responses_store_age_s: float = 86_400.0
    batch_files_dir: str | None = None
    batch_file_bytes: int = 100 * 1024 * 1024
    batch_files_bytes: int = 10 * 1024 * 1024 * 1024
    drain_timeout_s: float = 30.0
    keepalive_s: float = 30.0
    stream_interval_ms: float = 5.0
    stuck_after_s: float = 120.0
    kv_events: bool = False
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str = ""
    token_file: str | None = None
    admin_token_file: str | None = None
    profile_dir: str | None = None
    otlp_traces_endpoint: str | None = None
    allowed_origins: str | None = None
    allowed_methods: str = '["*"]'
    allowed_headers: str = '["*"]'
    allow_credentials: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None

    def __post_init__(self) -> None:
        for name in _PATHS:  # a shell leaves the ~ of --token-file=~/tokens alone
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, os.path.expanduser(path))
        _integer("grpc_port", self.grpc_port, 0, 65535)
        if self.http_port is not None:
            _integer("http_port", self.http_port, 0, 65535)
            if self.http_port and self.http_port == self.grpc_port:
                raise InvalidConfigError("http_port", self.http_port, "a port other than grpc_port")
        _integer("max_message_bytes", self.max_message_bytes, 1024, 2**31 - 1)
        _integer("max_header_bytes", self.max_header_bytes, 1024, 2**31 - 1)
        _integer("max_concurrent_requests", self.max_concurrent_requests, 1, 10**6)
        _integer("max_connections", self.max_connections, 16, 10**6)
        if self.request_timeout_s is not None:
            _seconds("request_timeout_s", self.request_timeout_s, above_zero=True)
        _seconds("drain_timeout_s", self.drain_timeout_s, above_zero=False)
        _number("stream_interval_ms", self.stream_interval_ms, 0.0, 1000.0)
        for name in ("receive_timeout_s", "keepalive_s", "stuck_after_s"):
            _seconds(name, getattr(self, name), above_zero=True)
        _integer("responses_store_bytes", self.responses_store_bytes, 0, 2**50)
        _integer("responses_store_entries", self.responses_store_entries, 1, 10**7)
        _seconds("responses_store_age_s", self.responses_store_age_s, above_zero=True)
        _integer("batch_file_bytes", self.batch_file_bytes, 1024, 2**50)
        _integer("batch_files_bytes", self.batch_files_bytes, 1024, 2**60)
        if self.batch_files_dir is not None and self.http_port is None:
            raise InvalidConfigError(
                "batch_files_dir", self.batch_files_dir, "given together with http_port"
            )
        for name, needed in (
            ("kv_events_endpoint", "kv_events"),
            ("kv_events_replay_endpoint", "kv_events_endpoint"),
        ):
            if getattr(self, name) is not None and not getattr(self, needed):
                allowed = f"given together with {needed}"
                raise InvalidConfigError(name, getattr(self, name), allowed)
        self.cross_origin()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidConfigError("tls_key", self.tls_key, "given together with tls_cert")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidConfigError("tls_client_ca", self.tls_client_ca, "given with tls_cert")

    def cross_origin(self) -> dict[str, Any] | None:
        """Arguments of Starlette's `CORSMiddleware`; None if no other origin is allowed.

        Raises:
            InvalidConfigError: a list is none, or every origin would get credentials.
        """
        lists = {
            name: _texts(name, getattr(self, name))
            for name in ("allowed_origins", "allowed_methods", "allowed_headers")
        }
        origins = lists["allowed_origins"]
        if self.allow_credentials and "*" in origins:
            # The middleware would name each page's own origin: any site could act as its visitor.
            raise InvalidConfigError(
                "allow_credentials", True, "given with allowed_origins by name"
            )
        if not origins:
            return None
        return {
            "allow_origins": origins,
            "allow_methods": lists["allowed_methods"],
            "allow_headers": lists["allowed_headers"],
            "allow_credentials": self.allow_credentials,
            "expose_headers": ["x-request-id", "retry-after", "retry-after-ms"],
        }

    def channel_options(self) -> list[tuple[str, int]]:
        """gRPC server options."""
        keepalive_ms = int(self.keepalive_s * 1000)
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # Two servers on one port would silently share its calls.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            # gRPC waits a minute for a ping's answer unless this says less, whatever that says.
            ("grpc.http2.ping_timeout_ms", keepalive_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            # Idle clients and load balancers may ping as often as every 5 s and keep their
            # connection: the default allows one ping in 5 minutes and then hangs up.
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ("grpc.http2.max_ping_strikes", 10),
            # A client without a call is asked to come again when it has one, which clients of
            # gRPC do unseen.
            ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
            # TLS, and HTTP/2's first frames, must come in this time.
            ("grpc.server_handshake_timeout_ms", int(self.receive_timeout_s * 1000)),
        ]

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """What gRPC's secure port takes; None without TLS.

        Raises:
            InvalidConfigError: a file cannot be read, or holds no certificate.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        import grpc  # which `--help` does not need

        self._check_tls()
        client_ca = self.tls_client_ca
        return grpc.ssl_server_credentials(
            [(Path(self.tls_key).read_bytes(), Path(self.tls_cert).read_bytes())],
            root_certificates=None if client_ca is None else Path(client_ca).read_bytes(),
            require_client_auth=client_ca is not None,
        )

    def uvicorn_tls(self) -> dict[str, Any]:
        """uvicorn's arguments for TLS."""
        if self.tls_cert is None:
            return {}
        self._check_tls()
        needed = ssl.CERT_NONE if self.tls_client_ca is None else ssl.CERT_REQUIRED
        return {
            "ssl_certfile": self.tls_cert,
            "ssl_keyfile": self.tls_key,
            "ssl_ca_certs": self.tls_client_ca,
            "ssl_cert_reqs": int(needed),
        }

    def _check_tls(self) -> None:
        """Loads the files once, because gRPC says nothing of bad ones."""
        assert self.tls_cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            allowed = f"a PEM certificate chain that fits tls_key ({error})"
            raise InvalidConfigError("tls_cert", self.tls_cert, allowed) from error
        if self.tls_client_ca is not None:
            try:
                context.load_verify_locations(self.tls_client_ca)
            except (OSError, ssl.SSLError) as error:
                allowed = f"PEM certificates ({error})"
                raise InvalidConfigError("tls_client_ca", self.tls_client_ca, allowed) from error


def _texts(name: str, value: str | None) -> list[str]:
    """The texts of a JSON list, or the value itself if it looks like none."""
    if value is None:
        return []
    allowed = 'a JSON list of texts, such as ["*"]'
    if not isinstance(value, str):
        raise InvalidConfigError(name, value, allowed)
    if not value.lstrip().startswith(("[", "{", '"')):
        return [value.strip()]
    try:
        texts = json.loads(value)
    except ValueError as error:
        raise InvalidConfigError(name, value, allowed) from error
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise InvalidConfigError(name, value, allowed)
    return texts


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidConfigError(name, value, f"an integer from {low} to {high}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high:
        raise InvalidConfigError(name, value, f"a number from {low:g} to {high:g}")


def _seconds(name: str, value: Any, *, above_zero: bool) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (above_zero and value == 0):
        least = "above 0" if above_zero else "of at least 0"
        raise InvalidConfigError(name, value, f"a finite number of seconds {least}")
