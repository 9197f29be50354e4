"""Many lines in flight: answers are written in order, memory is bounded, and a failing line affects no other."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from services.backend import RequestFailed, Unavailable
from services.batch.lines import RequestReader
from services.batch.runner import WINDOW, BatchRunner, Limit, ServiceLost
from smc.api.constraint import ConstraintFailed
from smc.api.request import FinishReason
from smc.scheduler.admission import QueueFull
from tests.batch.asking import PRINT, answer_of, chat, decode_at_once, line


def run(pair, lines, decode, limit, write=None, window=WINDOW) -> list[dict]:
    records = []
    runner, take = BatchRunner(pair, RequestReader(pair, 0), decode, PRINT, limit, window), write or records.append
    asyncio.run(runner.run(lines, lambda record, is_new: take(record)))
    return records


class Meter:
    """Decodes after a short random delay and records the largest number of requests and of rows at a time."""

    def __init__(self) -> None:
        self.now = self.most = self.most_rows = self.rows = 0
        self._rng = random.Random(0)

    async def __call__(self, request):
        self.now, self.rows = self.now + 1, self.rows + request.params.rows
        self.most, self.most_rows = max(self.most, self.now), max(self.most_rows, self.rows)
        await asyncio.sleep(self._rng.random() * 0.005)
        self.now, self.rows = self.now - 1, self.rows - request.params.rows
        return answer_of(request)


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_order(pair, count):
    records = run(pair, [line(chat(f"{i}"), i + 1) for i in range(count)], Meter(), Limit(9))
    assert [record["custom_id"] for record in records] == [f"{i}" for i in range(count)]
    assert all(record["error"] is None for record in records)


def test_no_more_requests_than_allowed(pair):
    meter = Meter()
    run(pair, [line(chat(f"{i}"), i + 1) for i in range(50)], meter, Limit(5))
    assert meter.most == 5 and meter.now == 0


def test_no_more_particles_than_allowed_but_one_request_at_least(pair):
    """The rows in flight stay within the limit, except that one larger request may run alone."""
    meter, sizes = Meter(), [4, 1, 60, 3, 8, 16, 2, 5] * 5
    run(
        pair,
        [line(chat(f"{i}", method="smc", particles=size), i + 1) for i, size in enumerate(sizes)],
        meter,
        Limit(20, in_slots=True),
    )
    assert meter.most > 1 and meter.most_rows == 60
    run(
        pair,
        [line(chat(f"{i}", method="smc", particles=4), i + 1) for i in range(30)],
        small := Meter(),
        Limit(20, in_slots=True),
    )
    assert small.most_rows == 20


def test_a_slow_line_stops_the_reading_of_others(pair):
    """A slow line stops the reading of further lines, as otherwise all answers of a long file could accumulate in
    memory."""
    read, waiting = [], []

    def lines():
        for i in range(100):
            read.append(i)
            yield line(chat(f"{i}"), i + 1)

    async def decode(request):
        if request.request_id == "1":
            await asyncio.sleep(0.2)
            waiting.append(len(read))
        return await decode_at_once(request)

    assert len(run(pair, lines(), decode, Limit(50), window=10)) == 100
    assert 10 <= waiting[0] <= 13


def test_a_record_is_written_as_soon_as_all_before_it_are(pair):
    written, seen = [], []

    async def decode(request):
        number = int(request.request_id)
        if number == 8:
            await asyncio.sleep(0.1)
            seen.append(len(written))
        return answer_of(request)

    records = run(pair, [line(chat(f"{i}"), i + 1) for i in range(10)], decode, Limit(10), written.append)
    assert seen == [7] and records == [] and len(written) == 10


def test_lines_that_fail_are_records_in_their_place(pair):
    """A failed line has a record with its error code, in the order of the lines."""
    errors = {
        2: ValueError("too long"),
        4: RequestFailed("NaN"),
        5: Unavailable("gone"),
        6: QueueFull("full"),
        7: RuntimeError("ours"),
    }

    async def decode(request):
        await asyncio.sleep(0)
        if error := errors.get(int(request.request_id)):
            raise error
        return answer_of(request)

    lines = [line(chat(f"{i}") if i != 3 else chat("3", n=0), i) for i in range(1, 10)]
    records = run(pair, lines, decode, Limit(3))
    assert [record["custom_id"] for record in records] == [f"{i}" for i in range(1, 10)]
    codes = [record["error"] and record["error"]["code"] for record in records]
    assert codes == [None, "invalid", "invalid", "failed", "unavailable", "queue_full", "internal", None, None]
    assert records[2]["error"]["message"].startswith("line 3: n=0; allowed")


def test_the_loss_of_the_service_ends_the_run_and_no_line(pair):
    """When the service is lost the run ends, and lines without an answer are not written as failed, because the next
    run must do them."""
    written = []

    async def decode(request):
        await asyncio.sleep(0.001)
        if int(request.request_id) > 5:
            raise ServiceLost("it is gone")
        return answer_of(request)

    with pytest.raises(ServiceLost, match="it is gone"):
        run(pair, [line(chat(f"{i}"), i) for i in range(1, 50)], decode, Limit(2), written.append)
    assert [(record["custom_id"], record["error"]) for record in written] == [(f"{i}", None) for i in range(1, 6)]


def test_a_full_disk_ends_the_run(pair):
    def write(record):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run(pair, [line(chat(f"{i}"), i) for i in range(1, 50)], decode_at_once, Limit(2), write)


def test_a_constraint_that_fails_ends_its_line_alone(pair):
    """With the caller's error, whether it fails while the answer is decoded or the answer ends wrongly."""
    constraint = {"structured_outputs": {"regex": "[0-9]{3}"}}

    async def decode(request):
        if request.request_id == "1":
            raise ConstraintFailed("constraint: the regex takes too much time for a few tokens; simplify it")
        return replace(answer_of(request), tokens=(), finish_reason=FinishReason.EOS)

    lines = [line(chat(f"{i}", **(constraint if i < 3 else {})), i) for i in range(1, 4)]
    slow, wrong, other = run(pair, lines, decode, Limit(3))
    assert slow["error"]["code"] == wrong["error"]["code"] == "constraint"
    assert "takes too much time" in slow["error"]["message"]
    assert "where the regex does not allow an end" in wrong["error"]["message"]
    assert other["error"] is None
