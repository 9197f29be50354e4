"""The Ray cluster that a service starts for itself: nobody else on this machine can use it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray

pytestmark = pytest.mark.xdist_group("ray")
SCRIPT = """
import sys, ray
try:
    ray.init(address=sys.argv[1], logging_level="CRITICAL")
except ConnectionError:
    print("refused")
else:
    print("let in")
"""


@pytest.mark.skipif(
    os.environ.get("RAY_AUTH_MODE") == "disabled", reason="whoever runs the tests has asked for no authentication"
)
def test_strangers_are_not_let_in(ray_cluster):
    """Neither without a token nor with another one. Ray asks once, and not twenty times a second apart."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "RAY_NUM_REDIS_GET_RETRIES": "1"
    }
    command = [sys.executable, "-c", SCRIPT, ray.get_runtime_context().gcs_address]
    strangers = [
        subprocess.Popen(command, env=inherited | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for settings in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    ]
    for stranger in strangers:
        said, error = stranger.communicate(timeout=120)
        assert said == "refused\n", error
