"""`smcserve bench --link` and the checks of arguments of `smcserve serve` and `smcserve bench`."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.slow
def test_bench_over_a_link(smcserve, tmp_path, monkeypatch, ray_cluster):
    """`bench --link` measures every form at every concurrency. A cluster already runs, so connecting and shutting down
    are replaced; the command would otherwise start its own."""
    monkeypatch.setattr("services.launch.cluster.connect", lambda address: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    path = tmp_path / "bench.json"
    ran = smcserve(
        "bench", "--link", "grpc", "-n", 2, "-k", 3, "-f", 2, "-c", 1, "-c", 3, "--rounds", 6, "--json", path
    )
    assert ran.code == 0 and "coordinator" in ran.out
    rows = json.loads(path.read_text())
    assert [(row["form"], row["requests"]) for row in rows] == [
        ("lockstep", 1),
        ("lockstep", 3),
        ("lookahead", 1),
        ("lookahead", 3),
    ]
    for row in rows:
        assert row["link"] == "grpc" and row["rounds"] >= 3
        assert row["whole"] > row["coordinator"] > 0 and min(row["draft"], row["target"]) > 0 <= row["link_time"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("serve", "--target-tp", 5),
            "target_tp=5: degree=5 is more than the model's 4 query heads; allowed: 1 to 4",
        ),
        (("serve", "--link", "carrier"), "link='carrier'; allowed: nccl, grpc"),
        (("serve", "--device", "tpu"), "device='tpu'; allowed: cpu, cuda"),
        (("serve", "--form", "lockstep", "-f", 2), "branches=2 has no effect with form='lockstep'"),
        (("serve", "--tls-key", "key.pem"), "tls_key is given without tls_cert"),
        (("serve", "--trace", "/nowhere/x.json"), "its directory does not exist"),
        (("serve", "--max-context", 4096), "max_context=4096; allowed: 2..512"),
        (("serve", "--target", "/nowhere"), "--target is given without --draft"),
        (("serve", "--served-model-name", ""), "served_model_names contains ''; allowed: names that can be printed"),
        (("serve", "--default-method", "beam"), "default_method='beam'; allowed: smc, exact, target, draft"),
        (("serve", "--http-port", 50051), "http_port=50051 is given as port as well"),
        (("bench", "--draft-tp", 2), "--draft-tp 2 has no effect without --link"),
    ],
)
def test_mistakes_are_found_before_anything_starts(smcserve, arguments, message):
    ran = smcserve(*arguments)
    assert (ran.code, ran.out) == (2, "") and message in ran.err
