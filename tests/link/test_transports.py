"""Both transports between real ends: order and size of messages, silence, a peer that dies, and another incarnation of
the worker group."""

from __future__ import annotations

import errno
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.launch.config import WorkerGroupConfig
from services.launch.worker_group import rank_spec
from services.link.base import LinkError, PeerEnd
from services.link.connect import LeaderEnds, MessagePeer, Rendezvous, coordinator_end, leader_ends, peer_end
from services.link.distributed import FRAME
from services.link.messages import TRANSFERS, Transfer, check_incarnation
from services.link.store import StoreServer
from services.link.streams import StreamCaller, StreamServer, is_proven
from services.workers.process import _reconnection
from services.workers.rank import PeerChannel
from smc.arrays import FieldMemory, field
from smc.executor.graph_runner import StageRunner
from smc.model.parallel import Shard
from smc.round import tensors
from smc.round.tensors import DraftedRows, RoundSelection, message_layouts
from smc.types import ModelRole

CPU = torch.device("cpu")
INCARNATION = 3


@pytest.fixture(params=["nccl", "grpc"])
def link(request) -> str:
    return request.param


@contextmanager
def connected(link: str) -> Iterator[tuple[dict, dict[str, LeaderEnds]]]:
    """The coordinator's ends and the leaders' ends, by model role, in threads instead of processes."""
    store = StoreServer("127.0.0.1", "secret", 20.0)
    ends, leaders = connect(Rendezvous("127.0.0.1", store.port, INCARNATION, "secret", link, 20.0), ("draft", "target"))
    try:
        yield ends, leaders
    finally:
        close(*ends.values(), *leaders.values())


def close(*ends) -> None:
    """Close all ends at the same time, as processes do: an end waits for the other one."""
    with ThreadPoolExecutor(len(ends)) as pool:
        list(pool.map(lambda end: end.close(), ends))


def connect(
    where: Rendezvous, sides: tuple[str, ...], meanwhile: Callable[[], None] = lambda: None
) -> tuple[dict, dict[str, LeaderEnds]]:
    leaders: dict[str, LeaderEnds] = {}

    def lead(side: str) -> None:
        leaders[side] = leader_ends(where, where.store(), side, "127.0.0.1", CPU)

    threads = [threading.Thread(target=lead, args=(side,)) for side in sides]
    for thread in threads:
        thread.start()
    ends = {side: coordinator_end(where, where.store(), side) for side in sides}
    meanwhile()
    for thread in threads:
        thread.join(20)
    return ends, leaders


@pytest.mark.parametrize("size", [0, FRAME - 200, FRAME - 8, FRAME, 5 * FRAME + 1])
def test_messages_of_any_size_in_order(link, size):
    with connected(link) as (ends, leaders):
        for number in range(1, 4):
            big = bytes([number]) + bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            ends["draft"].send(big)
            ends["draft"].send(b"small")
            assert leaders["draft"].coordinator.receive(5.0) == big
            assert leaders["draft"].coordinator.receive(5.0) == b"small"
            leaders["draft"].coordinator.send(big)
            assert ends["draft"].receive(5.0) == big


def test_many_messages_before_the_first_is_received(link):
    """A burst, for example when many requests end at once while the other end is busy, loses no message."""
    with connected(link) as (ends, leaders):
        sending = threading.Thread(target=lambda: [ends["draft"].send(str(i).encode()) for i in range(300)])
        sending.start()
        time.sleep(0.2)
        assert [int(leaders["draft"].coordinator.receive(5.0)) for _ in range(300)] == list(range(300))
        sending.join(5)


@pytest.mark.parametrize("sides", [("draft", "target"), ("target", "draft")])
def test_what_one_leader_sends_the_other_receives(link, sides):
    with connected(link) as (_, leaders):
        sender, receiver = (leaders[side].peer for side in sides)
        for shape, dtype in (((3, 2), torch.int32), ((1, 8), torch.int64), ((2, 5, 4, 3), torch.float32)):
            sent, here = torch.randint(0, 99, shape).to(dtype), torch.empty(shape, dtype=dtype)
            tensor = sent.clone()
            sender.send("blocks", tensor)
            sender.send("choice", tensor + 1)
            tensor.zero_()  # the message holds the values at the time of `send`
            sender.settle()
            for name, more in (("blocks", 0), ("choice", 1)):
                receiver.receive(name, here, 5.0)
                assert torch.equal(here, sent + more)


@pytest.mark.parametrize(("sent", "name"), [(("first", "first"), "first"), (("first",), "blocks")])
def test_a_message_out_of_turn_is_refused(link, sent, name):
    """A message that is lost, here the first of two, or of another name."""
    with connected(link) as (_, leaders):
        here = torch.zeros(1, 1, dtype=torch.int64)
        for each in sent:
            leaders["draft"].peer.send(each, here)
        for _ in sent[1:]:
            leaders["target"].peer._end.receive(5.0)
        with pytest.raises(LinkError, match=f"first, number {len(sent)}, came; expected {name}, number 1"):
            leaders["target"].peer.receive(name, here, 5.0)


