"""Request bodies in OpenAI's format: how they are read, which fields are refused, and the seed of a line that gives
none."""

from __future__ import annotations

import pytest

from services.batch.lines import RequestReader
from smc.api.sampling_params import Method
from tests.batch.asking import chat, completion, line


@pytest.fixture(scope="module")
def requests(pair) -> RequestReader:
    return RequestReader(pair, 0)


def test_defaults(pair, requests):
    request = requests.build(line(chat("a", "1 + 1?"), 5))[0]
    assert request.request_id == "5"
    assert request.prompt == tuple(pair.tokenizer.chat([{"role": "user", "content": "1 + 1?"}]))
    params = request.params
    assert (params.method, params.particles, params.temperature, params.max_tokens, params.logprobs) == (
        Method.EXACT,
        8,
        1.0,
        256,
        False,
    )


def test_prompts(pair, requests):
    assert requests.build(line(completion("a", prompt="1 + 1 =")))[0].prompt == tuple(pair.tokenizer.encode("1 + 1 ="))
    assert requests.build(line(completion("a", prompt=[3, 1, 2])))[0].prompt == (3, 1, 2)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"stop": "."}, {"stop": (".",)}),
        ({"stop": [".", "#"]}, {"stop": (".", "#")}),
        ({"stop_token_ids": [4], "ignore_eos": True}, {"stop_token_ids": (4,), "ignore_eos": True}),
        (
            {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1},
            {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1},
        ),
        (
            {"method": "smc", "particles": 3, "alpha": 2, "ess_threshold": 1, "resampling": "ssp"},
            {"particles": 3, "alpha": 2, "resampling": "ssp"},
        ),
        ({"method": "smc", "particles": 6, "min_particles": 2}, {"particles": 6, "min_particles": 2}),
        ({"method": "target", "temperature": 0}, {"method": Method.TARGET, "particles": None, "temperature": 0}),
        ({"method": "exact", "particles": 4}, {"method": Method.EXACT, "particles": 4, "population": None}),
        ({"temperature": 0}, {"method": Method.EXACT, "particles": 8}),
        ({"temperature": 0.7}, {"method": Method.EXACT, "particles": 8, "verification": "walk"}),
        ({"method": "smc", "population": "independent"}, {"population": "independent", "ess_threshold": 0.5}),
        ({"logprobs": True}, {"logprobs": True}),
        ({"seed": -5}, {"seed": -5}),
        ({"time_budget": 2.5}, {"time_budget": 2.5}),
        (
            {"min_tokens": 3, "logit_bias": {"7": -1, "2": 0.5, "3": 0}},
            {"min_tokens": 3, "logit_bias": ((2, 0.5), (7, -1.0))},
        ),
        ({"model": "target", "n": 1, "stream": False, "stop": None, "logit_bias": None}, {"stop": ()}),
    ],
)
def test_settings(requests, body, expected):
    params = requests.build(line(chat("a", **body)))[0].params
    assert {name: getattr(params, name) for name in expected} == expected


def test_a_salt(requests):
    assert (
        requests.build(line(chat("a")))[0].cache_salt
        == requests.build(line(chat("a", cache_salt=None)))[0].cache_salt
        == ""
    )
    assert requests.build(line(completion("a", cache_salt="customer 7")))[0].cache_salt == "customer 7"


