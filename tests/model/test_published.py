"""The pair that the documentation uses as an example of one's own, by its names on the hub: commands, tools, service.
The local hub has small models with the files of the published ones (`tests.model.published`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import openai
import pytest

from services.openai.requests import Served, understood
from services.openai.tool_calls import ToolFormat
from smc.local_engine import ModelPair
from smc.model.config import ModelConfig
from smc.model.presets import preset
from smc.model.source import find_model
from smc.model.tokenizer import Tokenizer
from smc.model.weight_map import count_parameters
from tests.gateway.harness import serving
from tests.model.hub import Hub, files_of, run, serving_hub
from tests.model.published import CONFIGS, DRAFT, SAMPLING, TARGET, save_published
from tests.model.tiny import write_json
from tests.ports import free_ports
from tests.service.test_serve import command

PAIR = ("--target", TARGET, "--draft", DRAFT)
DOCUMENTS = ("README.md", "docs/quality.md", "docs/distill.md", "docs/speculation.md", "docs/architecture.md")
SEARCH = {
    "name": "search",
    "description": "Find pages.",
    "parameters": {
        "type": "object",
        "properties": {"exact": {"type": "boolean"}, "pages": {"enum": [1, 22]}},
        "required": ["exact", "pages"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": SEARCH}]


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    return {name: save_published(name, tmp_path_factory.mktemp("published") / name) for name in (TARGET, DRAFT)}


@pytest.fixture
def hub(directories) -> Iterator[Hub]:
    with serving_hub({name: files_of(directory) for name, directory in directories.items()}) as made:
        yield made


def test_the_documentation_uses_their_names():
    root = Path(__file__).parents[2]
    for document in DOCUMENTS:
        assert TARGET in (root / document).read_text(encoding="utf-8"), document


@pytest.mark.parametrize(("name", "shape"), [(TARGET, "qwen2.5-1.5b"), (DRAFT, "qwen2.5-0.5b")])
def test_published_configurations_are_the_presets(tmp_path, name, shape):
    write_json(tmp_path / "config.json", CONFIGS[name])
    config, known = ModelConfig.from_hf(tmp_path), preset(shape)
    assert count_parameters(config) == count_parameters(known) and config.window is None
    assert (config.rope_theta, config.rms_eps, config.tied_embeddings, config.traits.qkv_bias) == (
        1e6,
        1e-6,
        True,
        True,
    )


@pytest.mark.slow
def test_the_pair_is_checked_and_answers(hub, tmp_path):
    checked = run(hub, tmp_path, "check", *PAIR)
    assert checked.returncode == 0, checked.stderr
    sampling = re.search(r"^sampling +(\S.*?) {2,}", checked.stdout, re.MULTILINE)[1]
    assert dict(pair.split() for pair in sampling.split(", ")) == {
        name: f"{value:g}" for name, value in SAMPLING.items()
    }
    assert hub.got().count("model.safetensors") == 2
    hub.requests.clear()
    asked = run(hub, tmp_path, "generate", "Reverse a list.", "--method", "exact", "--max-tokens", "5", *PAIR)
    assert asked.returncode == 0 and hub.got() == [], asked.stderr


@pytest.mark.slow
def test_the_pair_is_measured(hub, tmp_path):
    """Each command that the documentation shows, with fewer tokens."""
    problems, found = tmp_path / "problems.jsonl", tmp_path / "found.json"
    problems.write_text('{"prompt": "Write add(a, b) in Python."}\n{"question": "1 + 1?", "answer": "#### 2"}\n')
    probed = run(hub, tmp_path / "hub", "check", "--probe", "--threads", "1", "-n", "2", *PAIR)
    assert probed.returncode == 0 and "accepted by depth: " in probed.stdout, probed.stderr
    assert "method=" in probed.stdout.splitlines()[-1]
    evaluated = run(hub, tmp_path / "hub", "eval", *PAIR, "--problems", problems, "--max-tokens", "4", "--json", found)
    assert evaluated.returncode == 0, evaluated.stderr
    rows = {row["decoding"].split()[0]: row for row in json.loads(found.read_text())["rows"]}
    exact, target = ([one["tokens_sha256"] for one in rows[name]["answers"]] for name in ("exact", "target"))
    assert exact == target and len(exact) == 2
    benched = run(hub, tmp_path / "hub", "bench", *PAIR, "--prompts-file", problems, "--rounds", "3", "-c", "1")
    assert benched.returncode == 0, benched.stderr


@pytest.mark.slow
def test_the_target_is_grown(hub, tmp_path):
    grown = run(hub, tmp_path / "hub", "grow", TARGET, tmp_path / "grown", "--shape", "qwen3-0.6b/3")
    assert grown.returncode == 0, grown.stderr
    checked = run(hub, tmp_path / "hub", "check", "--target", tmp_path / "grown", "--draft", DRAFT)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    "arguments",
    [("grow", "Qwen/None", "grown", "--shape", "llama-8b"), ("distill", "--draft", "Qwen/None", "--out", "out")],
)
def test_unknown_names(hub, tmp_path, arguments):
    """Every command that reads a model takes a name on the hub."""
    refused = run(hub, tmp_path, *arguments)
    assert refused.returncode == 2 and "Qwen/None: there is no such directory, and no such model on" in refused.stderr


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_the_template_renders_tools(directories, name):
    """Functions, calls and results are where the template has them, and calls are read in the format of Hermes."""
    tokenizer = Tokenizer.load(directories[name])
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"pages": 1}'}}
    messages = [
        {"role": "user", "content": "Find it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12 pages"},
    ]
    read = understood({"messages": messages, "tools": TOOLS}, True, Served(("qwen",), tokenizer))
    read = read.with_tool_format(tokenizer)
    assert read.syntax.format is ToolFormat.HERMES
    text = "".join(
        tokenizer._tokenizer.decode([token], skip_special_tokens=False)
        for token in read.prompts[0].encode(tokenizer, 4000)
    )
    braces = ("{{", "}}") if name == TARGET else ("{", "}")
    shown = '"name": <function-name>, "arguments": <args-json-object>'
    assert text.startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.") and shown.join(braces) in text
    assert json.loads(re.search(r"<tools>\n(.*)\n</tools>", text)[1]) == TOOLS[0]
    assert '<tool_call>\n{"name": "search", "arguments": {"pages": 1}}\n</tool_call><|im_end|>' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n12 pages\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_required_calls_over_http(directories):
    """Chat, stream and response: the random weights write a call because they must."""
    pair = ModelPair.load(*(find_model(directory) for directory in directories.values()))
    own = {"model": "qwen", "tool_choice": "required", "extra_body": {"method": "exact", "seed": 3}}
    chat = {**own, "messages": [{"role": "user", "content": "Find it."}], "tools": TOOLS, "max_tokens": 300}
    with (
        serving(pair, http_port=0, served_model_names=("qwen",)) as service,
        openai.OpenAI(base_url=service.url, api_key="none", max_retries=0) as client,
    ):
        (whole,) = client.chat.completions.create(**chat).choices
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**chat, stream=True)]
        response = client.responses.create(
            **own, input="Find it.", tools=[{"type": "function", "strict": True, **SEARCH}], max_output_tokens=300
        )
    found = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    parts = [call.function for chunk in chunks for call in chunk.delta.tool_calls or ()]
    found.append(("".join(part.name or "" for part in parts), "".join(part.arguments or "" for part in parts)))
    found += [(item.name, item.arguments) for item in response.output]
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls" and len(found) == 3
    for name, arguments in found:
        assert name == "search"
        jsonschema.validate(json.loads(arguments), SEARCH["parameters"])


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_pair_is_served(hub, tmp_path, monkeypatch):
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    port, http_port = free_ports(2)
    with (
        command(*PAIR, "--port", port, "--http-port", http_port, log=tmp_path / "log"),
        openai.OpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none", max_retries=0) as client,
    ):
        (model, *_) = [model.id for model in client.models.list()]
        assert model == TARGET.split("/")[1]
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        (choice,) = client.chat.completions.create(
            model=model, messages=messages, max_tokens=5, extra_body={"method": "exact"}
        ).choices
    assert choice.finish_reason in ("length", "stop")
