"""`octavo deploy`: servers of a model on a Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shlex
import signal
import sys
import time
from typing import Any

from octavo.server.cli.dataclass_args import add_dataclass_args, given_args

_PREFIX = "deploy_"
DEFAULT_NAME = "octavo"
POLL_S, SAY_S = 0.5, 15.0


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    from octavo.server.ray.deploy_config import DeployConfig

    parser = subparsers.add_parser(
        "deploy",
        usage="octavo deploy [OPTIONS] MODEL [OPTIONS OF octavo serve]",
        description="Run servers of a model on a Ray cluster. Ray Serve starts them and replaces "
        "those that die or hang; `octavo route --backend ray:NAME` is a front over them. What "
        "stands behind MODEL are options of `octavo serve`, for each server.",
    )  # fmt: skip
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="as of `octavo serve --model`: a path that is the same on every node, or the name of "
        "a packaged model",
    )  # fmt: skip
    parser.add_argument("serve", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument(
        "--name", metavar="NAME", default=DEFAULT_NAME,
        help="of the application; one that runs is changed to what is said here (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--address", metavar="HOST:PORT",
        help="of the cluster's head (default: RAY_ADDRESS, or the cluster of this machine)",
    )  # fmt: skip
    parser.add_argument(
        "--start-cluster", action="store_true",
        help="start a cluster of this machine alone, on loopback addresses and behind a token; it "
        "and its servers end with this command",
    )  # fmt: skip
    parser.add_argument(
        "--route", metavar="OPTIONS",
        help="be a front over the servers, too, with these options of `octavo route` as one text, "
        "such as '--http-port 8000'",
    )  # fmt: skip
    parser.add_argument("--delete", action="store_true", help="end the application instead")
    add_dataclass_args(parser, DeployConfig, prefix=_PREFIX)


def run(args: argparse.Namespace) -> int:
    """Deploys, and waits until all servers serve; 0."""
    from octavo.engine.errors import InvalidConfigError
    from octavo.server.ray.cluster import check_app_name, connect, require_ray, start_local
    from octavo.server.ray.deploy_config import DeployConfig
    from octavo.server.ray.server_words import check_words

    config = DeployConfig(**given_args(args, DeployConfig, _PREFIX))
    check_app_name("name", args.name)
    if args.delete and (args.model or args.start_cluster or args.route is not None):
        raise InvalidConfigError("delete", True, "given with --name and --address alone")
    if not args.delete and not args.model:
        raise InvalidConfigError("MODEL", None, "a folder, a GGUF file or a packaged model's name")
    if args.start_cluster and args.address is not None:
        raise InvalidConfigError("address", args.address, "left out with --start-cluster")
    front = None
    if not args.delete:
        settings = check_words(args.model, args.serve, config.listen)
        token_file = settings.serve.token_file
        words = _front_words(args.name, args.model, token_file)
        if args.route is not None:
            front = _parse_front([*words, *shlex.split(args.route)])
    require_ray("command", "deploy")
    if args.start_cluster:
        start_local()
    else:
        connect(args.address)
    if args.delete:
        _delete(args.name)
        return 0
    _deploy(args.name, args.model, args.serve, config)
    if front is not None:
        from octavo.server.cli import route

        return route.run(front)
    print(f"octavo: a front over them: octavo {shlex.join(words)} --http-port 8000", flush=True)
    if args.start_cluster:
        print("octavo: the cluster and its servers end with this command", flush=True)
        _wait()
    return 0


def _wait() -> None:
    """Until SIGINT or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def _front_words(name: str, model: str, token_file: str | None) -> list[str]:
    words = ["route", "--backend", f"ray:{name}", "--model", model]
    return words if token_file is None else [*words, "--backend-token-file", token_file]


def _parse_front(words: list[str]) -> argparse.Namespace:
    from octavo.server.cli import route
    from octavo.server.cli.suggesting_parser import parse_args

    parser = argparse.ArgumentParser(prog="octavo")
    route.add_parser(parser.add_subparsers(metavar=""))
    return parse_args(parser, words)


def _deploy(name: str, model: str, words: list[str], config: Any) -> None:
    """Hands the application to Serve and waits until it runs.

    Raises:
        EngineDeadError: Serve gave up starting servers.
    """
    from ray import serve

    from octavo.engine.errors import EngineDeadError
    from octavo.server.ray.application import DEPLOYMENT, make_application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    application = make_application(model, words, config)
    serve.start(proxy_location="Disabled")
    serve.run_many(
        [serve.RunTarget(application, name=name, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    said_s = time.monotonic()
    while True:
        app = serve.status().applications[name]
        servers = app.deployments.get(DEPLOYMENT)
        if app.status == "RUNNING":
            num_running = 0 if servers is None else servers.replica_states.get("RUNNING", 0)
            print(f"octavo: {name}: {num_running} servers of {model} run", flush=True)
            return
        message = app.message if servers is None else servers.message or app.message
        if app.status == "DEPLOY_FAILED":
            raise EngineDeadError(f"{name} does not start: {message}")
        if time.monotonic() > said_s + SAY_S:
            said_s = time.monotonic()
            states = {} if servers is None else servers.replica_states
            counts = ", ".join(f"{count} {state.lower()}" for state, count in states.items())
            print(f"octavo: {name}: {counts or 'no servers yet'}. {message}", file=sys.stderr)
        time.sleep(POLL_S)


def _delete(name: str) -> None:
    from ray import serve

    from octavo.engine.errors import InvalidConfigError

    there = serve.status().applications
    if name not in there:
        allowed = f"one of {', '.join(there)}" if there else "an application; none runs"
        raise InvalidConfigError("name", name, allowed)
    serve.delete(name)
    print(f"octavo: {name} has ended", flush=True)
