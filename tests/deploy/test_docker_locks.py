"""Lock files of the images and of `make install`: complete, checked by hash, and with the tested versions; releases use
pinned bases only."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.chart import ROOT, containers, render, templates
from tests.deploy.test_docker import DOCKER, DOCKERFILES, instructions, with_python

LOCKS = {path.stem: path for path in sorted((DOCKER / "locks").glob("*.txt"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMAGE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "extra": "",
}
PINNED = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}


def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """Return (requirement, hashes) in the order of the lock. Index addresses and paths in it are errors."""
    text = re.sub(r"\s*\\\n\s*", " ", "".join(line for line in LOCKS[name].open() if not line.startswith("#")))
    found = []
    for line in text.splitlines():
        requirement, *hashes = line.split(" --hash=")
        found.append((Requirement(requirement), hashes))
    return found


def installed(name: str) -> dict[str, str]:
    """Return the versions in an image, by canonical name."""
    every = [
        requirement for requirement, _ in locked(name) if not requirement.marker or requirement.marker.evaluate(IMAGE)
    ]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in every}


def needs(requirements: list[str]) -> set[tuple[str, str]]:
    """Return (canonical name, extra) for each requirement that applies in an image; the extra may be empty."""
    asked = [Requirement(each) for each in requirements]
    return {
        (canonicalize_name(each.name), extra)
        for each in asked
        if not each.marker or each.marker.evaluate(IMAGE)
        for extra in ["", *each.extras]
    }


def test_a_lock_has_hashes_and_nothing_but_packages():
    assert LOCKS.keys() == {"build", "cpu", "cuda", "router", "uv", "install", "torch"}
    for name in LOCKS:
        for requirement, hashes in locked(name):
            assert requirement.url is None and re.fullmatch(r"==[^*]+", str(requirement.specifier))
            assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), requirement


def test_locks_hold_the_versions_that_are_tested():
    for name in LOCKS:
        found = installed(name)
        for package in found.keys() & PINNED.keys():
            assert found[package] == PINNED[package], f"{package} in {name}: run python deploy/docker/lock.py"
    torch, jit_cache = (f"torch=={PINNED['torch']}+cpu", f"flashinfer-jit-cache=={PINNED['flashinfer-python']}")
    cpu, cuda = DOCKERFILES
    assert (0, f"TORCH={torch}") in instructions(cpu, "ARG") and (0, f"JIT_CACHE={jit_cache}") in instructions(
        cuda, "ARG"
    )


def test_locks_are_whole():
    """A lock holds the project's requirements and their requirements, as far as these are installed here, and nothing
    that serving does not need."""
    serving = PROJECT["project"]["dependencies"]
    asked = {
        "build": PROJECT["build-system"]["requires"],
        "cpu": serving,
        "cuda": serving + PROJECT["project"]["optional-dependencies"]["gpu"],
    }
    asked |= {"router": ["smg"], "uv": ["uv"], "torch": ["torch"]}
    asked["install"] = serving + PROJECT["project"]["optional-dependencies"]["dev"]
    apart = {"cpu": {"torch"}, "install": {"torch"}, "torch": everything_but("torch")}
    for name, requirements in asked.items():
        found, waiting, seen = installed(name), needs(requirements), set()
        while waiting - seen:
            package, extra = (waiting - seen).pop()
            seen.add((package, extra))
            assert package in found or package in apart.get(name, ()), (
                f"{package} is not in {name}: run python deploy/docker/lock.py"
            )
            try:
                own = importlib.metadata.requires(package) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            chosen = [
                each
                for each in own
                if not (marker := Requirement(each).marker) or marker.evaluate(IMAGE | {"extra": extra})
            ]
            waiting |= needs([re.sub(r";.*", "", each) for each in chosen])
    assert installed("torch").keys() == {"torch"} and installed("uv").keys() == {"uv"}
    assert not {"matplotlib", "pytest", "transformers", "ruff"} & (installed("cpu").keys() | installed("cuda").keys())


def everything_but(name: str) -> set[str]:
    """Return the packages that the lock of `make install` holds, without one."""
    return installed("install").keys() - {name}


def test_what_make_installed_is_locked():
    """torch may be a local build of the locked version."""
    here = default_environment() | {"extra": ""}
    expected = {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for lock in ("install", "torch", "uv")
        for requirement, _ in locked(lock)
        if not requirement.marker or requirement.marker.evaluate(here)
    }
    found = {canonicalize_name(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()}
    both = found.keys() & expected.keys()
    assert len(both) > 100
    assert {name: found[name].split("+")[0] for name in both} == {name: expected[name] for name in both}, (
        "run python deploy/docker/lock.py, then make install"
    )


@pytest.mark.parametrize("wheels", ["", "/srv/wheels"])
def test_make_installs_by_the_locks(wheels):
    """torch's own lock is left out where there are local wheels: the one for CPUs is another file than PyPI's."""
    environment = os.environ | {"PIP_FIND_LINKS": wheels}
    shown = subprocess.run(["make", "-n", "-B", "install"], cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = re.sub(r"\s*\\\n\s*", " ", shown.stdout).splitlines()
    pip, uv = ([line for line in lines if f"{name} install" in line] for name in ("bin/python -m pip", "bin/uv pip"))
    assert len(pip) == len(uv) == 1
    assert pip[0].endswith("--require-hashes -r deploy/docker/locks/uv.txt")
    given = set(re.findall(r"-[bc] \S+/locks/(\w+)\.txt", uv[0]))
    assert given == {"install", "build"} | (set() if wheels else {"torch"})


def test_a_file_with_another_hash_is_not_installed(tmp_path):
    """`make install` gives the locks as constraints."""
    right = wheel(tmp_path / "found", "smc_first")
    for sha256, code in ((right, 0), ("0" * 64, 1)):
        (tmp_path / "lock.txt").write_text(f"smc-first==1 --hash=sha256:{sha256}\n")
        (tmp_path / "plain.txt").write_text("smc-first==1\n")
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "--no-index",
            "--no-cache",
            "--find-links",
            tmp_path / "found",
        ]
        command += ["--target", tmp_path / f"to{code}", "-c", tmp_path / "plain.txt", "-c", tmp_path / "lock.txt"]
        ran = subprocess.run([*command, "smc-first"], capture_output=True, text=True)
        assert ran.returncode == code, ran.stderr
    assert "Hash mismatch" in ran.stderr


def test_the_generator_is_no_newer_than_the_oldest_grpc_that_is_accepted():
    """Generated code does not run with an older grpcio than its generator; every build uses this pinned generator."""
    (generator,) = [each for each in PROJECT["build-system"]["requires"] if each.startswith("grpcio-tools")]
    oldest = [each for each in PROJECT["project"]["dependencies"] if each.startswith("grpcio>=")]
    version = generator.removeprefix("grpcio-tools==")
    assert oldest == [f"grpcio>={version}"] and installed("build")["grpcio-tools"] == version


def wheel(folder: Path, name: str) -> str:
    """Write a wheel whose module holds its name, and return its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        f"{name}.py": f"NAME = {name!r}\n",
        f"{name}-1.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
    }
    files[f"{name}-1.dist-info/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    hashes = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        for path, text in files.items()
    }
    record = (
        "".join(f"{path},sha256={hashes[path]},{len(files[path])}\n" for path in files)
        + f"{name}-1.dist-info/RECORD,,\n"
    )
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in (files | {f"{name}-1.dist-info/RECORD": record}).items():
            archive.writestr(inside, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_dependencies_are_installed_by_their_hashes(tmp_path):
    """Packages of the lock and the one from another index are checked by hash. The new environment contains no build
    tools and finds the application next to it."""
    first = wheel(tmp_path / "found", "smc_first")
    second = wheel(tmp_path / "index/smc-second", "smc_second")
    (tmp_path / "index/smc-second/index.html").write_text('<a href="smc_second-1-py3-none-any.whl">x</a>')
    lock = tmp_path / "lock.txt"
    lock.write_text(f"smc-first==1 --hash=sha256:{first}\n")
    environment = with_python() | {"PIP_FIND_LINKS": str(tmp_path / "found"), "PIP_NO_INDEX": "0"}
    package = ["smc-second==1", (tmp_path / "index").as_uri()]

    def install(sha256: str) -> subprocess.CompletedProcess:
        command = [
            "bash",
            DOCKER / "install_dependencies.sh",
            tmp_path / "venv",
            tmp_path / "app",
            lock,
            *package,
            sha256,
        ]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)

    refused = install("0" * 64)
    assert refused.returncode == 1 and "DO NOT MATCH THE HASHES" in refused.stdout + refused.stderr
    done = install(second)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "app").mkdir()
    (tmp_path / "app/smc_application.py").touch()
    python = tmp_path / "venv/bin/python"
    said = subprocess.run(
        [python, "-c", "import smc_first, smc_second, smc_application; print(smc_second.NAME)"],
        capture_output=True,
        text=True,
    )
    assert said.stdout == "smc_second\n" and not (tmp_path / "venv/bin/pip").exists()