def test_silence_ends_at_the_deadline(link):
    with connected(link) as (ends, leaders):
        for wait in (
            lambda: ends["target"].receive(0.3),
            lambda: leaders["target"].peer.receive("first", torch.zeros(1), 0.3),
        ):
            begin = time.monotonic()
            with pytest.raises(LinkError, match=r"0\.3 s"):
                wait()
            assert 0.2 < time.monotonic() - begin < 3


def test_the_other_side_closes(link):
    with connected(link) as (ends, leaders):
        close(leaders.pop("draft"), leaders["target"].peer)
        with pytest.raises(LinkError):
            ends["draft"].receive(5.0)


def meet(channel: PeerChannel, incarnation: int, make) -> None:
    """Reconnect repeatedly until another leader is at the other end."""
    while not channel.reconnect(incarnation, make):
        time.sleep(0.01)


def test_a_target_outlives_one_draft_after_the_other(link):
    """Messages expected from a lost draft are read as zeros until another draft is connected; a draft that never
    arrives counts as lost, too."""
    store = StoreServer("127.0.0.1", "secret", 20.0)
    where = Rendezvous("127.0.0.1", store.port, INCARNATION, "secret", link, 20.0)
    ends, leaders = connect(where, ("draft", "target"))
    target, draft = leaders["target"], leaders.pop("draft")
    channel = PeerChannel(target.peer, None, StageRunner(CPU), 5.0, host_waits=True, outlives_peer=True)
    ask = lambda: channel.receive((), "rows", (2, 3), torch.int32).tolist()  # noqa: E731
    for incarnation in (INCARNATION + 1, INCARNATION + 2):
        there = PeerChannel(draft.peer, None, StageRunner(CPU), 5.0, host_waits=True)
        for number in (7, 8):
            there.send((), "rows", torch.full((2, 3), number, dtype=torch.int32))
            channel.send((), "choice", torch.ones(4))
            assert ask() == [[number] * 3] * 2
            assert there.receive((), "choice", (4,), torch.float32).tolist() == [1.0] * 4
        closing = threading.Thread(target=draft.close)
        closing.start()
        assert ask() == [[0] * 3] * 2 == ask()
        channel.send((), "choice", torch.ones(4))
        nobody = replace(where, incarnation=99, start_timeout=0.3)
        with pytest.raises(RuntimeError):
            meet(
                channel,
                99,
                lambda at=nobody: peer_end(at, at.store(), "draft" if link == "grpc" else "target", CPU, target.server),
            )
        assert ask() == [[0] * 3] * 2
        again = replace(where, incarnation=incarnation)

        def renew(at=again):
            meet(channel, at.incarnation, lambda: peer_end(at, at.store(), "target", CPU, target.server))

        more, drafts = connect(again, ("draft",), renew)
        closing.join(10)
        draft = drafts["draft"]
        ends[f"draft of {incarnation}"] = more["draft"]
    close(channel, *ends.values(), draft, target)


def test_a_draft_that_never_comes_delays_no_other(link):
    """A draft may be lost again before it connects, while the target waits for it."""
    store = StoreServer("127.0.0.1", "secret", 20.0)
    where = Rendezvous("127.0.0.1", store.port, INCARNATION, "secret", link, 20.0)
    ends, leaders = connect(where, ("draft", "target"))
    target, config = leaders["target"], WorkerGroupConfig(link=link)
    spec = rank_spec(config, config.serving_pair(), where, "target", Shard())
    channel = PeerChannel(target.peer, None, StageRunner(CPU), 5.0, host_waits=True, outlives_peer=True)
    reconnect = _reconnection(spec, channel, target)
    reconnect(INCARNATION + 1, 15.0)
    time.sleep(0.5)
    begin = time.monotonic()

    def renew() -> None:
        while not reconnect(INCARNATION + 2, 15.0):
            time.sleep(0.01)

    more, drafts = connect(replace(where, incarnation=INCARNATION + 2), ("draft",), renew)
    assert time.monotonic() - begin < 10
    drafts["draft"].peer.send("rows", torch.ones(2))
    assert channel.receive((), "rows", (2,), torch.float32).tolist() == [1.0, 1.0]
    close(channel, *ends.values(), *more.values(), *leaders.values(), *drafts.values())


