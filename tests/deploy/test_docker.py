"""The images: rules for Dockerfiles, and their build steps, which are scripts and run here."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import probe
from tests.deploy.chart import CHART, ROOT

DOCKER = ROOT / "deploy/docker"
DOCKERFILES = [DOCKER / "Dockerfile.cpu", DOCKER / "Dockerfile.cuda"]
"""The images of the service; the router's image contains no code of ours."""
BIN = Path(sys.executable).parent
BUILD_TOOLS = {
    "gcc",
    "g++",
    "make",
    "build-essential",
    "git",
    "python3-dev",
    "python3-venv",
    "python3-pip",
    "libc6-dev",
}


def with_python() -> dict[str, str]:
    """Return an environment in which `python3` is the interpreter from which this environment was made."""
    return os.environ | {
        "PATH": f"{Path(sys.base_prefix, 'bin')}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_COMPILE": "1",
    }


def instructions(path: Path, name: str) -> list[tuple[int, str]]:
    """Return stage and text of every instruction of this name, with continued lines joined."""
    stage, found = -1, []
    for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", path.read_text())).splitlines():
        stage += line.startswith("FROM ")
        if line.startswith(f"{name} "):
            found.append((stage, line.removeprefix(name).strip()))
    return found


@pytest.mark.parametrize("path", sorted(DOCKER.glob("Dockerfile.*")), ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    linted = subprocess.run([BIN / "hadolint", path], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("path", [*DOCKER.glob("*.sh"), *CHART.glob("files/scripts/*.sh")], ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    linted = subprocess.run([BIN / "shellcheck", path], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_final_image_is_unprivileged_without_build_tools(path):
    (base,) = [text for _, text in instructions(path, "ARG") if text.startswith("BASE=")]
    assert re.fullmatch(r"BASE=[a-z/]+:\d+\.\d+\.\d+-[a-z0-9.-]+", base), "a base of a full version"
    assert [text for _, text in instructions(path, "FROM")] == [
        "${BASE} AS dependencies",
        "dependencies AS application",
        "${BASE}",
    ]
    assert (2, "1000:1000") in instructions(path, "USER")
    packages = {word for stage, text in instructions(path, "RUN") if stage == 2 for word in text.split()}
    assert not packages & BUILD_TOOLS
    assert {"tini", "wget"} <= packages, "what KubeRay and the entry point need"
    (health,) = instructions(path, "HEALTHCHECK")
    assert health[1].endswith(f'CMD ["python3", "-m", "{probe.__name__}"]')


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_change_of_the_code_leaves_the_layer_of_its_dependencies(path):
    """Neither the dependencies' stage nor the layers copied from it depend on the checkout, except for the lock and the
    scripts that read it."""
    copied = [text.split()[:-1] for stage, text in instructions(path, "COPY") if stage == 0]
    lock = f"deploy/docker/locks/{path.suffix[1:]}.txt"
    assert copied and all(source.startswith("deploy/docker/") for sources in copied for source in sources)
    assert [source for sources in copied for source in sources if "locks/" in source] == [lock] and (
        ROOT / lock
    ).exists()
    final = [text.split()[0] for stage, text in instructions(path, "COPY") if stage == 2 and "--from" in text]
    assert final.index("--from=dependencies") < final.index("--from=application")


@pytest.mark.parametrize("path", sorted(DOCKER.glob("Dockerfile.*")), ids=lambda path: path.name)
def test_an_image_says_what_it_is(path):
    final = len(instructions(path, "FROM")) - 1
    (labels,) = [text for stage, text in instructions(path, "LABEL") if stage == final]
    assert set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels)) == {
        *("title", "description", "version", "revision", "created", "licenses")
    }  # fmt: skip
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert (final, f"VERSION={version}") in instructions(path, "ARG")


def test_versions_agree():
    """The chart installs the image of its own version, and names the Ray version that is pinned, by which KubeRay
    chooses its probes."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"\nappVersion: {version}\n" in (CHART / "Chart.yaml").read_text()
    (pinned,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"\n  version: {pinned}\n" in (CHART / "values.yaml").read_text()


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Path:
    """The build context that `docker build` would send: files of the checkout that .dockerignore allows."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    kept, dropped = (
        [rule[1:] for rule in rules if rule.startswith("!")],
        [rule for rule in rules[1:] if not rule.startswith("!")],
    )
    assert rules[0] == "*"

    def ignore(folder: str, names: list[str]) -> list[str]:
        paths = {name: Path(folder, name).relative_to(ROOT).as_posix() for name in names}
        return [
            name
            for name, path in paths.items()
            if any(fnmatch.fnmatch(path, rule.replace("**/", "*")) for rule in dropped)
        ]

    target = tmp_path_factory.mktemp("context")
    for name in kept:
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copy, ignore=ignore) if source.is_dir() else shutil.copy2(source, copy)
    return target


@pytest.mark.slow
def test_the_application_is_built_out_of_the_build_context(context, tmp_path):
    """Runs the build step of every image, with this test's environment as the one that holds the dependencies."""
    assert not list((context / "services/pb").glob("*_pb2.py")), "generated code is made by the build, not copied"
    for path in DOCKERFILES:
        assert any(
            "deploy/docker/install_application.sh /opt/smcserve/venv" in text for _, text in instructions(path, "RUN")
        )
    app = tmp_path / "app"
    command = ["bash", context / "deploy/docker/install_application.sh", sys.prefix, app]
    built = subprocess.run(command, env=with_python(), capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    elsewhere = os.environ | {"PYTHONPATH": str(app)}
    info = (
        "import services.pb.generation_pb2 as pb, smc.demo as demo; "
        "print(pb.__file__, demo.TARGET, demo.TARGET.is_dir())"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", info], env=elsewhere, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    code, model, there = found.stdout.split()
    assert Path(code).is_relative_to(app) and Path(model).is_relative_to(app) and there == "True"
    helped = subprocess.run(
        [app / "bin/smcserve", "serve", "--help"], env=elsewhere, cwd=tmp_path, capture_output=True, text=True
    )
    assert helped.returncode == 0 and "--draft-resource" in helped.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler, as the build stage has")
def test_triton_finds_its_driver_where_there_is_no_compiler(tmp_path):
    pytest.importorskip("triton", reason="triton is installed on x86-64 Linux only")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, DOCKER / "build_triton_driver.py"], env=environment, check=True, capture_output=True
    )
    asked = (
        "from pathlib import Path; from triton.backends import nvidia; from triton.runtime import build;"
        "build._load_module_from_path = lambda name, path: print(path);"
        "build.compile_module_from_src((Path(nvidia.__path__[0]) / 'driver.c').read_text(), 'cuda_utils')"
    )
    found = subprocess.run(
        [sys.executable, "-c", asked], env=environment | {"PATH": ""}, check=True, capture_output=True, text=True
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)