def test_a_completion_may_ask_for_log_probabilities_of_others_by_their_number(requests):
    """In a completion, `logprobs` is a number of tokens, as in OpenAI's API."""
    params = requests.build(line(completion("a", logprobs=3)))[0].params
    assert params.logprobs and params.top_logprobs == 3
    assert requests.build(line(completion("a", logprobs=0)))[0].params.logprobs
    with pytest.raises(ValueError, match="logprobs=21; allowed: true, false, 0"):
        requests.build(line(completion("a", logprobs=21)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"frequency_penalty": 3}, "frequency_penalty=3; allowed: -2..2"),
        ({"prompt": "Hi"}, "prompt is not a field of /v1/chat/completions"),
        ({"model": "gpt-4o"}, "model='gpt-4o'; allowed: 'target'"),
        ({"n": 0}, "n=0; allowed: greater than"),
        ({"n": 1000}, "n=1000"),
        ({"n": True}, "n=True; allowed: an integer"),
        ({"frequency": 1}, "frequency is not a field of /v1/chat/completions here; allowed: .*temperature"),
        ({"stream": True}, "stream=True; allowed: False"),
        ({"max_tokens": 0}, "max_tokens=0; allowed: >= 1"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens and max_completion_tokens are both given"),
        (
            {"method": "smc", "temperature": 0},
            "temperature=0; allowed: > 0 with method='smc'; for greedy decoding, method='exact'",
        ),
        ({"method": "exact", "population": "distinct"}, "population='distinct' has no effect with method='exact'"),
        ({"alpha": 2}, "alpha=2 has no effect with method='exact'; give method='smc', or leave it out"),
        ({"method": "smc", "population": ["distinct"]}, r"population=\['distinct'\]; allowed: distinct, independent"),
        ({"method": "smc", "min_particles": 9}, "min_particles=9; allowed: 1..8, the particles"),
        ({"method": "draft", "min_particles": 1}, "min_particles=1 has no effect with method='draft'"),
        ({"cache_salt": 5}, "cache_salt=5; allowed: a string"),
        ({"cache_salt": "x" * 257}, "cache_salt has 257 characters; allowed: at most 256"),
        ({"cache_salt": "\ud800"}, "'cache_salt' holds half of a surrogate pair; allowed: valid Unicode text"),
        ({"stop": ["a" * 1001]}, "stop has strings of 1001 bytes together; allowed: at most 1000"),
        ({"temperature": "hot"}, "temperature='hot'; allowed"),
        ({"temperature": 10**400}, "temperature=1000*; allowed"),
        ({"time_budget": 10**400}, "time_budget=1000*; allowed"),
        ({"top_k": 10**400}, "top_k=1000*; allowed"),
        ({"method": "beam"}, "^method='beam'; allowed: smc, exact, target, draft"),
        ({"method": 1}, "method=1; allowed: smc, exact, target, draft"),
        ({"method": "target", "particles": 4}, "particles=4 has no effect with method='target'"),
        ({"ignore_eos": 1}, "ignore_eos=1; allowed: true, false"),
        ({"stop": 5}, "stop=5; allowed"),
        ({"logprobs": 3}, "logprobs=3; allowed: true, false"),
        ({"seed": "x"}, "seed='x'; allowed: a 64-bit signed integer"),
        ({"method": "smc", "resampling": "best"}, "resampling='best'; allowed"),
        ({"messages": None}, "messages is missing"),
        ({"messages": []}, r"messages=\[\]; allowed: .*at least 1 item"),
        ({"messages": ["Hi"]}, r"messages\[0\]='Hi'; allowed: an object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is missing; allowed: a string, or a list of parts"),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            r"messages\[0\].role='robot'; allowed: 'system'.* or 'tool'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            r"messages\[0\].content\[0\].text is missing",
        ),
    ],
)
def test_a_chat_is_refused_by_name(requests, body, message):
    with pytest.raises(ValueError, match=message):
        requests.build(line(chat("a", **body)))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt is missing"),
        (5, "prompt is neither text nor token ids; allowed: one string or list of token ids"),
        ([True], "prompt is neither text nor token ids"),
        ([-1], "prompt contains token id -1; allowed: 0.."),
        ([10**6], "prompt contains token id 1000000; allowed: 0.."),
    ],
)
def test_a_prompt_is_refused_by_name(requests, prompt, message):
    with pytest.raises(ValueError, match=message):
        requests.build(line(completion("a", prompt=prompt)))


def test_invalid_line_raises_its_mistake(requests):
    """Building the requests of an invalid line raises ValueError with the line's own mistake."""
    with pytest.raises(ValueError, match="method='GET'"):
        requests.build(line(chat("a") | {"method": "GET"}))


