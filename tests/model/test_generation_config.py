"""Sampling settings that a request omits come from the target's generation_config.json."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm

from services.launch.config import WorkerGroupConfig
from services.launch.worker_group import coordinator_spec
from services.link.connect import Rendezvous
from services.openai.requests import Served, understood
from services.pb import generation_pb2 as pb
from services.protobuf.generation import to_sampling
from services.vllm import to_params
from smc import demo
from smc.api.sampling_params import SamplingParams, with_defaults
from smc.calibration.warm_up import UsualSampling
from smc.distributions import Processors
from smc.model.check import check_pair
from smc.model.config import sampling_defaults

GIVEN = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "max_new_tokens": 5, "pad_token_id": 0}
TAKEN = {"temperature": 0.6, "top_p": 0.9}


@pytest.fixture
def target(tmp_path) -> Path:
    """A copy of the demo target with other default settings."""
    directory = tmp_path / "target"
    shutil.copytree(demo.TARGET, directory)
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | GIVEN))
    return directory


def test_the_file_is_read(target, tmp_path):
    assert sampling_defaults(target) == TAKEN
    assert sampling_defaults(demo.TARGET) == {} == sampling_defaults(tmp_path)
    (target / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(
        ValueError, match=r"generation_config.json: top_p=7; allowed: .* give --generation-config ignore"
    ):
        sampling_defaults(target)


def test_every_front_end_applies_defaults(target):
    pair = WorkerGroupConfig(target=target).serving_pair()
    assert pair.sampling == TAKEN
    ignoring = WorkerGroupConfig(target=target, generation_config="ignore").serving_pair()
    assert ignoring.sampling == {} and ignoring.fingerprint() != pair.fingerprint()
    assert replace(pair, sampling={}).fingerprint() == ignoring.fingerprint()
    with pytest.raises(ValueError, match="generation_config='never'; allowed: auto, ignore"):
        WorkerGroupConfig(generation_config="never")
    body = {"messages": [{"role": "user", "content": "a"}]}
    served = Served(("demo",), pair.tokenizer, defaults=pair.sampling)
    over_http = understood(body, True, served).params(5, 1)
    over_grpc = to_sampling(pb.GenerateRequest(), pair.sampling)
    (over_vllm,) = to_params(vllm.SamplingParams(), "exact", 5, pair.sampling)
    for params in (over_http, over_grpc, over_vllm):
        assert (params.temperature, params.top_p) == (0.6, 0.9)
    asked = understood(body | {"temperature": 1.0}, True, served).params(5, 1)
    assert (asked.temperature, asked.top_p) == (1.0, 0.9)
    asked = to_sampling(pb.GenerateRequest(sampling=pb.SamplingParams(top_p=1.0)), pair.sampling)
    assert (asked.temperature, asked.top_p) == (0.6, 1.0)


def test_the_warm_up_runs_rounds_of_requests_that_leave_it_out(target):
    config = WorkerGroupConfig(target=target)
    rendezvous = Rendezvous("127.0.0.1", 1, 1, "secret", config.link, config.start_timeout)
    assert coordinator_spec(config, config.serving_pair(), rendezvous).sampling == (Processors.TOP_P, False)
    settings = {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    assert UsualSampling.of(settings) == (Processors.TRUNCATION, True)
    assert UsualSampling.of({"temperature": 0.7}) == UsualSampling()


def test_a_default_that_contradicts_what_is_given_is_left_out():
    given = {"logprobs": True, "top_logprobs": 2}
    with pytest.raises(ValueError):
        SamplingParams(**given, repetition_penalty=1.1)
    for method, settings in (("exact", given), ("target", given | {"method": "target"})):
        found = with_defaults(settings, {"repetition_penalty": 1.1, "temperature": 0.6})
        assert found == settings | {"method": method, "temperature": 0.6}
    assert with_defaults({"temperature": -1}, {"top_p": 0.9}) == {"method": "exact", "temperature": -1}


def test_that_a_default_is_left_out_is_said_once(caplog):
    """Only of requests that are valid without it."""
    for count in range(3):
        assert "repetition_penalty" not in with_defaults(
            {"logprobs": True, "top_logprobs": 1 + count}, {"repetition_penalty": 1.234}
        )
        with_defaults({"temperature": -1}, {"top_p": 0.87})
    (record,) = [record for record in caplog.records if "generation_config.json" in record.getMessage()]
    assert "repetition_penalty=1.234 by default, which contradicts" in record.getMessage()


def test_commands_say_and_have_them(target, smcserve):
    pair = ("--target", target, "--draft", demo.DRAFT)
    checked = smcserve("check", *pair)
    assert "temperature 0.6, top_p 0.9" in checked.out and "library's" in checked.out
    report = check_pair(target, demo.DRAFT)
    assert report.target.sampling == TAKEN and report.target.eos_ids == report.draft.eos_ids != ()
    asked = ("generate", "What is 2 + 2?", "--max-tokens", 2, "--json", *pair)
    sampling = json.loads(smcserve(*asked).out)["settings"]["sampling"]
    assert (sampling["temperature"], sampling["top_p"]) == (0.6, 0.9)
    ignoring = json.loads(smcserve(*asked, "--generation-config", "ignore").out)["settings"]["sampling"]
    assert (ignoring["temperature"], ignoring["top_p"]) == (1.0, 1.0)
    wrong = smcserve(*asked, "--generation-config", "never")
    assert wrong.code == 2 and "--generation-config never; allowed: auto, ignore" in wrong.err