def test_an_attempt_to_reconnect_without_a_socket_fails_alone():
    """The target, which outlives its drafts, must not end with it."""
    with connected("grpc") as (_, leaders):
        channel = PeerChannel(leaders["target"].peer, None, StageRunner(CPU), 5.0, host_waits=True, outlives_peer=True)

        def make() -> PeerEnd:
            raise OSError(errno.EMFILE, "Too many open files")

        with pytest.raises(LinkError, match="Too many open files"):
            meet(channel, INCARNATION + 1, make)
        assert channel.receive((), "rows", (2,), torch.int32).tolist() == [0, 0]


def test_cluster_requires_token():
    """A caller without the worker group's secret can neither send commands nor publish tokens."""
    with connected("grpc") as (_, leaders):
        address = leaders["target"].server.address
        stranger = StreamCaller(address, "guess", "Work")
        with pytest.raises(LinkError, match="another worker group"):
            stranger.send(b"ping")
            stranger.receive(5.0)
        stranger.close()
        caller = MessagePeer(StreamCaller(address, "guess", "Exchange"), INCARNATION)
        with pytest.raises(LinkError):
            for _ in range(100):
                caller.send("first", torch.zeros(1, 1, dtype=torch.int64))
                time.sleep(0.02)
        caller.close()


def test_forged_addresses_reveal_no_secret():
    """Any process that reaches the store may write to it, so forged addresses are refused. A call that reaches a wrong
    server reveals no secret, and its proof is invalid at any other server."""
    store = StoreServer("127.0.0.1", "secret", 20.0)
    where = Rendezvous("127.0.0.1", store.port, INCARNATION, "secret", "grpc", 20.0)
    store.store.set(where.name("draft/address"), "127.0.0.1:1")
    with pytest.raises(LinkError, match=r"'127.0.0.1:1', was not written by this worker group"):
        coordinator_end(where, where.store(), "draft")
    heard = []

    class Listening(StreamServer):
        def Work(self, messages, context):
            heard.append(dict(context.invocation_metadata()))
            return iter(())

    there, here = Listening("127.0.0.1", "another"), StreamServer("127.0.0.1", "secret")
    StreamCaller(there.address, "secret", "Work").close()
    assert "secret" not in " ".join(heard[0].values()) and not is_proven(heard[0].items(), "secret", here.address)
    assert is_proven(heard[0].items(), "secret", there.address)
    for server in (there, here):
        server.close()


def swapped(fields: FieldMemory) -> FieldMemory:
    """The layout of a build that has two fields of the same type in the other order."""
    like = fields._like
    names = [name for name in like._fields if name not in ("taken_A", "cut_A", "root_X", "count_X")]
    first = ("cut_A", "taken_A") if "taken_A" in like._fields else ("count_X", "root_X")
    other = namedtuple(type(like).__name__, (*first, *names))
    return FieldMemory(other(**like._asdict()))


def wider(fields: FieldMemory) -> FieldMemory:
    """The layout of a build that has a field of another type."""
    like = fields._like
    return FieldMemory(like._replace(**{like._fields[-1]: field(np.float64, like[-1].shape)}))


@pytest.mark.parametrize("kind", [DraftedRows, RoundSelection])
@pytest.mark.parametrize("change", [swapped, wider])
def test_a_leader_whose_tensors_lie_otherwise_is_refused(link, kind, change, monkeypatch):
    """A build whose commands are the same, but not the tensors that the leaders exchange as bytes."""
    store = StoreServer("127.0.0.1", "secret", 20.0)
    where = Rendezvous("127.0.0.1", store.port, INCARNATION, "secret", link, 2.0)
    where.check_layouts(where.store())
    where.check_layouts(where.store())
    layout = kind.memory
    monkeypatch.setattr(kind, "memory", lambda *sizes: change(layout(*sizes)))
    server = StreamServer("127.0.0.1", "secret") if link == "grpc" else None
    for role in ModelRole:
        with pytest.raises(LinkError, match="must run the same version of smcserve"):
            peer_end(where, where.store(), role, CPU, server)
    if server is not None:
        server.close()
    replace(where, incarnation=INCARNATION + 1).check_layouts(where.store())


def test_the_layouts_of_all_messages_between_models_are_compared():
    """What has a layout in one piece of memory is sent."""
    sent = {
        name
        for name, kind in vars(tensors).items()
        if isinstance(kind, type) and isinstance(vars(kind).get("memory"), staticmethod)
    }
    assert sent == {line.partition(".")[0] for line in message_layouts().splitlines() if " at " in line}


def test_messages_of_another_incarnation_are_refused(link):
    with connected(link) as (_, leaders):
        leaders["draft"].peer._end.send(TRANSFERS.encode(Transfer(INCARNATION + 1, "first", 1, b"")))
        with pytest.raises(LinkError, match="incarnation 4 arrived in incarnation 3"):
            leaders["target"].peer.receive("first", torch.zeros(0), 5.0)
    check_incarnation(Transfer(INCARNATION, "first", 1, b""), INCARNATION)