def test_a_long_prompt_leaves_room_for_a_shorter_answer(pair, requests):
    prompt = [1] * (pair.context - 10)
    assert requests.build(line(completion("a", prompt=prompt)))[0].params.max_tokens == 10


def test_seeds_come_from_the_name_of_the_line_and_the_seed_of_the_run(pair, requests):
    """A line's seed comes from its custom_id and the run's seed, not from its position: a line keeps its answer in any
    file."""
    names = [f"line {i}" for i in range(1000)] + ["\ud800"]
    seeds = [requests.seed_of(line(chat(name))) for name in names]
    assert len(set(seeds)) == 1001 and all(0 <= seed < 2**63 for seed in seeds)
    assert requests.seed_of(line(chat("line 3", "other text"), 77)) == seeds[3]
    assert requests.build(line(chat("line 3")))[0].params.seed == seeds[3]
    assert RequestReader(pair, 1).seed_of(line(chat("line 3"))) != seeds[3]
    assert requests.seed_of(line(chat("line 3", seed=0))) == 0
    assert requests.seed_of(line(chat("line 0"))) == 801005201466570759, (
        "answers of earlier releases would no longer reproduce"
    )


def test_negative_prompts(pair, requests):
    """A negative prompt is a string, a list of token ids, or messages for the chat template. If it is absent, the
    engine fills it in."""

    def read(**body) -> tuple[int, ...] | None:
        return requests.build(line(chat("a", guidance_scale=1.5, **body)))[0].negative_prompt

    told = [{"role": "user", "content": "2 + 2?"}]
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2}
    params = requests.build(line(chat("a", **penalties)))[0].params
    assert penalties == {name: getattr(params, name) for name in penalties}
    assert read() is None and requests.build(line(chat("a", guidance_scale=1.5)))[0].params.guidance_scale == 1.5
    assert read(negative_prompt="2 + 2?") == tuple(pair.tokenizer.encode("2 + 2?"))
    assert read(negative_prompt=[5, 3]) == (5, 3)
    assert read(negative_prompt=told) == tuple(pair.tokenizer.chat(told))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"negative_prompt": "x"}, "negative_prompt has no effect with guidance_scale=1"),
        ({"guidance_scale": 0.5}, "guidance_scale=0.5; allowed: 1 to 1000"),
        ({"guidance_scale": 2, "method": "draft"}, "guidance_scale=2 has no effect with method='draft'"),
        (
            {"guidance_scale": 2, "negative_prompt": 7},
            "negative_prompt is neither text, token ids nor messages; allowed: a string",
        ),
        ({"guidance_scale": 2, "negative_prompt": [3, 10**6]}, "negative_prompt contains token id 1000000; allowed: 0"),
        (
            {"guidance_scale": 2, "negative_prompt": [{"role": "king", "content": "x"}]},
            "is not a valid message, because of its 'role'",
        ),
        ({"guidance_scale": 2, "negative_prompt": "x" * 10_000}, "negative_prompt: the prompt has 10000 "),
    ],
    ids=str,
)
def test_negative_prompts_that_are_refused(requests, body, message):
    with pytest.raises(ValueError, match=message):
        requests.build(line(chat("a", **body)))


def test_several_answers_to_a_line(requests):
    """As over the API, the first of several answers has the line's own seed, and each prompt has as many answers."""
    alone = requests.build(line(completion("a", prompt="one", seed=5)))[0]
    several = requests.build(line(completion("a", prompt=["one", "two"], seed=5, n=2)))
    assert several[0] == alone and several[0].prompt == several[1].prompt != several[2].prompt
    assert len({request.params.seed for request in several}) == 4
    own = requests.build(line(chat("a", n=3)))
    assert [request.params.seed for request in own] == [
        request.params.seed for request in requests.build(line(chat("a", n=4)))[:3]
    ]
