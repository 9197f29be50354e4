"""Runs the chart's manifests without a cluster: two replicas behind the router are installed, called, upgraded, killed
and drained.

    sudo python -m tests.deploy.emulated_cluster --directory /var/tmp/emulated-cluster

Pods are local processes in namespaces of their own; `cluster`, `pod` and `api` stand in for Kubernetes. Prints its
observations, then a table; exits with 1 if anything differs from docs/kubernetes.md. Takes about five minutes and 12
GB."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.deploy.emulated_cluster import network
from tests.deploy.emulated_cluster.scenario import ReleaseScenario


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="new; where logs and volumes go")
    directory = parser.parse_args().directory.resolve()
    if why := network.available():
        parser.error(f"pods need namespaces of Linux, and to be root: {why}")
    if directory.exists():
        parser.error(f"--directory {directory}: exists; give one that does not")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return ReleaseScenario(directory).run()


if __name__ == "__main__":
    sys.exit(main())
