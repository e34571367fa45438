"""The manifests of `deploy/kubernetes`: objects by Kubernetes' own schemas, and settings by those of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from draftree.core.errors import ConfigurationError
from draftree.serve.ray.options import from_environment

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def listed(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


META = closed([], name=TEXT, labels=TEXTS, annotations=TEXTS)
TEMPLATE = closed(["spec"], metadata=META, spec={"type": "object"})
RAY_SERVICE = closed(
    ["serveConfigV2", "rayClusterConfig"],
    serveConfigV2=TEXT,
    rayClusterConfig=closed(
        ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
        rayVersion=TEXT,
        enableInTreeAutoscaling={"type": "boolean"},
        headGroupSpec=closed(["rayStartParams", "template"], rayStartParams=TEXTS, template=TEMPLATE),
        workerGroupSpecs=listed(
            closed(
                ["groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                groupName=TEXT,
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                rayStartParams=TEXTS,
                template=TEMPLATE,
            )
        ),
    ),
)
"""The fields in use of a kind that Kubernetes does not know: a misspelled field is an error."""


def objects() -> list[Any]:
    return [
        pytest.param(one, id=f"{path.stem}-{number}-{one['kind']}")
        for path in FILES
        for number, one in enumerate(yaml.safe_load_all(path.read_text("utf-8")))
    ]


def pods(one: Any) -> list[Any]:
    if one["kind"] == "RayService":
        cluster = one["spec"]["rayClusterConfig"]
        return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [one["spec"]["template"]["spec"]] if one["kind"] == "Deployment" else []


def test_there_are_manifests() -> None:
    assert [path.name for path in FILES] == ["rayservice.yaml", "server.yaml"]


@pytest.mark.parametrize("one", objects())
def test_objects_follow_the_schemas_of_kubernetes(one: Any) -> None:
    if one["kind"] == "RayService":
        whole = closed(
            ["apiVersion", "kind", "metadata", "spec"],
            apiVersion={"const": "ray.io/v1"},
            kind=TEXT,
            metadata=META,
            spec=RAY_SERVICE,
        )
        jsonschema.validate(one, whole)
    else:
        kubernetes_validate.validate(one, "1.34", strict=True)
    for pod in pods(one):
        inner = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
        kubernetes_validate.validate(inner, "1.34", strict=True)


@pytest.mark.parametrize("one", objects())
def test_mounts_probes_and_selectors_name_what_exists(one: Any) -> None:
    for pod in pods(one):
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {"requests", "limits"} <= container["resources"].keys()
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            ports = {port["name"] for port in container.get("ports", [])}
            probes = [container[name] for name in container if name.endswith("Probe")]
            assert {probe["httpGet"]["port"] for probe in probes} <= ports
            assert {probe["httpGet"]["path"] for probe in probes} <= {"/ready", "/health"}
    if one["kind"] == "Deployment":
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()


def ray_config() -> Any:
    (one,) = yaml.safe_load_all((FOLDER / "rayservice.yaml").read_text("utf-8"))
    return yaml.safe_load(one["spec"]["serveConfigV2"])


def test_the_application_is_that_of_the_package_with_valid_settings() -> None:
    (application,) = ray_config()["applications"]
    assert application["import_path"] == "draftree.serve.ray:app"
    settings, options = from_environment(application["runtime_env"]["env_vars"])
    assert settings.model_names == ("smollm2-135m-instruct",)
    assert (settings.options.exact, settings.options.threads) == (True, 4)
    assert (options.num_replicas, options.max_replicas, options.num_proxies) == (None, 4, 2)


def test_a_misspelled_setting_would_be_seen() -> None:
    (application,) = ray_config()["applications"]
    with pytest.raises(ConfigurationError, match="DRAFTREE_SERVE_MODLES"):
        from_environment(application["runtime_env"]["env_vars"] | {"DRAFTREE_SERVE_MODLES": "x"})


def test_ray_serve_accepts_the_configuration() -> None:
    schema = pytest.importorskip("ray.serve.schema")
    found = schema.ServeDeploySchema.model_validate(ray_config())
    assert [application.name for application in found.applications] == ["draftree"]


def test_a_worker_has_room_for_a_replica() -> None:
    (one,) = yaml.safe_load_all((FOLDER / "rayservice.yaml").read_text("utf-8"))
    (application,) = ray_config()["applications"]
    threads = int(application["runtime_env"]["env_vars"]["DRAFTREE_SERVE_THREADS"])
    (worker,) = one["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert int(worker["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]) >= threads
