"""Egress of a release's pods: to each other, to DNS and to the listed destinations, by the rules of Kubernetes'
policies."""

from __future__ import annotations

import ipaddress
import re

import pytest

from tests.deploy.chart import KUBERNETES, all_of_kind, check, render, templates

# A single process renders each variant of the chart once.
pytestmark = pytest.mark.xdist_group("chart")

CLOSED = {"networkPolicy": {"enabled": True, "egress": {"enabled": True}}}
HUB = {"cidr": "203.0.113.0/24", "except": ["203.0.113.9/32"], "ports": [443, 8443]}
API = {"cidr": "10.0.0.1/32", "ports": [6443]}
SOURCE = {"http": {"url": "https://models.example/a", "sha256": "0" * 64}}
DOWNLOADED = {
    "models": {
        **{side: {"source": SOURCE} for side in ("target", "draft")},
        "volume": {"persistentVolumeClaim": {"claimName": "models"}},
    }
}
BATCH = {"batch": {"enabled": True, "volume": {"persistentVolumeClaim": {"claimName": "data"}}}}
STORED = {"batch": {"enabled": True, "input": "s3://questions/in/", "output": "s3://questions/out/"}}
ROUTER = {"topology": "pod", "router": {"enabled": True, "controlKeySecret": "control"}}
DNS_POD = ({"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"})


def closed(**egress: object) -> dict:
    return {"networkPolicy": {"enabled": True, "egress": {"enabled": True, **egress}}}


def matches(selector: dict | None, labels: dict) -> bool:
    return (selector or {}).get("matchLabels", {}).items() <= labels.items()


class Cluster:
    """The objects of a release; decides on connections as a network plugin would. Its own pods are in namespace
    `llm`."""

    def __init__(self, *layers: dict) -> None:
        objects = render(*layers)
        self.policies = [each["spec"] for each in all_of_kind(objects, "NetworkPolicy").values()]
        self.labels = {name: each["metadata"]["labels"] for name, each in templates(objects).items()}
        for each in all_of_kind(objects, "NetworkPolicy").values():
            for version in KUBERNETES:
                check(each, version)

    def _rules(self, pod: str) -> list[dict] | None:
        """Return the egress rules of a pod; None if no policy applies, so that all egress is allowed."""
        chosen = [
            policy
            for policy in self.policies
            if "Egress" in policy["policyTypes"] and matches(policy["podSelector"], self.labels[pod])
        ]
        return [rule for policy in chosen for rule in policy.get("egress", ())] if chosen else None

    def _allowed(self, pod: str, port: int, protocol: str, is_peer) -> bool:
        rules = self._rules(pod)
        return rules is None or any(
            any(map(is_peer, rule.get("to", ())))
            and ("ports" not in rule or {"port": port, "protocol": protocol} in rule["ports"])
            for rule in rules
        )

    def reaches_address(self, pod: str, address: str, port: int, protocol: str = "TCP") -> bool:
        def is_peer(peer: dict) -> bool:
            block = peer.get("ipBlock")
            given = ipaddress.ip_address(address)
            return (
                block is not None
                and given in ipaddress.ip_network(block["cidr"])
                and not any(given in ipaddress.ip_network(out) for out in block.get("except", ()))
            )

        return self._allowed(pod, port, protocol, is_peer)

    def reaches_pod(self, pod: str, namespace: dict | None, labels: dict, port: int, protocol: str = "TCP") -> bool:
        """Return whether a pod reaches another. `namespace`: labels of the other pod's namespace; None: the release's
        own."""

        def is_peer(peer: dict) -> bool:
            if "ipBlock" in peer or ("namespaceSelector" in peer) != (namespace is not None):
                return False
            return matches(peer.get("namespaceSelector"), namespace or {}) and matches(peer.get("podSelector"), labels)

        return self._allowed(pod, port, protocol, is_peer)