NVRM = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)\n"
    "GCC version: 12.3.0\n"
)


@pytest.mark.parametrize(
    ("version", "code"), [("580.65.06", 0), ("590.1", 0), ("570.124.06", 1), ("535.54.03", 1), (None, 0)]
)
def test_a_driver_that_is_too_old_is_named(version, code, tmp_path):
    told = tmp_path / "version"
    if version:
        told.write_text(NVRM.format(version))
    command = ["bash", DOCKER / "check_driver.sh", "echo", "a  b"]
    ran = subprocess.run(command, env=os.environ | {"NVIDIA_VERSION_FILE": str(told)}, capture_output=True, text=True)
    assert ran.returncode == code
    assert ran.stdout == "" if code else ran.stdout == "a  b\n"
    assert not code or f"is {version}; this image needs R580 or newer" in ran.stderr


def test_every_gpu_pod_looks_at_the_driver_first():
    """This holds for containers that use the image's entry point, and for Ray's, which do not."""
    assert instructions(DOCKER / "Dockerfile.cuda", "ENTRYPOINT") == [(2, '["tini", "--", "check-driver", "smcserve"]')]
    assert any(
        text.endswith("check_driver.sh /usr/local/bin/check-driver")
        for _, text in instructions(DOCKER / "Dockerfile.cuda", "COPY")
    )
    pods = templates(render("values-8b"))
    for side in ("draft", "target"):
        assert containers(pods[side]["spec"])[0]["command"][0] == "check-driver"
