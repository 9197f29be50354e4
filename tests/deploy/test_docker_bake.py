"""The bake file of the images, read as HCL: its targets agree with the Dockerfiles and the chart, and releases are
built from pinned inputs only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import hcl2
import pytest

from tests.deploy.chart import ROOT, containers, render, templates
from tests.deploy.test_docker import DOCKER, instructions

BAKE = DOCKER / "docker-bake.hcl"
PYTHON, CUDA = f"python:3.12.13-slim@sha256:{'0' * 64}", f"nvidia/cuda:13.0.0-base@sha256:{'1' * 64}"
PINS = f"PYTHON_BASE={PYTHON}\nCUDA_BASE={CUDA}\nTORCH_SHA256={'2' * 64}\nJIT_CACHE_SHA256={'3' * 64}\n"


@cache
def bake() -> dict[str, list[dict]]:
    return hcl2.loads(BAKE.read_text())


def blocks(kind: str) -> dict[str, dict]:
    """Return the blocks of a kind by name."""
    parsed = bake()[kind]
    return {name.strip('"'): body for block in parsed for name, body in block.items()}


def evaluated(thing: object, variables: dict[str, str]) -> object:
    """Return `thing` with each `${..}` and each variable name replaced by its value. An unknown name raises
    KeyError."""
    if isinstance(thing, dict):
        return {key: evaluated(inside, variables) for key, inside in thing.items() if key != "__is_block__"}
    if isinstance(thing, list):
        return [evaluated(inside, variables) for inside in thing]
    assert isinstance(thing, str)
    if not thing.startswith('"'):
        return variables[thing]
    return re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], thing[1:-1])


def targets(**environment: str) -> dict[str, dict]:
    """Return the targets of a default build, as `docker buildx bake --print` shows them with these environment
    variables."""
    own = {name: evaluated(body["default"], {}) for name, body in blocks("variable").items()}
    variables = own | {name: value for name, value in environment.items() if name in own}
    every = {name: evaluated(body, variables) for name, body in blocks("target").items()}
    (group,) = blocks("group").values()
    found = {}
    for name in evaluated(group["targets"], variables):
        merged: dict = {}
        for each in (*(every[base] for base in every[name].pop("inherits", ())), every[name]):
            args = merged.get("args", {}) | each.get("args", {})
            merged = merged | each | {"args": args}
        found[name] = merged
    return found


def declared(target: dict) -> dict[str, str]:
    """Return the arguments of a target's Dockerfile, with their defaults."""
    path = ROOT / target["context"] / target["dockerfile"]
    return dict(text.split("=", 1) for _, text in instructions(path, "ARG"))


def test_every_dockerfile_is_built():
    assert {target["dockerfile"] for target in targets().values()} == {
        str(path.relative_to(ROOT)) for path in DOCKER.glob("Dockerfile.*")
    }
    assert all(target["context"] == "." for target in targets().values())


def test_an_image_says_what_is_in_it_and_how_it_was_built():
    for target in targets().values():
        assert target["attest"] == ["type=sbom", "type=provenance,mode=max"]


def test_its_arguments_are_those_of_the_dockerfiles():
    """Arguments have the same defaults as in the Dockerfiles, and every hash and label that a Dockerfile takes is
    given."""
    for name, target in targets().items():
        known = declared(target)
        assert target["args"].items() <= known.items(), (
            f"{name}: an argument that its Dockerfile does not know, or other"
        )
        needed = {argument for argument in known if argument.endswith("_SHA256")}
        assert needed | {"BASE", "VERSION", "REVISION", "CREATED"} == target["args"].keys()


def test_the_chart_installs_what_is_tagged():
    """The chart and the bake file name the same images, with and without a repository."""
    tags = {name: target["tags"] for name, target in targets(REPOSITORY="registry.example/smcserve").items()}
    own = {"image": {"repository": "registry.example/smcserve"}}
    router = {"router": {"enabled": True, "controlKeySecret": "c", **own}}
    installed = {
        device: templates(render({"topology": "pod", "device": device, **own}, router)) for device in ("cpu", "cuda")
    }
    for name, pods in installed.items():
        assert {each["image"] for each in pods["replica"]["spec"]["containers"]} == set(tags[name])
        assert {each["image"] for each in pods["router"]["spec"]["containers"]} == set(tags["router"])
    assert targets()["cpu"]["tags"] == [
        containers(templates(render({"topology": "pod"}))["replica"]["spec"])[0]["image"]
    ]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout with one commit."""
    folder = tmp_path / "checkout"
    (folder / "deploy/docker").mkdir(parents=True)
    (folder / "deploy/docker/release.sh").write_text((DOCKER / "release.sh").read_text())
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    return folder


def release(checkout: Path, kinds: str, pins: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run `release.sh` with a `docker` that prints its arguments and environment as JSON."""
    bin_ = checkout.parent / "bin"
    bin_.mkdir(exist_ok=True)
    (checkout.parent / "pins.env").write_text(pins)
    docker = bin_ / "docker"
    docker.write_text(
        f"#!{sys.executable} -I\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    docker.chmod(0o755)
    command = ["bash", checkout / "deploy/docker/release.sh", kinds, "registry.example/smcserve"]
    environment = os.environ | {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}
    command += [checkout.parent / "pins.env", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("kinds", "pins", "said"),
    [
        ("cpu", "PYTHON_BASE=python:3.12.13-slim-bookworm\n", "PYTHON_BASE='python:3.12.13-slim-bookworm'"),
        ("router", f"PYTHON_BASE=python@sha256:{'0' * 64}\n", "allowed: an image with its digest, NAME:TAG@sha256:.."),
        ("router,cuda", PINS.replace("JIT_CACHE", "OTHER"), "JIT_CACHE_SHA256=''"),
        ("cpu", PINS.replace("2" * 64, "latest"), "TORCH_SHA256='latest'"),
        ("cpu,arm", PINS, "kind 'arm'; allowed: cpu, cuda, router"),
    ],
)
def test_a_release_is_not_built_from_what_may_change(checkout, kinds, pins, said):
    ran = release(checkout, kinds, pins)
    assert ran.returncode == 2 and said in ran.stderr and not ran.stdout


def test_a_release_says_which_commit_it_is(checkout):
    """The image carries the commit's hash and date. A checkout with other files is refused."""
    ran = release(checkout, "cuda,router", PINS, "--push")
    assert ran.returncode == 0, ran.stderr
    arguments, environment = json.loads(ran.stdout)
    assert arguments == ["buildx", "bake", "-f", "deploy/docker/docker-bake.hcl", "--push", "cuda", "router"]
    built = targets(**environment)
    git = ["git", "-C", checkout, "log", "-1", "--format=%H %cI %ct"]
    commit, created, epoch = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split()
    for name, base in (("cuda", CUDA), ("router", PYTHON)):
        assert built[name]["args"].items() >= {"BASE": base, "REVISION": commit, "CREATED": created}.items()
        assert built[name]["tags"] == [f"registry.example/smcserve:{built[name]['args']['VERSION']}-{name}"]
    assert built["cuda"]["args"]["JIT_CACHE_SHA256"] == "3" * 64
    assert environment["SOURCE_DATE_EPOCH"] == epoch, "docker buildx hands it to the build"
    (checkout / "more").touch()
    dirty = release(checkout, "cuda", PINS)
    assert dirty.returncode == 2 and "a release is built from a commit" in dirty.stderr
