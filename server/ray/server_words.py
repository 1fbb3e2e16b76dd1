"""The options of `octavo serve` that a replica starts its server with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.server.cli import serve
from octavo.server.cli.dataclass_args import given_args
from octavo.server.cli.settings import SECTIONS, Settings, read_settings
from octavo.server.ray.deploy_config import NODE

OWN = ("host", "grpc_port", "http_port")
"""Settings that are the replica's: a front has the HTTP API."""
TLS = ("tls_cert", "tls_key", "tls_client_ca")
HOSTS = ("coordinator", "num_hosts", "host_id")


def check_words(model: str, words: Sequence[str], listen: str) -> Settings:
    """Reads what a server is told.

    Args:
        model: as of `octavo serve --model`; it need not be on this machine.
        words: further options of `octavo serve`.
        listen: as of `DeployConfig`.

    Returns: the server's settings. Environment variables of the nodes are not in them.

    Raises:
        InvalidConfigError: a value that cannot work, or a setting that a replica cannot have.
        SystemExit: an option without its value, or with one of another kind; a line on standard
            error says which.
    """
    parser = argparse.ArgumentParser(prog="octavo deploy … MODEL")
    serve.add_parser(parser.add_subparsers(metavar=""))
    args, unknown = parser.parse_known_args(["serve", "--model", model, *words])
    unknown += [args.model] if args.model is not None else []
    if unknown:
        allowed = "options of `octavo serve`; those of `octavo deploy` stand before MODEL"
        raise InvalidConfigError("words behind MODEL", " ".join(unknown), allowed)
    given: dict[str, Any] = {}
    for kind in SECTIONS:
        given |= given_args(args, kind, "setting_")
    if args.config is not None:
        raise InvalidConfigError("config", args.config, "left out: give the settings as options")
    for names, why in (
        (OWN, "left out: each server listens at a free port, as --listen says"),
        (TLS, "left out: servers of a Ray cluster have no TLS yet"),
        (HOSTS, "left out: a replica is one host"),
    ):
        for name in names:
            if name in given:
                raise InvalidConfigError(name, given[name], why)
    settings = read_settings(given, {}, None)
    if listen == NODE and settings.serve.token_file is None:
        raise InvalidConfigError("listen", listen, "given with --token-file for the servers")
    return settings
