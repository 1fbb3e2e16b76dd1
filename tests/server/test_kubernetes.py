"""Manifests in deploy/kubernetes/ agree with their schemas, with each other and with the server."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.engine.execution.programs.compile_cache import TRUST_ENV
from octavo.engine.hosts.hosts_config import COORDINATOR_PORT
from octavo.server.cli.dataclass_args import given_args
from octavo.server.cli.settings import PREFIX, SECTIONS, Settings, read_settings, setting_kinds
from octavo.server.route.membership import Membership
from octavo.server.serve_config import ServeConfig
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
FOLLOWER = {"role": "follower"}
"""Labels of pods that serve nothing."""
SHARED_CLAIMS = {"models"}
"""Volumes of somebody else's making."""
CUSTOM_KINDS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ("inference.networking.k8s.io/v1", "InferencePool"),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
    ("serving.kserve.io/v1beta1", "InferenceService"),
    ("serving.kserve.io/v1alpha2", "LLMInferenceService"),
}


@pytest.fixture(scope="module")
def checker() -> Any:
    return load_script(ROOT / "tools" / "check_manifests.py")


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(path: Path) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Labels and spec of each kind of pod that a manifest makes."""
    for made in objects(path):
        spec = made.get("spec", {})
        if made["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            for template in (group["leaderTemplate"], group["workerTemplate"]):
                yield template["metadata"]["labels"], template["spec"]
        elif made["kind"] == "InferenceService":
            yield {}, spec["predictor"]
        elif made["kind"] == "LLMInferenceService":
            yield {}, spec["template"]
        elif "template" in spec:
            yield spec["template"]["metadata"]["labels"], spec["template"]["spec"]


def octavos(path: Path) -> Iterator[tuple[dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Labels, pod and container of each of Octavo's own containers."""
    for labels, pod in pods(path):
        for container in pod["containers"]:
            if container["image"].startswith("octavo:"):
                yield labels, pod, container


def words(container: dict[str, Any]) -> list[str]:
    """The command line, behind `octavo`; variables are filled in as Kubernetes does."""
    target = container["image"].partition(":")[2]
    text = (ROOT / "deploy" / f"Dockerfile.{target}").read_text()
    command = container.get("command") or json.loads(text.rpartition("ENTRYPOINT ")[2])
    variables = {each["name"]: each.get("value", "10.0.0.7") for each in container.get("env", ())}
    line = [*command, *container.get("args", ())]
    return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in line[1:]]


