"""Names of tests without the groups that xdist runs them in.

xdist adds "@ray" to the name of a test of the group "ray". That is what pytest would remember of one that has failed,
and `--last-failed`, which knows no groups in a process of its own, would find none of that name and run all tests."""

from __future__ import annotations

import re

import pytest

GROUP = re.compile(r"@[^@\]]+$")
"""At the end of a name; an @ in brackets is a parameter's own."""


class Ungrouped:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        where, separator, name = report.nodeid.rpartition("::")
        report.nodeid = where + separator + GROUP.sub("", name)


def pytest_configure(config: pytest.Config) -> None:
    # Workers and the process that they report to know tests by those names.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ungrouped())
