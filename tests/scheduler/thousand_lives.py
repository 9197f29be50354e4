"""One long run of `tests.scheduler.test_lives`: `python -m tests.scheduler.thousand_lives [--requests 1000]`, some
minutes.

Every request is admitted, grown, shrunk, preempted, cancelled, cut short or answered, in a pool too small for all, with
a prefix cache. Then every page is free or cached, references equal table entries, and whoever was left alone has the
answer of endless memory."""

from __future__ import annotations

import argparse

import pytest

from tests.scheduler.test_lives import CONFIGS, check_lives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    given = parser.parse_args()
    for config, ahead in zip(CONFIGS, (False, True, True, True), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            compared, events = check_lives(config, ahead, patch, given.requests)
        happened = ", ".join(f"{count} {event}" for event, count in events.most_common())
        setting = f"{config.form} K={config.block} F={config.branches}, {config.cohorts} cohorts"
        print(f"{setting}: {given.requests} lives, {compared} answers as with endless memory; {happened}", flush=True)


if __name__ == "__main__":
    main()