@pytest.mark.parametrize(
    "layer", [BATCH, {"topology": "pod"}, ROUTER | closed(api=[API]), DOWNLOADED | closed(models=[HUB])]
)
def test_pods_reach_each_other_and_dns_and_no_address_outside(layer):
    """Ranks and Ray use arbitrary ports."""
    cluster = Cluster(CLOSED, layer)
    for pod in cluster.labels:
        assert all(cluster.reaches_pod(pod, None, labels, 40123) for labels in cluster.labels.values())
        assert all(cluster.reaches_pod(pod, *DNS_POD, 53, protocol) for protocol in ("UDP", "TCP"))
        assert not cluster.reaches_pod(pod, *DNS_POD, 443)
        assert not cluster.reaches_pod(pod, None, {"app": "database"}, 5432)
        assert not any(cluster.reaches_address(pod, address, 443) for address in ("198.51.100.1", "169.254.169.254"))


def test_only_the_download_reaches_where_models_come_from():
    cluster = Cluster(closed(models=[HUB, {"cidr": "2001:db8::/32"}]), DOWNLOADED, BATCH)
    for pod in cluster.labels:
        for address, port in (("203.0.113.5", 443), ("203.0.113.5", 8443), ("2001:db8::5", 443)):
            assert cluster.reaches_address(pod, address, port) is (pod == "models"), (pod, address, port)
    assert not cluster.reaches_address("models", "203.0.113.5", 22)
    assert not cluster.reaches_address("models", "203.0.113.9", 443), "taken out by `except`"
    assert not cluster.reaches_address("models", "2001:db8::5", 80), "443 by default"


def test_only_the_router_reaches_the_api():
    cluster = Cluster(ROUTER, closed(api=[API]))
    assert [pod for pod in cluster.labels if cluster.reaches_address(pod, "10.0.0.1", 6443)] == ["router"]


def test_other_servers_of_dns_and_rules_of_ones_own():
    collector = {"to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}], "ports": [{"port": 4317, "protocol": "TCP"}]}
    cache = {"to": [{"ipBlock": {"cidr": "169.254.20.10/32"}}], "ports": [5353]}
    cluster = Cluster(closed(rules=[collector], dns=cache))
    for pod in cluster.labels:
        assert cluster.reaches_address(pod, "192.0.2.7", 4317) and not cluster.reaches_address(pod, "192.0.2.8", 4317)
        assert cluster.reaches_address(pod, "169.254.20.10", 5353, "UDP")
        assert not cluster.reaches_pod(pod, *DNS_POD, 53, "UDP")


def test_the_ways_out_are_open_unless_asked():
    """By default a release has a policy for what comes in: ports between its pods are not encrypted."""
    cluster = Cluster(DOWNLOADED)
    assert [policy["policyTypes"] for policy in cluster.policies] == [["Ingress"]]
    assert all(cluster.reaches_address(pod, "198.51.100.1", 443) for pod in cluster.labels)
    assert not Cluster({"networkPolicy": {"enabled": False}}, DOWNLOADED).policies


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (DOWNLOADED | CLOSED, "networkPolicy.egress.models is empty; models are downloaded"),
        (ROUTER | CLOSED, "networkPolicy.egress.api is empty; the router finds replicas through Kubernetes' API"),
        (closed(models=[HUB]), "networkPolicy.egress.models=["),
        (STORED | CLOSED, "networkPolicy.egress.rules is empty; batch reads or writes s3://questions/in/"),
        (closed(api=[API]), "has no effect with router.enabled=false"),
        (
            {"networkPolicy": {"enabled": True, "egress": {"rules": [{"ports": [{"port": 80}]}]}}},
            "has no effect with networkPolicy.egress.enabled=false",
        ),
        (
            {"networkPolicy": {"enabled": False, "egress": {"enabled": True}}},
            "networkPolicy.egress.enabled=true has no effect with networkPolicy.enabled=false",
        ),
        (closed(models=[{"cidr": "models.example"}]), "/networkPolicy/egress/models/0/cidr"),
        (closed(models=[{"cidr": "10.0.0.0/33"}]), "/networkPolicy/egress/models/0/cidr"),
        (closed(models=[{"cidr": "10.0.0.0/8", "ports": [0]}]), "/networkPolicy/egress/models/0/ports/0"),
        (closed(models=[{"cidr": "10.0.0.0/8", "port": 443}]), "port"),
        (closed(dns={"to": []}), "/networkPolicy/egress/dns/to"),
        (closed(rules=[{}]), "/networkPolicy/egress/rules/0"),
    ],
)
def test_wrong_values_are_refused(layer, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        render(layer)
