"""The chart, rendered and checked: every object against a schema in which a field that it does not name is an error."""

from __future__ import annotations

import functools
import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import referencing.jsonschema
import yaml
from referencing import Registry, Resource

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/smcserve"
PROFILES = {path.stem: path for path in sorted(CHART.glob("values-*.yaml"))}
CUSTOM = Path(__file__).parent / "crds"
REAL = Path(os.environ.get("SMC_CRDS", ROOT.parent / "shared/crds"))
"""CustomResourceDefinitions as the operators' projects publish them, by release; not part of this repository."""
OPERATORS = {
    "ray.io/v1": "kuberay",
    "monitoring.coreos.com/v1": "prometheus-operator",
    "keda.sh/v1alpha1": "keda",
    "gateway.networking.k8s.io/v1": "gateway-api",
}
"""Files of schemas by the version of the API."""
KUBERNETES = ("1.29.0", kubernetes_validate.latest_version())
"""An old version that is still run, and the newest that the validator knows."""


@functools.cache
def this_chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def values(*layers: str | Path | dict) -> dict[str, Any]:
    """Values laid over each other as `helm -f` does: names of profiles, files, or values."""
    merged: dict[str, Any] = {}
    for layer in layers:
        if not isinstance(layer, dict):
            layer = json.loads(_of_file(PROFILES.get(str(layer), Path(layer))))
        merged = _merge(merged, layer)
    return merged


@functools.cache
def _of_file(path: Path) -> str:
    return json.dumps(yaml.load(path.read_text(), Loader=yaml.CSafeLoader))


def _merge(under: dict, over: dict) -> dict:
    both = {
        key: _merge(under[key], over[key])
        for key in under.keys() & over.keys()
        if isinstance(under[key], dict) and over[key]
    }
    return under | over | both


def render(*layers: str | Path | dict, name: str = "demo", chart: helm_python.Chart | None = None) -> list[dict]:
    """Every object, as Helm would send it; ValueError with Helm's words if it refuses the values."""
    given = json.dumps(values(*layers))
    return pickle.loads(_rendered(given, name) if chart is None else _rendered_of(chart, given, name))


@functools.cache
def _rendered(given: str, name: str) -> bytes:
    """Tests ask for the same values again and again, and change what they get."""
    return _rendered_of(this_chart(), given, name)


def _rendered_of(chart: helm_python.Chart, given: str, name: str) -> bytes:
    try:
        chart.validate_schema(json.loads(given))
        files = chart.render(json.loads(given), name=name, namespace="llm")
    except helm_python.HelmError as error:
        raise ValueError(str(error)) from error
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return pickle.dumps([each for text in texts for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each])


def of_kind(objects: list[dict], kind: str) -> dict:
    """The only one of its kind."""
    (found,) = all_of_kind(objects, kind).values()
    return found


def all_of_kind(objects: list[dict], kind: str) -> dict[str, dict]:
    """By name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def check(thing: dict, version: str) -> None:
    """Raises if Kubernetes `version`, or the operator whose object it is, would refuse or not know a field."""
    _check(json.dumps(thing, sort_keys=True), version)


@functools.cache
def _check(text: str, version: str) -> None:
    """Variants of the chart have most of their objects in common."""
    thing = json.loads(text)
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        _own_schema(thing["apiVersion"], thing["kind"], version).validate(thing)
        if version == KUBERNETES[-1]:
            for schema in _real_schemas(thing["apiVersion"], thing["kind"]):
                schema.validate(thing)


@functools.cache
def _real_schemas(api: str, kind: str) -> list[jsonschema.Draft202012Validator]:
    """One of every release whose CustomResourceDefinitions are at hand."""
    group, version = api.split("/")
    found = []
    for path in sorted(REAL.glob(f"*/{kind.lower()}s.yaml*")):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        definition = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]
        (served,) = [each["schema"]["openAPIV3Schema"] for each in definition["versions"] if each["name"] == version]
        assert definition["group"] == group
        found.append(jsonschema.Draft202012Validator(_strict(served)))
    return found


def _strict(schema: object) -> object:
    """The same schema, in which an object has no fields but those that are named, unless it is open on purpose."""
    if isinstance(schema, dict):
        for inside in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
            _strict(inside)
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    return schema


@functools.cache
def _own_schema(api: str, kind: str, version: str) -> jsonschema.Draft202012Validator:
    name = OPERATORS[api]
    custom = yaml.safe_load((CUSTOM / f"{name}.yaml").read_text())
    schema = custom["kinds"][kind] | {"$defs": custom["$defs"]}
    registry = Registry().with_resource(
        "kubernetes", Resource(_definitions(version), referencing.jsonschema.DRAFT202012)
    )
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(version: str) -> dict:
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    return json.loads((folder / f"v{version}-local-strict/_definitions.json").read_text())


def config_of(objects: list[dict], command: str) -> str:
    """The configuration file that the command is started with, of the ConfigMap that its pod mounts."""
    pods = [pod for pod in pod_specs(objects) if any(each["name"] == "config" for each in pod["volumes"])]
    mounted = {volume["configMap"]["name"] for pod in pods for volume in pod["volumes"] if volume["name"] == "config"}
    (found,) = [
        each["data"][f"{command}.yaml"]
        for name, each in all_of_kind(objects, "ConfigMap").items()
        if name in mounted and f"{command}.yaml" in each["data"]
    ]
    return found


def pod_specs(objects: list[dict]) -> list[dict]:
    """Of every pod that these objects lead to."""
    return [template["spec"] for template in templates(objects).values()]


def templates(objects: list[dict]) -> dict[str, dict]:
    """Pod templates by component; those of a batch job's cluster begin with `batch-`."""
    found = {}
    for each in objects:
        spec = each.get("spec", {})
        clusters = (
            [("", spec)]
            if each["kind"] == "RayCluster"
            else [("batch-", spec["rayClusterSpec"])]
            if each["kind"] == "RayJob"
            else []
        )
        for prefix, cluster in clusters:
            found[f"{prefix}head"] = cluster["headGroupSpec"]["template"]
            found |= {prefix + group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
        if each["kind"] == "RayJob":
            found["submitter"] = spec["submitterPodTemplate"]
        if each["kind"] in ("Deployment", "Job"):
            found[spec["template"]["metadata"]["labels"]["app.kubernetes.io/component"]] = spec["template"]
        if each["kind"] == "Pod":
            found["test"] = each
    return found


def containers(pod: dict) -> list[dict]:
    """The chart's own, not those that values add."""
    return [
        each for each in (*pod.get("initContainers", ()), *pod["containers"]) if each["image"].startswith("smcserve")
    ]
