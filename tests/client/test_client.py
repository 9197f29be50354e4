"""The Python client: what it returns, what it refuses, and what it imports."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import grpc
import pytest

from services.client import Chunk, Client, Message, ServiceError, Statistics
from smc.api import request as library
from tests.gateway.harness import LONG, serving

QUESTION = [Message("user", "Mia has 12 apples. She buys 30 more. How many now?")]


def test_a_stream_ends_in_a_completion(service):
    with (
        service.client() as client,
        client.stream(QUESTION, seed=3, method="smc", particles=4, cache_salt="new") as stream,
    ):
        assert stream.completion is None
        chunks = list(stream)
        assert list(stream) == []
    completion = stream.completion
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert completion.text == "".join(chunk.text for chunk in chunks) and completion.request_id == stream.request_id
    assert (completion.seed, completion.statistics.particles, completion.statistics.particles_left) == (3, 4, 4)
    assert completion.usage.completion_tokens == len(completion.tokens) and completion.usage.cached_tokens == 0
    assert completion.finish_reason == "eos" and completion.matched == completion.tokens[-1]
    assert completion.matched in service.pair.tokenizer.eos_ids
    assert completion.logprobs is None and completion.seconds > 0


def test_generate_is_the_stream_at_once(service):
    """`generate` returns what a stream of the same request returns in total."""
    with service.client() as client:
        whole = client.generate(QUESTION, seed=3, method="smc", particles=4, logprobs=True)
        with client.stream(QUESTION, seed=3, method="smc", particles=4, logprobs=True) as stream:
            chunks = list(stream)
        plain = client.generate(QUESTION, method="target", temperature=0, request_id="mine")
    assert (whole.text, whole.tokens) == (stream.completion.text, stream.completion.tokens)
    assert len(whole.logprobs) == len(whole.tokens) and max(whole.logprobs) <= 0
    assert all(len(chunk.logprobs) == len(chunk.tokens) for chunk in chunks)
    assert sum((chunk.logprobs for chunk in chunks), ()) == stream.completion.logprobs
    assert stream.completion.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert plain.statistics is None and plain.request_id == "mine"


def test_prompts_share_what_was_computed_within_a_salt(service):
    """Cached prompt tokens are shared between requests of the same `cache_salt` only."""
    with service.client() as client:
        found = [
            client.generate(QUESTION, seed=3, method="smc", min_particles=2, cache_salt=salt)
            for salt in ("a", "a", "b")
        ]
    assert len({completion.tokens for completion in found}) == 1
    assert [completion.usage.cached_tokens for completion in found] == [0, found[0].usage.prompt_tokens // 16 * 16, 0]


def test_leaving_early_cancels(service):
    with service.client() as client:
        with client.stream("x", **LONG) as stream:
            next(stream)
        assert stream.completion is None
        service.wait_until_free(1.0)


def test_closing_the_client_cancels(service):
    with service.client() as client:
        stream = client.stream("x", **LONG)
        next(stream)
    service.wait_until_free(1.0)
    with pytest.raises(ServiceError, match="CANCELLED"):
        list(stream)


def test_errors_say_code_message_and_when(service):
    with service.client() as client:
        with pytest.raises(ServiceError) as caught:
            client.generate("x", particles=0)
        assert (caught.value.code, caught.value.retry_after) == (grpc.StatusCode.INVALID_ARGUMENT, None)
        assert caught.value.message == "particles=0; allowed: 1..64"
        assert str(caught.value) == "INVALID_ARGUMENT: particles=0; allowed: 1..64"
        with pytest.raises(ServiceError, match="DEADLINE_EXCEEDED"):
            client.generate("x", timeout=0.2, **LONG)
        with pytest.raises(ServiceError, match="NOT_FOUND: service='x'; allowed"):
            client.health("x")
    with Client("localhost:1") as nowhere, pytest.raises(ServiceError, match="UNAVAILABLE"):
        nowhere.server_info()


def test_a_hint_to_try_again(pair):
    with serving(pair, ready=False) as service, service.client() as client:
        with pytest.raises(ServiceError) as caught:
            client.generate("x")
        assert caught.value.retry_after == 1.0
        assert client.health() == "NOT_SERVING" and not client.server_info().serving
        service.set_health(draft=True, target=True)
        assert client.generate("x", max_tokens=2).tokens


def test_one_client_outlives_a_service(pair):
    """A client keeps working when its service is replaced by another on the same port."""
    with serving(pair) as first:
        port = first.gateway.port
        client = first.client()
        assert client.generate("x", max_tokens=2).tokens
    with serving(pair, port=port), client:
        for _ in range(50):
            try:
                assert client.generate("x", max_tokens=2).tokens
                return
            except ServiceError as error:
                assert error.code is grpc.StatusCode.UNAVAILABLE
                time.sleep(0.1)
    raise AssertionError("never came back")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ("x", {"particles": "many"}, "particles='many'; allowed: a 32-bit integer"),
        ("x", {"method": "beam"}, "method='beam'; allowed: smc, exact, target, draft"),
        (["x"], {}, "prompt contains 'x'; allowed: a string, a list of token ids, or a list of Message"),
        ([1, -1], {}, "prompt contains -1"),
        ([Message("user", "x"), 3], {}, "prompt contains 3"),
    ],
)
def test_what_cannot_be_sent(service, prompt, sampling, message):
    with service.client() as client, pytest.raises(ValueError, match=message):
        client.generate(prompt, **sampling)


def test_a_setting_that_there_is_none_of(service):
    with service.client() as client, pytest.raises(TypeError, match="beams is not a sampling setting; allowed: method"):
        client.generate("x", beams=3)


def test_its_types_are_the_librarys():
    assert [f.name for f in fields(Statistics)] == [f.name for f in fields(library.Statistics)]


def test_it_loads_no_model_code():
    """Importing the client loads neither torch nor numpy nor Ray, so a script that only sends requests starts at
    once."""
    script = "import sys, services.client; assert not {'torch', 'numpy', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_vote_of_the_documentation(service, capsys):
    """The example in docs/particles.md runs unchanged and prints the shares of the three likeliest results."""
    (script,) = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "particles.md").read_text(), flags=re.DOTALL
    )
    exec(script.replace("127.0.0.1:50051", service.address), names := {})
    shares = list(names["votes"].values())
    assert sum(shares) == pytest.approx(1) and len(names["completion"].particles) == 16
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{max(shares):6.1%}  ")
    assert "text" in vars(names["particle"]) and names["completion"].tokens in {
        p.tokens for p in names["completion"].particles
    }
