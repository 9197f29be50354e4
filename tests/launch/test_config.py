from __future__ import annotations

import math

import pytest

from services.launch.config import GangConfig


@pytest.mark.parametrize("field", ["start_timeout", "link_timeout", "heartbeat"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_deadlines_are_times(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}; allowed: above 0"):
        GangConfig(**{field: value})


@pytest.mark.parametrize("field", ["target_resource", "draft_resource"])
@pytest.mark.parametrize("value", ["", " ", "GPU", "memory"])
def test_marks_of_hosts_are_custom_resources(field, value):
    with pytest.raises(ValueError, match=f"{field}='{value}'; allowed: a name of `ray start --resources`, none of CPU"):
        GangConfig(**{field: value})
