"""Renders the chart, and checks every object against schemas in which an unknown field is an error."""

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
"""Schema files by API version."""
KUBERNETES = ("1.29.0", kubernetes_validate.latest_version())
"""An old version that is still in use, and the newest that the validator knows."""
IMAGE = {"image": {"repository": "smcserve"}}
"""The value that every installation must give."""


@functools.cache
def this_chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def values(*layers: str | Path | dict) -> dict[str, Any]:
    """Merge layers of values over IMAGE, as `helm -f` does. A layer is the name of a profile, a file, or a mapping."""
    merged: dict[str, Any] = IMAGE
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
    """Return every object as Helm would send it. Raises ValueError with Helm's message if it refuses the values."""
    given = json.dumps(values(*layers))
    return pickle.loads(_rendered(given, name) if chart is None else _rendered_of(chart, given, name))


@functools.cache
def _rendered(given: str, name: str) -> bytes:
    """Cached, because tests often render the same values; pickled, because tests modify the result."""
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
    """Return the only object of a kind."""
    (found,) = all_of_kind(objects, kind).values()
    return found


def all_of_kind(objects: list[dict], kind: str) -> dict[str, dict]:
    """Return the objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def check(thing: dict, version: str) -> None:
    """Raise an exception if Kubernetes `version`, or the operator that owns the object, would refuse it or not know a
    field."""
    _check(json.dumps(thing, sort_keys=True), version)


@functools.cache
def _check(text: str, version: str) -> None:
    """Cached, because variants of the chart have most objects in common."""
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
    """Return one schema for every release whose CustomResourceDefinitions are available."""
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
    """Return the schema with unknown fields forbidden in every object that is not open on purpose."""
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
    """Return the configuration file of a command, from the ConfigMap that its pod mounts."""
    pods = [pod for pod in pod_specs(objects) if any(each["name"] == "config" for each in pod["volumes"])]
    mounted = {volume["configMap"]["name"] for pod in pods for volume in pod["volumes"] if volume["name"] == "config"}
    (found,) = [
        each["data"][f"{command}.yaml"]
        for name, each in all_of_kind(objects, "ConfigMap").items()
        if name in mounted and f"{command}.yaml" in each["data"]
    ]
    return found


def pod_specs(objects: list[dict]) -> list[dict]:
    """Return the specification of every pod that these objects create."""
    return [template["spec"] for template in templates(objects).values()]


def templates(objects: list[dict]) -> dict[str, dict]:
    """Return pod templates by component; those of a batch job's cluster begin with `batch-`."""
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
    """Return the chart's own containers, without those that values add."""
    return [
        each for each in (*pod.get("initContainers", ()), *pod["containers"]) if each["image"].startswith("smcserve")
    ]
