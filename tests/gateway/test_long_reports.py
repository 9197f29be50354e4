"""Reports over gRPC: long ones are converted beside the event loop, once, and too long ones are refused."""

from __future__ import annotations

import threading

import grpc
import pytest

from services import vllm
from services.client import ServiceError
from services.gateway import generation, request_handler
from smc.api import request
from smc.api.request import MOST_SCORED
from tests.vllm.test_service import asked, engine, refused

LEAST = 100
"""Number of tokens from which a report counts as long in these tests."""
PROMPT = [5, 6, 7, 8] * 5
ENDED = {"max_tokens": 8, "ignore_eos": True}
REPORTS = {
    "prompt_logprobs": {"prompt_logprobs": 5},
    "top_logprobs": {"logprobs": True, "top_logprobs": 5},
    "particles": {
        "method": "smc",
        "particles": 16,
        "population": "independent",
        "return_particles": True,
    },
}


@pytest.fixture
def converters(monkeypatch):
    """The threads that convert ends of answers, in both protocols."""
    threads = []

    def noted(convert):
        def work(*args, **options):
            threads.append(threading.current_thread())
            return convert(*args, **options)

        return work

    monkeypatch.setattr(request_handler, "LONG_REPORT", LEAST)
    monkeypatch.setattr(generation, "to_finish", noted(generation.to_finish))
    for name in ("_input_logprobs", "_answer_logprobs"):
        monkeypatch.setattr(vllm, name, noted(getattr(vllm, name)))
    return threads


@pytest.mark.parametrize("name", REPORTS)
def test_long_reports_are_converted_in_a_thread(service, converters, name):
    with service.client() as client:
        client.generate(PROMPT, **ENDED, **REPORTS[name])
    assert len(converters) == 1 and converters[0] is not service._thread


@pytest.mark.parametrize("stream", [False, True])
def test_long_reports_of_vllms_protocol_are_converted_once_and_in_a_thread(service, converters, stream):
    with engine(service) as stub:
        *_, end = stub.Generate(asked(PROMPT, stream=stream, logprobs=3, prompt_logprobs=3, **ENDED))
    assert len(end.complete.input_logprobs.top_logprobs) == len(PROMPT)
    assert len(converters) == 2 and service._thread not in converters


def test_too_many_log_probabilities_of_prompts_are_refused(service, monkeypatch):
    says = r"prompt_logprobs asks for [0-9]+ log-probabilities; allowed: at most [0-9]+ in all answers"
    with engine(service) as stub, refused(grpc.StatusCode.INVALID_ARGUMENT, says):
        list(stub.Generate(asked([5] * 500, prompt_logprobs=20, n=128, max_tokens=1)))
    assert 500 * 21 * 128 > MOST_SCORED > 20 * 6
    monkeypatch.setattr(request, "MOST_SCORED", 20 * 6)
    with service.client() as client:
        client.generate(PROMPT, max_tokens=1, prompt_logprobs=5)
        with pytest.raises(ServiceError, match=says):
            client.generate([*PROMPT, 5], max_tokens=1, prompt_logprobs=5)
