from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from services.link import distributed
from services.link.store import StoreServer, connect_store


def test_gloo_listens_on_the_network_of_the_store(monkeypatch):
    """Not at the address of the machine's own name: on many machines that is the loopback interface, which other
    machines cannot reach."""
    asked, create = [], dist.ProcessGroupGloo.create_device
    monkeypatch.setattr(
        dist.ProcessGroupGloo, "create_device", lambda hostname: asked.append(hostname) or create(hostname=hostname)
    )
    server = StoreServer("127.0.0.1", "secret", 30.0)
    stores = [server.store, connect_store("127.0.0.1", server.port, "secret", 30.0)]
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: distributed.make_group(stores[rank], "group", rank, 2, 30), range(2)))
        got = torch.zeros(3)
        works = [groups[0].send([torch.arange(3.0)], 1, 0), groups[1].recv([got], 0, 0)]
        for work in works:
            work.wait()
    assert asked == ["127.0.0.1"] * 2 and got.tolist() == [0, 1, 2]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_way_to_this_machine_is_the_loopback_interface(host):
    assert distributed._address_towards(host) == host
