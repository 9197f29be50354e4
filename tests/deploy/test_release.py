"""The workflows: valid by GitHub's schema, their scripts pass shellcheck, their references exist, and they have no more
rights than they need. What is published is signed; pull requests run the gate."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import CHART, ROOT
from tests.deploy.test_docker_bake import targets

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
GATE = yaml.safe_load((ROOT / ".github/workflows/gate.yml").read_text())
JOBS = RELEASE["jobs"]
BIN = Path(sys.executable).parent


def schema_says(path: Path) -> subprocess.CompletedProcess:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", path]
    return subprocess.run(command, capture_output=True, text=True)


def steps(*workflows: dict) -> list[tuple[str, dict]]:
    """Return all steps with the names of their jobs; without arguments those of the release."""
    return [
        (name, step) for each in workflows or (RELEASE,) for name, job in each["jobs"].items() for step in job["steps"]
    ]


def test_it_is_a_workflow(tmp_path):
    for path in WORKFLOWS:
        said = schema_says(path)
        assert said.returncode == 0, said.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert schema_says(wrong).returncode == 1


@pytest.mark.parametrize(("job", "step"), [each for each in steps(RELEASE, GATE) if "run" in each[1]])
def test_its_scripts_are_sound(job, step):
    """Scripts are checked as bash. They use variables of GitHub and of the step only, and no expression is pasted into
    them."""
    assert "${{" not in step["run"].replace("{{ json", ""), f"{job}: give it by `env`, or a tag's name could be run"
    command = [BIN / "shellcheck", "--shell=bash", "--severity=style", "-"]
    linted = subprocess.run(command, input=step["run"], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)\b", step["run"]))
    known = {"GITHUB_REF_NAME", "GITHUB_OUTPUT", "GITHUB_ACTOR", "GITHUB_REPOSITORY", "GITHUB_REPOSITORY_OWNER"}
    assert used <= known | {"RUNNER_TEMP", "GITHUB_WORKFLOW_REF"} | step.get("env", {}).keys()


def test_what_it_uses_is_pinned_and_its_rights_are_few():
    assert all(
        re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]) for _, step in steps(RELEASE, GATE) if "uses" in step
    )
    assert RELEASE["permissions"] == GATE["permissions"] == {"contents": "read"}
    assert not [name for name, job in GATE["jobs"].items() if "permissions" in job]
    writing = {name for name, job in JOBS.items() if "write" in job.get("permissions", {}).values()}
    assert writing == {"images", "chart"}
    rights = {"contents": "read", "packages": "write", "id-token": "write"}
    assert all(JOBS[name]["permissions"] == rights for name in writing)


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


def test_pull_requests_run_the_gate_with_every_python_that_is_supported():
    """With the oldest Python that pyproject.toml accepts, and that of the images."""
    # YAML reads the key `on` as true.
    assert "pull_request" in GATE[True] and "pull_request_target" not in GATE[True], "a fork's code gets no rights"
    (job,) = GATE["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    (python,) = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert python == "${{ matrix.python }}"
    oldest = re.search(r'requires-python = ">=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    image = re.search(r"python:(\d+\.\d+)", (ROOT / "deploy/docker/Dockerfile.cpu").read_text())
    assert job["strategy"]["matrix"]["python"] == [oldest[1], image[1]]


def commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in JOBS[job]["steps"])


@pytest.mark.parametrize(("job", "name"), [("images", "image"), ("chart", "chart")])
def test_what_is_published_is_signed_by_its_digest(job, name, tmp_path):
    """Runs the signing lines of each job with a stand-in for cosign: they sign and verify the digest of what was
    pushed, not a tag, which could have been moved."""
    if not shutil.which("jq"):
        pytest.skip("the workflow's machine has jq, this one has not")
    assert any("cosign-installer@" in step.get("uses", "") for step in JOBS[job]["steps"])
    lines = commands(job).splitlines()
    first = next(number for number, line in enumerate(lines) if re.match(r"(digest|chart)=", line))
    script = "\n".join(["charts=ghcr.io/someone/charts", *lines[first:]])
    digest = f"sha256:{'7' * 64}"
    (tmp_path / "built.json").write_text(json.dumps({"cpu": {"containerimage.digest": digest}}))
    (tmp_path / "pushed").write_text(f"Pushed: ghcr.io/someone/charts/smcserve:0.1.0\nDigest: {digest}\n")
    (tmp_path / "cosign").write_text('#!/bin/bash\nprintf "%s\\n" "$*" >> "$RUNNER_TEMP/calls"\n')
    (tmp_path / "cosign").chmod(0o755)
    workflow = "Someone/Smcserve/.github/workflows/release.yml@refs/tags/v0.1.0"
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path),
        "KIND": "cpu",
        "GITHUB_REPOSITORY": "Someone/Smcserve",
        "GITHUB_WORKFLOW_REF": workflow,
    }
    ran = subprocess.run(["bash", "-eo", "pipefail", "-c", script], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    there = {"image": "ghcr.io/someone/smcserve", "chart": "ghcr.io/someone/charts/smcserve"}[name]
    sign, verify = (tmp_path / "calls").read_text().splitlines()
    assert sign == f"sign --yes {there}@{digest}"
    assert verify.startswith("verify ") and f"--certificate-identity https://github.com/{workflow} " in verify
    assert verify.endswith(f" {there}@{digest}")


def test_the_published_chart_names_the_images_of_its_release():
    script = commands("chart")
    assert script.index("set_repository.sh") < script.index("helm package") < script.index("helm push")
