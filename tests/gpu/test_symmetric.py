"""Sums in symmetric memory against NCCL's, eager and in a CUDA graph, between ranks that each see one GPU."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch

from services.link.store import StoreServer

SECRET = "secret"
SHAPES = [(1, 2048), (8, 2048), (32, 2048), (1, 8192), (8, 8192), (40, 8192), (72, 8192), (32, 1)]


def summed(rank: int, degree: int, port: int, results: multiprocessing.Queue) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    from services.link.distributed import make_group
    from services.link.store import connect_store
    from services.workers.tensor_parallel import SymmetricSum

    store = connect_store("127.0.0.1", port, SECRET, 60.0)
    few = SymmetricSum.between(store, "few", rank, degree)
    group = make_group(store, "many", rank, degree, 60.0, torch.device("cuda"))
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            part = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(rank), device="cuda").to(dtype)
            whole = part.float().clone()
            group.allreduce([whole]).wait()
            summed_here = lambda x: few(few.room(*x.shape, x.dtype).copy_(x))  # noqa: E731
            eager = summed_here(part).clone()
            replayed, micros = timed(summed_here, part)
            over_nccl = timed(lambda x: group.allreduce([x]).wait(), part.clone())[1]
            results.put(
                (
                    rank,
                    shape,
                    str(dtype),
                    [x.float().cpu().numpy() for x in (eager, replayed, whole)],
                    micros,
                    over_nccl,
                )
            )


def timed(operation, part: torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """Return the operation's result, and the microseconds of one replayed operation."""
    torch.cuda.synchronize()
    stream, graph, start, end = (
        torch.cuda.Stream(),
        torch.cuda.CUDAGraph(),
        *(torch.cuda.Event(enable_timing=True) for _ in range(2)),
    )
    with torch.cuda.stream(stream):
        operation(part)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(20):
                result = operation(part)
        graph.replay()
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        return result.clone() if isinstance(result, torch.Tensor) else None, 1e3 * start.elapsed_time(end) / 200


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_sums_are_those_of_nccl_and_the_same_on_every_rank(degree):
    if torch.cuda.device_count() < degree:
        pytest.skip(f"needs {degree} GPUs")
    context = multiprocessing.get_context("spawn")
    store, results = StoreServer("127.0.0.1", SECRET, 60.0), context.Queue()
    ranks = [
        context.Process(target=summed, args=(rank, degree, store.port, results), daemon=True) for rank in range(degree)
    ]
    for rank in ranks:
        rank.start()
    first = {}
    for _ in range(degree * len(SHAPES) * 2):
        rank, shape, dtype, (eager, replayed, whole), micros, over_nccl = results.get(timeout=90)
        if rank == 0:
            print(f"{degree} GPUs {shape} {dtype}: {micros:.1f} us, NCCL {over_nccl:.1f} us")
        tolerance = 1e-5 if "float32" in dtype else 0.05
        torch.testing.assert_close(torch.from_numpy(eager), torch.from_numpy(whole), rtol=tolerance, atol=tolerance)
        assert (eager == replayed).all()
        assert (first.setdefault((shape, dtype), eager) == eager).all()
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
