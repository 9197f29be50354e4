"""The packaged chart: its copies of other files are identical to them, the package renders the same objects, and a
package that lacks a file reports it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import helm_python
import pytest
import yaml

from tests.deploy.chart import CHART, ROOT, all_of_kind, of_kind, pod_specs, render

# A single process renders each variant of the chart once.
pytestmark = pytest.mark.xdist_group("chart")

EVERYTHING = {"monitoring": {"serviceMonitor": True, "rules": True, "dashboards": True}}
FILES = sorted(path.relative_to(CHART).as_posix() for path in CHART.glob("files/**/*") if path.is_file())


def test_generated_files_are_current(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location("generate", CHART / "generate.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    for path, text in made.generated().items():
        assert path.read_text() == text, f"{path.name}: run python deploy/helm/smcserve/generate.py"
    assert {path.relative_to(CHART).as_posix() for path in made.generated()} - {"README.md", "values.schema.json"} == {
        name for name in FILES if "/scripts/" not in name
    }


def test_the_chart_has_no_links():
    """Flux and others drop symbolic links."""
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]


def test_a_package_renders_the_same(tmp_path):
    helm_python.Chart.load(CHART).save(tmp_path)
    (archive,) = tmp_path.glob("*.tgz")
    shutil.unpack_archive(archive, tmp_path)
    unpacked = tmp_path / "smcserve"
    assert render(EVERYTHING, chart=helm_python.Chart.load(unpacked)) == render(EVERYTHING)
    assert not list(unpacked.glob("*.py")) and (unpacked / "values.schema.json").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_chart_that_lost_a_file_says_so(name, tmp_path):
    copy = tmp_path / "smcserve"
    shutil.copytree(CHART, copy)
    (copy / name).unlink()
    with pytest.raises(
        ValueError, match=f"the chart is not whole: {re.escape(name)} is missing or empty; get it again"
    ):
        render(EVERYTHING, chart=helm_python.Chart.load(copy))


def test_rules_and_dashboards_are_those_of_the_repository():
    objects = render(EVERYTHING)
    files = [ROOT / "deploy/prometheus/rules.yml", ROOT / "deploy/prometheus/alerts.yml"]
    groups = of_kind(objects, "PrometheusRule")["spec"]["groups"]
    assert groups == [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    found = {}
    for each in all_of_kind(objects, "ConfigMap").values():
        if each.get("immutable"):  # configuration of a command
            continue
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        found |= each["data"]
    dashboards = {Path(path).name: path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
    assert dashboards and {name: json.loads(text) for name, text in found.items()} == {
        name: json.loads(text) for name, text in dashboards.items()
    }


ROUTED = {"topology": "pod", "router": {"enabled": True, "controlKeySecret": "control"}}


def test_a_release_writes_its_repository_into_the_chart(tmp_path):
    """The published chart needs no values; its default counts as unchanged, and its README shows it."""
    copy = tmp_path / "smcserve"
    shutil.copytree(CHART, copy)
    repository = "ghcr.io/someone/smcserve"
    subprocess.run([ROOT / "deploy/helm/set_repository.sh", copy, repository], check=True)
    images = set()
    for layer in ({}, ROUTED):
        objects = rendered(helm_python.Chart.load(copy), layer)
        images |= {each["image"] for pod in pod_specs(objects) for each in pod["containers"]}
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert images == {f"{repository}:{version}-cpu", f"{repository}:{version}-router"}
    assert f'| `image.repository` | `"{repository}"` |' in (copy / "README.md").read_text()


def rendered(chart: helm_python.Chart, layer: dict) -> list[dict]:
    """Render exactly these values, without an image."""
    texts = [text for path, text in chart.render(layer, name="demo", namespace="llm").items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]
