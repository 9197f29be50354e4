"""Names of tests without the groups that xdist runs them in.

xdist appends "@ray" to the name of a test of the group "ray". pytest would remember a failed test by that name, and
`--last-failed` in a single process, which has no groups, would not find it and run all tests."""

from __future__ import annotations

import re

import pytest

GROUP = re.compile(r"@[^@\]]+$")
"""The group at the end of a name; an @ inside brackets belongs to a parameter."""


class Ungrouped:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        where, separator, name = report.nodeid.rpartition("::")
        report.nodeid = where + separator + GROUP.sub("", name)


def pytest_configure(config: pytest.Config) -> None:
    # xdist's workers and their main process identify tests by the names with groups.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ungrouped())
