"""Checks, data types and derived settings of WorkerGroupConfig."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from services.launch import cluster
from services.launch.config import WorkerGroupConfig, count_worker_groups
from services.launch.worker_group import coordinator_spec
from services.link.connect import Rendezvous
from smc.api.engine_config import MAX_PAGES, EngineConfig
from smc.calibration.latency import BRIEF, THOROUGH, Effort
from tests.model.int4 import to_int4
from tests.model.tiny import save_tiny


@pytest.mark.parametrize("field", ["start_timeout", "link_timeout", "heartbeat"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_time_limits_are_positive(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}; allowed: above 0"):
        WorkerGroupConfig(**{field: value})


def test_each_model_has_its_own_type():
    """The dtype of a model is its own setting, otherwise the common one, otherwise the default of the device."""
    assert WorkerGroupConfig().dtypes == {"target": "float32", "draft": "float32"}
    assert WorkerGroupConfig(device="cuda", target_dtype="fp8").dtypes == {"target": "fp8", "draft": "bfloat16"}
    assert WorkerGroupConfig(dtype="fp8", draft_dtype="float16").dtypes == {"target": "fp8", "draft": "float16"}


def test_a_model_that_is_stored_in_int4_stays_so_on_a_gpu(tmp_path):
    """A model stored in int4 is loaded as int4 on a GPU, unless a dtype is given or its quantization groups are not of
    consecutive inputs."""
    for directory, layout, act_order in (("draft", "awq", False), ("ordered", "gptq", True)):
        to_int4(save_tiny(tmp_path / directory, hidden_size=64), layout, 32, act_order=act_order)
    of_draft = {"draft": tmp_path / "draft", "target": tmp_path / "ordered"}
    assert WorkerGroupConfig(device="cuda", **of_draft).dtypes == {"target": "bfloat16", "draft": "int4"}
    assert WorkerGroupConfig(device="cuda", dtype="fp8", **of_draft).dtypes == {"target": "fp8", "draft": "fp8"}
    assert WorkerGroupConfig(**of_draft).dtypes == {"target": "float32", "draft": "float32"}


@pytest.mark.parametrize("field", ["dtype", "target_dtype", "draft_dtype"])
def test_unknown_dtypes(field):
    with pytest.raises(ValueError, match=f"{field}='int8'; allowed: float32, bfloat16, float16, fp8, int4"):
        WorkerGroupConfig(**{field: "int8"})


@pytest.mark.parametrize("field", ["target_resource", "draft_resource"])
@pytest.mark.parametrize("value", ["", " ", "GPU", "memory"])
def test_resources_of_hosts_are_custom_ones(field, value):
    """`target_resource` and `draft_resource` accept only custom resources of Ray."""
    with pytest.raises(ValueError, match=f"{field}='{value}'; allowed: a name of `ray start --resources`, none of CPU"):
        WorkerGroupConfig(**{field: value})


@pytest.mark.parametrize(
    ("link", "device", "outlives"),
    [("nccl", "cpu", True), ("grpc", "cpu", True), ("grpc", "cuda", True), ("nccl", "cuda", False)],
)
def test_where_a_target_can_go_on_without_its_draft(link, device, outlives):
    """The target outlives its draft except with NCCL on GPUs: an NCCL communicator cannot be closed without ending the
    operations that wait in it."""
    assert WorkerGroupConfig(link=link, device=device).outlives_draft is outlives
    lockstep = EngineConfig(form="lockstep")
    assert not WorkerGroupConfig(link=link, device=device, engine=lockstep, placement="shared").outlives_draft


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"engine": EngineConfig()}, "form='lookahead' with placement='shared'; allowed: form lockstep"),
        ({"target_tp": 3, "draft_tp": 2}, "draft_tp=2 with placement='shared' and target_tp=3; allowed: 3, or 1"),
        ({"draft_resource": "small"}, "draft_resource='small' has no effect with placement='shared'"),
        ({"placement": "near"}, "placement='near'; allowed: apart, shared"),
    ],
)
def test_what_shared_ranks_cannot_do(settings, what):
    with pytest.raises(ValueError, match=re.escape(what)):
        WorkerGroupConfig(**{"placement": "shared", "engine": EngineConfig(form="lockstep")} | settings)


def test_where_shared_ranks_choose_their_part_of_the_draft():
    """Not with one order of sums: answers of SMC would depend on the times of a start."""

    def chooses(numerics: str = "fastest", **settings) -> bool:
        engine = EngineConfig(form="lockstep", numerics=numerics)
        given = {"device": "cuda", "placement": "shared", "target_tp": 2, "engine": engine} | settings
        return WorkerGroupConfig(**given).may_divide_draft

    assert chooses() and not chooses(draft_tp=1) and not chooses(draft_tp=2) and not chooses("invariant")
    assert not chooses(target_tp=1)


def test_a_model_has_at_least_one_rank():
    for field in ("draft_tp", "target_tp"):
        with pytest.raises(ValueError, match=f"{field}=0"):
            WorkerGroupConfig(**{field: 0}).serving_pair()


@pytest.mark.parametrize(("device", "effort"), [("cpu", BRIEF), ("cuda", THOROUGH)])
def test_models_are_timed_where_that_decides(device, effort):
    """Models are timed at start unless drafting is `always`: briefly on CPUs, thoroughly on GPUs."""

    def timing(**engine) -> Effort | None:
        config = WorkerGroupConfig(device=device, engine=EngineConfig(**engine))
        return coordinator_spec(config, config.serving_pair(), Rendezvous("host", 1, 1, "secret", "grpc", 1.0)).timing

    assert timing() is effort and timing(drafting="always") is None
    with pytest.raises(ValueError, match="drafting='never'; allowed: adaptive, always"):
        EngineConfig(drafting="never")


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"worker_groups": 0}, "worker_groups=0; allowed: >= 1, or auto"),
        ({"worker_groups": True}, "worker_groups=True; allowed: >= 1, or auto"),
        ({"worker_groups": "two"}, "worker_groups='two'; allowed: >= 1, or auto"),
        ({"worker_groups": 2, "trace": Path("t.json")}, "worker_groups=2; allowed: worker_groups 1, or no trace"),
        ({"worker_groups": 3, "engine": EngineConfig(max_queue=2)}, "max_queue=2 with worker_groups=3; allowed: at "),
    ],
)
def test_what_worker_groups_there_may_be(settings, allowed):
    with pytest.raises(ValueError, match=re.escape(allowed)):
        WorkerGroupConfig(**settings)


def test_as_many_worker_groups_as_fit(monkeypatch):
    """`auto` counts free GPUs, host by host, and is 1 if there are too few for one. On CPUs a service has one worker
    group, a batch as many as its caller says."""
    hosts = {"a": {"CPU": 64.0, "GPU": 3.0}, "b": {"CPU": 64.0, "GPU": 8.0}, "c": {"CPU": 64.0}}
    monkeypatch.setattr(cluster, "available_resources_per_node", lambda: hosts)
    shared = {"placement": "shared", "engine": EngineConfig(form="lockstep")}

    def counted(**settings) -> int:
        return count_worker_groups(WorkerGroupConfig(**{"device": "cuda", "worker_groups": "auto"} | settings))

    assert (counted(), counted(**shared), counted(**shared, target_tp=2)) == (5, 11, 5)
    assert counted(target_tp=16) == 1 and counted(worker_groups="12") == 12
    assert counted(device="cpu") == 1
    assert count_worker_groups(WorkerGroupConfig(worker_groups="auto"), lambda: 7) == 7


@pytest.mark.parametrize("without", [{"device": "cpu"}, {"device": "cuda", "dtype": "float32"}])
def test_one_order_of_sums_needs_kernels(without):
    engine, (name, value) = EngineConfig(numerics="invariant"), list(without.items())[-1]
    with pytest.raises(ValueError, match=re.escape(f"numerics='invariant' has no effect with {name}={value!r}")):
        WorkerGroupConfig(engine=engine, **without)
    assert WorkerGroupConfig(engine=engine, device="cuda", dtype="bfloat16").engine.numerics == "invariant"


@pytest.mark.parametrize(("device", "default"), [("cpu", "nodes"), ("cuda", "paths")])
def test_what_the_target_runs_depends_on_the_device_unless_it_is_given(device, default):
    assert WorkerGroupConfig(device=device).serving_pair().engine.verified == default
    for given in ("nodes", "paths"):
        pair = WorkerGroupConfig(device=device, engine=EngineConfig(verified=given)).serving_pair()
        assert pair.engine.verified == given


@pytest.mark.parametrize("pages", [1, MAX_PAGES + 1])
def test_pages_have_numbers_of_32_bits(pages):
    with pytest.raises(ValueError, match=f"pages={pages}; allowed: 2..2000000000"):
        EngineConfig(pages=pages)


def test_too_few_pages_are_refused_before_anything_is_loaded():
    """A pool must have room for the short request that a start runs."""
    with pytest.raises(ValueError, match="pages=87; allowed: at least 88, what a short request may need"):
        WorkerGroupConfig(engine=EngineConfig(pages=87)).serving_pair()
    assert WorkerGroupConfig(engine=EngineConfig(pages=88)).serving_pair().engine.pages == 88
