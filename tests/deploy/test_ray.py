"""Draft and target on separate machines, with the gateway started and drained as in a pod; and the files for `ray
up`."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest
import yaml

from services.client import Client
from smc import demo
from smc.local_engine import ModelPair
from tests.deploy.chart import CHART, ROOT
from tests.deploy.machines import BIN, Machines
from tests.ports import free_ports
from tests.service.asked import LOCKSTEP, all_are_the_engines_own, engines_own

pytestmark = pytest.mark.xdist_group("ray")

DRAFT = "127.0.0.2"
DEGREES = ("--draft-tp=2", "--target-tp=2")
RESOURCES = ("--draft-resource=smc_draft", "--target-resource=smc_target")
RAY = ROOT / "deploy/ray"
SCRIPTS = CHART / "files/scripts"
PATIENCE = 120
"""Seconds; a busy machine must not fail the test."""


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> Iterator[Machines]:
    machines = Machines(tmp_path_factory.mktemp("machines"))
    try:
        machines.start("smc_target", "smc_draft")
        yield machines
    finally:
        machines.stop()


@pytest.mark.slow
def test_every_rank_is_where_it_belongs_until_the_gateway_is_drained(machines: Machines, tmp_path):
    """As in the head pod, the gateway finds the Ray node by a port of 127.0.0.1, and Ray outlives the gateway. Answers
    equal those of an engine in this process: over gRPC, in lockstep, with two ranks for each model.
    tests/coordinator/test_same_answers.py does the same with threads."""
    (port, http_port), lock = free_ports(2), tmp_path / "gateway.lock"
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump(LOCKSTEP))
    options = (f"--port={port}", f"--http-port={http_port}", f"--config={config}", "--link=grpc", *DEGREES, *RESOURCES)
    gateway = machines.run("gateway", "bash", SCRIPTS / "gateway.sh", machines.address, lock, *options)
    answers = engines_own(ModelPair.load(demo.TARGET, demo.DRAFT), LOCKSTEP)
    try:
        with Client(f"127.0.0.1:{port}") as client:
            machines.until(lambda: gateway.poll() is not None or serving(client), PATIENCE, "the gateway is not ready")
            assert gateway.poll() is None, machines.log("gateway").read_text()
            ranks = machines.named("draft") | machines.named("target")
            (head,) = machines.named("coordinator").values()
            assert head != DRAFT and sorted(ranks.values()) == sorted([DRAFT, DRAFT, head, head])
            (name,) = re.findall(r"process=\$\{2:-(\S+)\}", (SCRIPTS / "drain-worker.sh").read_text())
            assert all(psutil.Process(pid).cmdline()[0].startswith(name) for pid in ranks), (
                "what drain-worker.sh waits for"
            )
            all_are_the_engines_own(client, http_port, answers)

            drain = subprocess.Popen(["bash", SCRIPTS / "drain-head.sh", str(PATIENCE), lock])
            with client.stream("Count.", max_tokens=40, ignore_eos=True, seed=1) as stream:
                next(iter(stream))
                gateway.terminate()
                assert drain.poll() is None, "Ray's head must not be stopped while a call is in flight"
                for _ in stream:
                    pass
            assert stream.completion.usage.completion_tokens == 40
        assert gateway.wait(PATIENCE) == 0 and drain.wait(PATIENCE) == 0
        machines.until(lambda: not machines.named(""), PATIENCE, "ranks are left")
    finally:
        gateway.kill()
        gateway.wait()


def serving(client: Client) -> bool:
    try:
        return client.health() == "SERVING"
    except Exception:  # the server does not listen yet
        time.sleep(0.2)
        return False


@pytest.mark.slow
def test_a_resource_that_no_machine_has(machines: Machines):
    command = [
        BIN / "smcserve",
        "serve",
        "--ray-address",
        machines.address,
        "--port=0",
        "--draft-resource=smc_darft",
        "--start-timeout=1",
    ]
    assert machines.run("lost", *command).wait(PATIENCE) == 1
    said = machines.log("lost").read_text()
    assert (
        "no host of the cluster has the resource 'smc_darft'; start one with: "
        "ray start --resources='{\"smc_darft\": 1}'" in said
    ), said
    assert "never awaited" not in said, "the gateway was not stopped"


@pytest.mark.parametrize("name", ["local", "aws"])
def test_files_for_ray_up(name):
    """Ray's own check accepts the files, and `ray start` knows the flags of every node's start command."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((RAY / f"{name}.yaml").read_text())
    validate_config(prepare_config(config))
    for command in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"]):
        check_ray_start(command)


def test_the_walk_through_has_flags_that_ray_knows():
    lines = [line for line in (RAY / "README.md").read_text().splitlines() if line.startswith("ray start ")]
    assert [check_ray_start(line)["resources"] for line in lines] == ["{}", '{"smc_draft": 1}', '{"smc_target": 1}']


def check_ray_start(command: str) -> dict:
    """Parse the `ray start` in a command with Ray's own parser; empty if it has none."""
    from ray.scripts import scripts  # a second, which not every process of tests needs

    *_, last = command.split("; ")
    program, verb, *arguments = shlex.split(last)
    assert program == "ray"
    return scripts.start.make_context("start", arguments).params if verb == "start" else {}


def test_worker_declares_its_resources(tmp_path):
    """Runs the command that `ray up` runs on every worker, with a fake `ray`."""
    *_, command = yaml.safe_load((RAY / "local.yaml").read_text())["worker_start_ray_commands"]
    resources, ray = tmp_path / "resources", tmp_path / "ray"
    resources.write_text('{"smc_draft": 1}\n')
    ray.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    ray.chmod(0o755)
    command = command.replace("/etc/smcserve-resources", str(resources)).replace("ulimit -n 65536", "true")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HEAD_IP": "192.0.2.10"}
    said = subprocess.run(["bash", "-c", command], env=environment, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == ["start", "--address=192.0.2.10:6379", '--resources={"smc_draft": 1}']
