"""The release workflow: valid by GitHub's schema, its scripts pass shellcheck, its references exist, and it has no more
rights than it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import CHART, ROOT
from tests.deploy.test_docker_bake import targets

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
JOBS = RELEASE["jobs"]
BIN = Path(sys.executable).parent


def schema_says(path: Path) -> subprocess.CompletedProcess:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", path]
    return subprocess.run(command, capture_output=True, text=True)


def steps() -> list[tuple[str, dict]]:
    """Return all steps with the names of their jobs."""
    return [(name, step) for name, job in JOBS.items() for step in job["steps"]]


def test_it_is_a_workflow(tmp_path):
    for path in WORKFLOWS:
        said = schema_says(path)
        assert said.returncode == 0, said.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert schema_says(wrong).returncode == 1


@pytest.mark.parametrize(("job", "step"), [each for each in steps() if "run" in each[1]])
def test_its_scripts_are_sound(job, step):
    """Scripts are checked as bash. They use variables of GitHub and of the step only, and no expression is pasted into
    them."""
    assert "${{" not in step["run"].replace("{{ json", ""), f"{job}: give it by `env`, or a tag's name could be run"
    command = [BIN / "shellcheck", "--shell=bash", "--severity=style", "-"]
    linted = subprocess.run(command, input=step["run"], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)\b", step["run"]))
    known = {"GITHUB_REF_NAME", "GITHUB_OUTPUT", "GITHUB_ACTOR", "GITHUB_REPOSITORY", "GITHUB_REPOSITORY_OWNER"}
    assert used <= known | {"RUNNER_TEMP"} | step.get("env", {}).keys()


def test_what_it_uses_is_pinned_and_its_rights_are_few():
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]) for _, step in steps() if "uses" in step)
    assert RELEASE["permissions"] == {"contents": "read"}
    writing = {name for name, job in JOBS.items() if "write" in job.get("permissions", {}).values()}
    assert writing == {"images", "chart"}
    assert all(job["permissions"] == {"contents": "read", "packages": "write"} for job in map(JOBS.get, writing))


def test_jobs_run_in_order_and_read_outputs_that_there_are():
    for name, job in JOBS.items():
        needs = {job["needs"]} if isinstance(job.get("needs", []), str) else set(job.get("needs", []))
        assert needs <= JOBS.keys()
        for other, output in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", str(job)):
            assert other in needs and output in JOBS[other]["outputs"], name
        ids = {step["id"] for step in job["steps"] if "id" in step}
        assert set(re.findall(r"steps\.(\w+)\.", str(job))) <= ids
    assert JOBS["images"]["needs"] == "gate" and set(JOBS["chart"]["needs"]) == {"gate", "images"}


def test_it_publishes_every_image():
    assert JOBS["images"]["strategy"]["matrix"]["kind"] == list(targets())
    (build,) = [step["run"] for _, step in steps() if "release.sh" in step.get("run", "")]
    assert (ROOT / "deploy/docker/release.sh").stat().st_mode & 0o100, "it is run by its name"
    assert "--push" in build and (ROOT / ".ci/run").exists()


@pytest.mark.parametrize(("tag", "fits"), [(None, True), ("v9.9.9", False)])
def test_a_tag_must_be_the_version(tag, fits, tmp_path):
    """Runs the step's script."""
    (script,) = [step["run"] for _, step in steps() if step.get("id") == "version"]
    version = re.findall(r"^version: (.+)$", (CHART / "Chart.yaml").read_text(), re.MULTILINE)[0]
    output = tmp_path / "output"
    environment = os.environ | {"GITHUB_REF_NAME": tag or f"v{version}", "GITHUB_OUTPUT": str(output)}
    ran = subprocess.run(["bash", "-eo", "pipefail", "-c", script], env=environment, cwd=ROOT, capture_output=True)
    assert (ran.returncode == 0) is fits
    assert not fits or output.read_text() == f"version={version}\n"
