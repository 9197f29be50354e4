"""Models by their names on the Hugging Face hub, from a local server that speaks the hub's protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from smc import demo
from smc.model.source import HubModel
from tests.model.hub import COMMIT, TOKEN, UNUSED, Hub, files_of, run, serving_hub

OLDER = "0" * 40


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with the demo pair."""
    with serving_hub(
        {"demo/target": files_of(demo.TARGET) | UNUSED, "demo/draft": files_of(demo.DRAFT) | UNUSED}
    ) as made:
        yield made


PAIR = ("--target", "demo/target", "--draft", "demo/draft")


@pytest.mark.slow
def test_a_pair_is_served_by_its_names_and_from_the_cache_afterwards(hub, tmp_path, smcserve):
    asked = ("generate", "Ann has 3 pens and buys 4. How many pens does she have?", "--max-tokens", "5", "--seed", "1")
    first = run(hub, tmp_path, *asked, *PAIR)
    assert first.returncode == 0, first.stderr
    assert sorted(hub.got()) == sorted([*files_of(demo.TARGET), *files_of(demo.DRAFT)])
    assert first.stdout == smcserve(*asked, "--target", demo.TARGET, "--draft", demo.DRAFT).out != ""
    hub.requests.clear()
    assert run(hub, tmp_path, "check", *PAIR).returncode == 0 and hub.got() == []
    hub.requests.clear()
    offline = run(hub, tmp_path, "check", *PAIR, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0 and hub.requests == [], offline.stderr


def test_a_broken_download_goes_on_where_it_stopped(hub, tmp_path):
    size = len(hub.repositories["demo/target"]["model.safetensors"])
    hub.cut["model.safetensors"] = size - 1000  # more than huggingface_hub writes at once
    first = run(hub, tmp_path, "check", *PAIR)
    second = first if first.returncode == 0 else run(hub, tmp_path, "check", *PAIR)
    assert second.returncode == 0, second.stderr
    ranges = [one for one in hub.requests if "demo/target" in one and "bytes=" in one]
    assert ranges and all(int(re.search(r"bytes=(\d+)", one)[1]) > 0 for one in ranges)


def test_only_the_shards_of_the_index_are_taken(hub, tmp_path):
    files = hub.repositories["demo/target"]
    files["model-00001-of-00001.safetensors"] = files.pop("model.safetensors")
    files["consolidated.safetensors"] = b"the same in another format"
    from safetensors import safe_open

    with safe_open(demo.TARGET / "model.safetensors", "numpy") as opened:
        shard_of = dict.fromkeys(opened.keys(), "model-00001-of-00001.safetensors")
    files["model.safetensors.index.json"] = json.dumps({"weight_map": shard_of}).encode()
    checked = run(hub, tmp_path, "check", "--target", f"demo/target@{COMMIT}", "--draft", str(demo.DRAFT))
    assert checked.returncode == 0, checked.stderr + checked.stdout
    assert "consolidated.safetensors" not in hub.got() and "model-00001-of-00001.safetensors" in hub.got()


def refused(hub: Hub, home: Path, target: str, **environment: str) -> str:
    done = run(hub, home, "check", "--target", target, "--draft", str(demo.DRAFT), **environment)
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    return line


@pytest.mark.slow
def test_unavailable_models_have_helpful_errors(hub, tmp_path):
    missing = refused(hub, tmp_path, "demo/tragte")
    assert "demo/tragte: there is no such directory, and no such model on" in missing and "HF_TOKEN" in missing
    assert f"has no revision '{OLDER}'" in refused(hub, tmp_path, f"demo/target@{OLDER}")
    hub.gated.add("demo/target")
    assert f"is gated: accept its terms on {hub.url}/demo/target" in refused(hub, tmp_path, "demo/target")
    assert run(hub, tmp_path, "check", *PAIR, HF_TOKEN=TOKEN).returncode == 0


@pytest.mark.slow
def test_a_hub_without_answer_or_files_says_what_to_do(hub, tmp_path):
    """Every command runs in a process of its own."""
    assert "HF_HUB_OFFLINE is set" in refused(hub, tmp_path, "demo/draft", HF_HUB_OFFLINE="1")
    assert "does not answer" in refused(hub, tmp_path, "demo/draft", HF_ENDPOINT="http://127.0.0.1:9")
    del hub.repositories["demo/draft"]["model.safetensors"]
    assert "has no weights in safetensors format" in refused(hub, tmp_path, "demo/draft")
    del hub.repositories["demo/draft"]["config.json"]
    assert "has no config.json" in refused(hub, tmp_path / "other", "demo/draft")


def test_a_disk_without_room(hub, tmp_path, monkeypatch):
    import collections
    import shutil

    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 10, 1000))
    with pytest.raises(ValueError, match=r"demo/target needs 2\.0 GiB, and .* free; make room, or name another disk"):
        HubModel("demo/target")._check_room(1 << 31, tmp_path / "a" / "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubModel("org/name")),
        ("org/name@main", HubModel("org/name", "main")),
        ("meta-llama/Llama-3.1-8B@refs/pr/1", HubModel("meta-llama/Llama-3.1-8B", "refs/pr/1")),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("a/b/c", None),
        ("../name", None),
        ("org/name@", None),
    ],
)
def test_names(text, expected):
    assert HubModel.parse(text) == expected


def test_a_snapshot_knows_its_name(tmp_path):
    cached = tmp_path / "hub" / "models--org--name--x" / "snapshots" / COMMIT
    assert HubModel.of_snapshot(cached) == HubModel("org/name--x", COMMIT)
    assert HubModel.of_snapshot(demo.TARGET) is None
