"""`octavo admin`: what an operator does to a running server."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

ACTIONS = {
    "drain": ("Drain", "refuse new requests, let those in flight finish, and end the server"),
    "flush-cache": ("FlushCache", "forget every cached prefix"),
    "start-profile": ("StartProfile", "record a JAX profile in the server's profile_dir"),
    "stop-profile": ("StopProfile", "end the recording"),
    "trace": ("Trace", "write the schedule of the next --seconds to --output, for ui.perfetto.dev"),
}
TOKEN_VARIABLE = "OCTAVO_ADMIN_TOKEN"
TIMEOUT_S, LONGEST_S = 60.0, 3600.0
_OPTIONS = (("grpc.max_receive_message_length", -1),)
"""A trace of many rows has tens of megabytes."""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    about = "; ".join(f"{name}: {text}" for name, (_, text) in ACTIONS.items())
    parser = subparsers.add_parser(
        "admin",
        description=f"Operate a server that was started with --admin-token-file. {about}. The "
        f"token is read from --token-file or from {TOKEN_VARIABLE}.",
    )
    parser.add_argument("action", choices=tuple(ACTIONS))
    parser.add_argument("--target", default="127.0.0.1:50051", help="host:port of its gRPC server")
    parser.add_argument("--token-file", metavar="FILE", help="file whose first line is the token")
    parser.add_argument("--tls-ca", metavar="FILE", help="PEM certificates that sign the server's")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="of a trace (default 10)"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="schedule.json",
        help="of a trace (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Makes one call and prints its answer; 0."""
    import grpc
    from google.protobuf.json_format import MessageToJson

    from octavo.engine.errors import InvalidConfigError
    from octavo.server.auth import first_token
    from octavo.server.proto.octavo.v1 import admin_pb2 as pb
    from octavo.server.status import error_of

    token = os.environ.get(TOKEN_VARIABLE, "")
    if args.token_file is not None:
        token = first_token(args.token_file, "token_file")
    if not token:
        raise InvalidConfigError("token_file", args.token_file, f"a token, or {TOKEN_VARIABLE}")
    name, _ = ACTIONS[args.action]
    if args.tls_ca is None:
        channel = grpc.insecure_channel(args.target, _OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(Path(args.tls_ca).read_bytes())
        channel = grpc.secure_channel(args.target, credentials, _OPTIONS)
    request = getattr(pb, f"{name}Request")()
    request_s = 0.0
    if args.action == "trace":
        request.seconds = request_s = args.seconds
    with channel:
        call = channel.unary_unary(
            f"/octavo.v1.AdminService/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(pb, f"{name}Response").FromString,
        )
        try:
            answer = call(
                request,
                metadata=(("authorization", f"Bearer {token}"),),
                timeout=TIMEOUT_S + min(max(0.0, request_s), LONGEST_S),
            )
        except grpc.RpcError as error:
            raise error_of(error) from None
    if args.action == "trace":
        Path(args.output).write_bytes(answer.trace)
        print(f"{args.output}: {len(answer.trace)} bytes; open it at https://ui.perfetto.dev")
        return 0
    print(MessageToJson(answer, preserving_proto_field_name=True, indent=None))
    return 0
