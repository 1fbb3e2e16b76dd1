"""The Ray Serve application: servers of one model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from octavo import __version__
from octavo.engine.errors import InvalidConfigError
from octavo.server.ray.autoscaling import SaturationPolicy
from octavo.server.ray.compat import with_version
from octavo.server.ray.deploy_config import NODE, DeployConfig
from octavo.server.ray.replica import ServerReplica
from octavo.server.ray.server_words import check_words

DEPLOYMENT = "servers"
HEALTH_PERIOD_S = 1.0
"""Three failed looks, and a replica is replaced."""
HEALTH_TIMEOUT_S = 10.0
MOST_STARTS = 3
"""Attempts at a replica's start, after which the application has failed."""
LOOK_BACK_S = 10.0
"""Over which the signal of a rule is averaged."""
STOP_S = 15.0
"""For a replica to end, beyond its server's drain."""


def make_application(
    model: str, words: Sequence[str] = (), config: DeployConfig | None = None
) -> serve.Application:
    """An application for `serve.run`, with `route_prefix=None`.

    Args:
        model: as of `octavo serve --model`, on every node.
        words: further options of `octavo serve`.
        config: how many servers, and what each gets; None for one.

    Raises:
        InvalidConfigError: a value that cannot work.
    """
    config = config or DeployConfig()
    settings = check_words(model, words, config.listen)
    drain_s = settings.serve.drain_timeout_s
    deployment = serve.deployment(
        ServerReplica,
        name=DEPLOYMENT,
        **_size(config),
        max_constructor_retry_count=MOST_STARTS,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=drain_s + STOP_S,
        ray_actor_options={
            "num_cpus": config.cpus_per_replica,
            "num_gpus": config.gpus_per_replica,
            "resources": config.other_resources(),
        },
    )
    server = ("--quiet", "--model", model, *words)
    kept = {
        "listens_on_node": config.listen == NODE,
        "token_file": settings.serve.token_file,
        "drain_s": drain_s + STOP_S / 2,
    }
    # A replica that runs does not begin to tell Serve what a rule of scaling reads.
    alike = [__version__, server, kept, config.autoscale is not None]
    version = hashlib.sha256(json.dumps(alike).encode()).hexdigest()
    return with_version(deployment, version).bind(server, **kept)


def _size(config: DeployConfig) -> dict[str, Any]:
    """How many replicas: options of a deployment."""
    rule = config.autoscaling()
    if rule is None:
        return {"num_replicas": config.replicas or 1}
    policy = AutoscalingPolicy(
        policy_function=f"{SaturationPolicy.__module__}:{SaturationPolicy.__qualname__}",
        policy_kwargs={"rule": config.autoscale},
    )
    scaling = AutoscalingConfig(
        min_replicas=rule.least,
        initial_replicas=config.replicas or rule.least,
        max_replicas=rule.most,
        look_back_period_s=LOOK_BACK_S,
        # The rule itself says how long a signal must last.
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of a file for `serve deploy`, whose `import_path` names this function.

    Args:
        args: `model`; `serve`, options of `octavo serve` as a list of words; and the fields of
            `DeployConfig`.

    Raises:
        InvalidConfigError: an unknown name, or a value that cannot work.
    """
    given = dict(args)
    model, words = given.pop("model", None), given.pop("serve", [])
    if not isinstance(model, str) or not model:
        raise InvalidConfigError("model", model, "a folder, a GGUF file or a packaged model's name")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InvalidConfigError("serve", words, "a list of words, such as ['--max-num-seqs', '8']")
    known = DeployConfig.__dataclass_fields__
    for name in given.keys() - known:
        raise InvalidConfigError("args", name, f"model, serve or one of {', '.join(known)}")
    return make_application(model, words, DeployConfig(**given))
