"""No answer contains one of its bad words, whatever tokens it would be written with."""

from __future__ import annotations

import random

import numpy as np
import pytest

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.bad_words import BadWords
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine
from smc.stops import TokenBytes

METHODS = {
    "target": {"method": "target"},
    "exact": {"method": "exact", "particles": 3},
    "smc": {"method": "smc", "particles": 3},
}


def asked(pair: ModelPair, name: str, seed: int, **more) -> Request:
    question = generate(1, 4, "test")[seed % 4].question
    prompt = tuple(pair.tokenizer.chat([{"role": "user", "content": question}]))
    return Request(f"{name} {seed}", prompt, SamplingParams(seed=seed, max_tokens=60, **METHODS[name], **more))


def texts(pair: ModelPair, requests: list[Request]) -> dict[str, str]:
    engine = local_engine(pair, EngineConfig(block=4, max_slots=64))
    return {output.request_id: output.answer.text for output in engine.run(requests) if output.answer}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def test_texts_that_answers_like_to_contain(pair):
    """Begin and end inside tokens, or with a blank or a line break."""
    dice, requests = random.Random(1), []
    plain = texts(pair, [asked(pair, "target", seed) for seed in range(4)])
    assert any("\n#" in text for text in plain.values())
    words = ["\n#", *(text[at : at + 3] for text in plain.values() for at in dice.sample(range(20), 2))]
    words = [word for word in words if word.strip()]
    assert len(words) > 5 and any(word in text for word in words[1:] for text in plain.values())
    requests = [asked(pair, name, seed, bad_words=tuple(words)) for name in METHODS for seed in range(4)]
    found = texts(pair, requests)
    assert not any(word in text for word in words for text in found.values())
    assert all(found[f"exact {seed}"] == found[f"target {seed}"] for seed in range(4))


def test_forbidden_tokens_are_those_of_the_definition():
    """Random vocabularies, words and answers, against a search in the texts."""
    dice = random.Random(2)
    for _ in range(60):
        tokens = ["", *("".join(dice.choices("ab\u00e9 ", k=dice.randint(1, 4))) for _ in range(dice.randint(3, 70)))]
        words = tuple(sorted({"".join(dice.choices("ab\u00e9", k=dice.randint(1, 6))).encode() for _ in range(4)}))
        data = [token.encode() for token in tokens]
        bad = BadWords(words, token_bytes_of(data))
        (state, _), answer = bad.state_after([]), []
        for _ in range(30):
            text = b"".join(data[token] for token in answer)
            expected = {token for token, more in enumerate(data) if any(word in text + more for word in words)}
            bits = bad.forbidden(state)
            found = {token for token in range(len(data)) if bits[token // 32] >> (token % 32) & 1}
            assert found == expected and bad.state_after(answer) == (state, True)
            if not (left := [token for token in range(len(data)) if token not in expected]):
                break
            answer.append(dice.choice(left))
            state, _ = bad.next_state(state, answer[-1])


def token_bytes_of(data: list[bytes]) -> TokenBytes:
    offset_V = np.cumsum([0, *map(len, data)]).astype(np.int32)
    return TokenBytes(np.frombuffer(b"".join(data), np.uint8).copy(), offset_V)


def test_words_that_are_too_long():
    with pytest.raises(ValueError, match="bad_words has strings of 4097 bytes together; allowed: at most 4096"):
        SamplingParams(bad_words=("a" * 4097,))
    with pytest.raises(ValueError, match=r"bad_words contains .* which has no UTF-8 form"):
        SamplingParams(bad_words=("a\ud800",))