def parsed(container: dict[str, Any]) -> argparse.Namespace:
    """The arguments as the command's own parser reads them."""
    line = words(container)
    module = importlib.import_module(f"octavo.server.cli.{line[0]}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(line)


def settings_of(container: dict[str, Any]) -> tuple[ServeConfig, Settings | None]:
    """What the server would be started with, checked as it checks it; None of a front."""
    args = parsed(container)
    if args.command == "route":
        assert Membership(args.backend)
        return ServeConfig(**given_args(args, ServeConfig, "setting_")), None
    given: dict[str, Any] = {}
    for kind in SECTIONS:
        given |= given_args(args, kind, "setting_")
    environ = {each["name"]: each.get("value", "") for each in container.get("env", ())}
    settings = read_settings(given, environ, None)
    return settings.serve, settings


def is_follower(labels: dict[str, str]) -> bool:
    return labels.items() >= FOLLOWER.items()


def test_there_is_a_manifest_of_each_kind() -> None:
    kinds = {(made["apiVersion"], made["kind"]) for path in MANIFESTS for made in objects(path)}
    assert kinds >= CUSTOM_KINDS


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_servers_take_their_arguments(path: Path) -> None:
    known = {PREFIX + name.upper() for name in setting_kinds()} | {TRUST_ENV}
    found = 0
    for labels, pod, container in octavos(path):
        found += 1
        serve, settings = settings_of(container)
        own = {each["name"] for each in container.get("env", ()) if "OCTAVO" in each["name"]}
        assert own <= known
        assert pod["terminationGracePeriodSeconds"] > serve.drain_timeout_s
        assert serve.host == "0.0.0.0"
        if is_follower(labels):
            assert "ports" not in container
            assert settings is not None
            assert settings.serve.token_file is None
            continue
        ports = {port.get("name"): port["containerPort"] for port in container.get("ports", ())}
        assert set(ports.values()) <= {
            serve.grpc_port, serve.http_port, COORDINATOR_PORT, COORDINATOR_PORT + 1,
        }  # fmt: skip
        for probe in ("readinessProbe", "livenessProbe"):
            request = container[probe]["httpGet"]
            assert request["path"] == ("/ready" if probe == "readinessProbe" else "/health")
            assert ports.get(request["port"], request["port"]) == serve.http_port
            assert request.get("scheme", "HTTP") == ("HTTPS" if serve.tls_cert else "HTTP")
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
        for name in (serve.token_file, parsed(container).__dict__.get("backend_token_file")):
            assert name is None or str(Path(name).parent) in mounts
        assert set(mounts.values()) == {volume["name"] for volume in pod.get("volumes", ())}
    assert found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_names_lead_somewhere(path: Path) -> None:
    made = objects(path)
    names = {(each["kind"], each["metadata"]["name"]) for each in made}
    labels = [found for found, _ in pods(path)]
    for each in made:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            chosen = [found for found in labels if spec["selector"].items() <= found.items()]
            assert chosen
            assert not any(map(is_follower, chosen))
        if each["kind"] in ("Deployment", "InferencePool", "PodDisruptionBudget"):
            wanted = spec["selector"]["matchLabels"].items()
            assert any(wanted <= found.items() for found in labels)
        if each["kind"] == "InferencePool":
            assert ("Service", spec["endpointPickerRef"]["name"]) in names
        for rule in spec.get("rules", ()) if each["kind"] == "HTTPRoute" else ():
            for backend in rule["backendRefs"]:
                assert (backend["kind"], backend["name"]) in names
    for _, pod in pods(path):
        for volume in pod.get("volumes", ()):
            if (claim := volume.get("persistentVolumeClaim")) is not None:
                assert claim["claimName"] in SHARED_CLAIMS
            if (secret := volume.get("secret")) is not None:
                # The file's head says how to make it.
                assert f"secret generic {secret['secretName']} " in path.read_text()
            if (config := volume.get("configMap")) is not None:
                assert ("ConfigMap", config["name"]) in names


def test_fronts_look_for_servers_where_they_are() -> None:
    path = next(path for path in MANIFESTS if path.stem == "fleet")
    made = {(each["kind"], each["metadata"]["name"]): each for each in objects(path)}
    tokens = {}
    for labels, _, container in octavos(path):
        serve, _ = settings_of(container)
        args = parsed(container)
        if args.command == "serve":
            port = serve.grpc_port
            tokens["servers"] = serve.token_file
            continue
        [backend] = args.backend
        kind, name, wanted = backend.split(":")
        service = made["Service", name]["spec"]
        assert (kind, int(wanted), service["clusterIP"]) == ("dns", port, "None")
        assert labels["app"] == made["Service", "octavo"]["spec"]["selector"]["app"]
        # Clients' tokens are not servers'.
        assert args.backend_token_file != serve.token_file
    assert tokens["servers"]


def test_a_groups_pods_find_their_place() -> None:
    path = next(path for path in MANIFESTS if path.stem == "leader_worker_set")
    [group, *_] = objects(path)
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    places = []
    engines = []
    for index, (_, _, container) in enumerate(octavos(path)):
        _, settings = settings_of(container)
        assert settings is not None
        environ = {"LWS_LEADER_ADDRESS": "a-0.a", "LWS_GROUP_SIZE": str(size)}
        environ["LWS_WORKER_INDEX"] = str(index)
        engine = settings.engine
        place = settings.hosts.found(environ, engine.tensor_parallel_size)
        assert place.hosts_token_file == "/etc/octavo-group/token"
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert engine.tensor_parallel_size == size * gpus
        places.append((place.host_id, place.size, place.log_address))
        engines.append((engine.model, engine.tensor_parallel_size))
        if place.is_leader:
            assert place.bind == ("10.0.0.7", COORDINATOR_PORT)
    assert [place[:2] for place in places] == [(index, size) for index in range(size)]
    assert len({place[2] for place in places}) == len(set(engines)) == 1


def test_the_picker_reads_what_the_server_shows(live: Any) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{live.http}/metrics") as answer:
        page = answer.read().decode()
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    # What llm-d's picker reads of a server of the kind "vllm", which is its default.
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"# TYPE vllm:{name} gauge" in page
        assert float(figures[f"vllm:{name}"]) >= 0
        assert f"octavo:{name}" in figures
    assert "lora" not in page


def test_kubernetes_own_kinds_fit_their_schemas(checker: Any) -> None:
    pytest.importorskip("kubernetes_validate", reason="not installed: make manifests")
    verdicts = list(checker.check(MANIFESTS, {}))
    assert [verdict for verdict in verdicts if verdict.errors] == []
    assert sum(verdict.is_known for verdict in verdicts) >= 15


DEFINITION = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.example.org}
spec:
  group: example.org
  names: {kind: Thing}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          type: object
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              required: [size]
              properties:
                size: {type: integer, format: int32}
                port: {x-kubernetes-int-or-string: true, anyOf: [{type: integer}, {type: string}]}
                note: {type: string, nullable: true}
                rest: {type: object, x-kubernetes-preserve-unknown-fields: true}
"""


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("{size: 1, port: http, note: null, rest: {any: 1}}", ""),
        ("{size: 1, port: 80}", ""),
        ("{size: two}", "spec.size: 'two' is not of type 'integer'"),
        ("{size: 1, sise: 2}", "spec: Additional properties are not allowed ('sise'"),
        ("{port: 1}", "spec: 'size' is a required property"),
        ("{size: 1, port: [1]}", "spec.port: [1] is not valid"),
    ],
)
def test_definitions_in_a_folder_are_schemas(
    checker: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: str, error: str
) -> None:
    folder = tmp_path / "crds" / "deep"
    folder.mkdir(parents=True)
    (folder / "thing.yaml").write_text(DEFINITION)
    (folder / "chart.yaml").write_text("kind: CustomResourceDefinition\n{{ not: yaml }\n")
    manifest = tmp_path / "made.yaml"
    head = "apiVersion: example.org/v1\nkind: Thing\nmetadata: {name: it, labels: {a: b}}\n"
    manifest.write_text(f"{head}spec: {spec}\n---\n{head.replace('Thing', 'Other')}")
    status = checker.main(["--crds", str(tmp_path / "crds"), str(manifest)])
    shown = capsys.readouterr().out.splitlines()
    assert status == bool(error)
    assert shown[0].startswith(f"made.yaml: Thing it: {error or 'ok'}")
    assert shown[1] == "made.yaml: Other it: no schema here"
