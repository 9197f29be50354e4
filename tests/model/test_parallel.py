"""Tensor parallelism: the ranks of a model compute what a single rank computes, and their shards cover the model
without overlap."""

from __future__ import annotations

import math
import multiprocessing
import time
from datetime import timedelta
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch import distributed as dist
from torch import multiprocessing as mp

from smc.memory.kv_cache import KVPool
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, RopeTable
from smc.model.loader import load_model, save_model
from smc.model.parallel import Axis, Heads, Shard, Split, held_sizes, local_config
from smc.model.weight_map import weight_slices
from tests.model.dense import attend
from tests.model.tiny import random_decoder, save_tiny, tiny_config

SHAPES = {
    "three heads": {"num_heads": 6, "num_kv_heads": 3, "intermediate_size": 47, "tied_embeddings": True},
    "four heads of two": {"num_heads": 8, "num_kv_heads": 4, "intermediate_size": 48},
    "two heads of seven": {"num_heads": 14, "num_kv_heads": 2, "intermediate_size": 49, "tied_embeddings": True},
    "eight heads": {"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 50},
    "ranks without inner features": {"num_heads": 6, "num_kv_heads": 1, "intermediate_size": 1},
}
CASES = {
    f"{family}, {shape}": {"family": family, **SHAPES[shape]}
    for family in ("llama", "qwen2", "qwen3")
    for shape in SHAPES
}
each_case = pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
DEGREES = (1, 2, 3, 4, 6)
RANKS = max(DEGREES)
PATIENCE = timedelta(seconds=120)


def outputs(model: Decoder) -> tuple[Tensor, Tensor]:
    """Return hidden states [T, E] and logits [T, V] of one sequence."""
    tokens_T = torch.randint(300, (40,), generator=torch.Generator().manual_seed(2))
    hidden_TE = model(tokens_T, RopeTable(model.config, len(tokens_T)).at(torch.arange(len(tokens_T))), attend)
    return hidden_TE, model.logits(hidden_TE)


def run_rank(rank: int, directory: Path) -> None:
    """Run every case at every degree, in a process group of that size, and save this rank's results to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS, timeout=PATIENCE
    )
    groups = {degree: dist.new_group(range(degree), timeout=PATIENCE) for degree in DEGREES}
    results = {}
    for degree, group in groups.items():
        for case in CASES if rank < degree else ():

            def reduce(part_TE: Tensor, group=group) -> Tensor:
                dist.all_reduce(part_TE, group=group)
                return part_TE

            results[case, degree] = outputs(load_model(directory / case, shard=Shard(rank, degree), reduce=reduce))
    torch.save(results, directory / f"rank{rank}.pt")
    dist.destroy_process_group()


def run_ranks(directory: Path) -> list[dict[tuple[str, int], tuple[Tensor, Tensor]]]:
    """Start one process per rank. Fails if a rank fails or if they take too long."""
    # Ranks are forked from a process that has imported torch.
    multiprocessing.set_forkserver_preload([__name__])
    arguments = {"nprocs": RANKS, "join": False, "daemon": True, "start_method": "forkserver"}
    context = mp.start_processes(run_rank, (directory,), **arguments)
    deadline = time.monotonic() + 2 * PATIENCE.total_seconds()
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks did not end"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(RANKS)]


def test_ranks_compute_what_one_does(tmp_path):
    """A single test for all cases, because the processes take longer to start than to run."""
    for case, changes in CASES.items():
        save_tiny(tmp_path / case, **changes)
    ranks = run_ranks(tmp_path)
    for case in CASES:
        _, logits_TV = outputs(load_model(tmp_path / case))
        assert logits_TV.std() > 0.1, "logits too flat to tell models apart"
        for degree in DEGREES:
            (first_TE, found_TV), *others = (results[case, degree] for results in ranks[:degree])
            where = f"{case}, degree {degree}"
            torch.testing.assert_close(
                found_TV, logits_TV, atol=1e-4, rtol=0, msg=lambda text, where=where: f"{where}: {text}"
            )
            for hidden_TE, _ in others:
                assert torch.equal(hidden_TE, first_TE), f"{case}, degree {degree}: ranks differ"


def test_a_whole_model_is_one_shard(tmp_path):
    """There is no padding, and summing over one rank changes no bit."""
    config = tiny_config("qwen2")
    save_model(random_decoder(config), tmp_path)
    assert local_config(config, Shard()) == config
    alone = load_model(tmp_path, shard=Shard(0, 1), reduce=lambda part_TE: part_TE)
    assert all(torch.equal(found, expected) for found, expected in zip(outputs(alone), outputs(load_model(tmp_path))))


@pytest.mark.parametrize(
    ("changes", "degree"),
    [
        pytest.param(changes, degree, id=f"{name}-{degree}")
        for i, (name, changes) in enumerate(CASES.items())
        for degree in DEGREES[1 + i % 2 :: 2]
    ],
)
def test_shards_are_the_model(changes, degree, tmp_path):
    """Every query head and inner feature is held by one rank, every key/value head by equally many ranks, and every
    other index by all ranks. The rest of a rank's weights, its padding, is zero."""
    published = load_file(save_tiny(tmp_path, **changes) / "model.safetensors")
    config = tiny_config(**changes)
    copies = {name: torch.zeros_like(weight) for name, weight in published.items()}
    for rank in range(degree):
        model = load_model(tmp_path, shard=Shard(rank, degree), reduce=Tensor.clone)
        assert model.config == local_config(config, Shard(rank, degree))
        parameters = dict(model.named_parameters())
        for name, where in weight_slices(config, Shard(rank, degree)).items():
            for block in where.blocks():
                view = block.view(parameters)
                assert torch.equal(view, published[name][block.part]), name
                copies[name][block.part] += 1
                view.zero_()
        assert not any(weight.any() for weight in parameters.values()), "padding is not zero"
    once = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    several = Heads.of(config, degree).pieces
    for name, count in copies.items():
        expected = (
            1 if any(part in name for part in once) else several if "k_proj" in name or "v_proj" in name else degree
        )
        assert (count == expected).all(), name


def _queries_of(config: ModelConfig, shard: Shard) -> list[tuple[int, int]]:
    """Return (query head, key/value head) for each query head of a rank that is not padding, as its attention pairs
    them."""
    split, local = Split.of(config, shard), local_config(config, shard)

    def heads(axis: Axis) -> dict[int, int]:
        dim = config.head_dim
        return {
            span.start // dim + i: span.held.start // dim + i
            for span in axis.spans
            for i in range(len(span.held) // dim)
        }

    keys, per_key = heads(split.key), local.num_heads // local.num_kv_heads
    return [(query, keys[own // per_key]) for own, query in heads(split.query).items()]


def test_every_query_head_meets_its_key_head_on_one_rank():
    for kv_heads, queries in product(range(1, 9), range(1, 9)):
        config = tiny_config(num_heads=queries * kv_heads, num_kv_heads=kv_heads, intermediate_size=128)
        for degree in range(1, min(config.num_heads, 9) + 1):
            ranks = [_queries_of(config, Shard(rank, degree)) for rank in range(degree)]
            assert sorted(chain.from_iterable(ranks)) == [(head, head // queries) for head in range(config.num_heads)]
            assert all(ranks), "a rank has nothing to do"
            local = local_config(config, Shard(0, degree))
            assert all(local_config(config, Shard(rank, degree)) == local for rank in range(degree))
            if kv_heads % degree == 0:
                assert (local.num_heads, local.num_kv_heads) == (config.num_heads // degree, kv_heads // degree)
            if degree <= kv_heads:
                whole = -(-kv_heads // degree)
                read = 2 * local.num_heads + 4 * local.num_kv_heads
                assert read <= whole * (2 * queries + 4), "heads that are not cut would be read faster"


def test_expected_shard_sizes():
    """Expected numbers of query heads, key/value heads and inner features of each rank."""

    def held(heads: int, kv_heads: int, inner: int, degree: int) -> list[tuple[int, int, int]]:
        config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner)
        return list(held_sizes(config, degree))

    assert held(8, 4, 192, 3) == [(4, 2, 64), (2, 1, 64), (2, 1, 64)]
    assert held(12, 2, 192, 6) == [(2, 1, 32)] * 6
    assert held(64, 8, 28672, 6) == [(12, 3, 4800)] * 4 + [(8, 2, 4736)] * 2
    assert held(14, 2, 4864, 4) == [(4, 1, 1216), (3, 1, 1216)] * 2


def test_cuts_are_multiples_of_the_step():
    for heads, kv_heads, inner in ((14, 2, 448), (8, 4, 7), (12, 3, 192)):
        config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner)
        for degree in range(1, 8):
            for axis in ("query", "key", "inner"):
                ranks = [getattr(Split.of(config, Shard(rank, degree)), axis) for rank in range(degree)]
                assert len({(rank.size, rank.local_size, rank.step) for rank in ranks}) == 1
                cuts = [ranks[0].local_size]
                for held, start in (span for rank in ranks for span in rank.spans):
                    cuts += [held.start, held.stop, start]
                assert math.gcd(*cuts) == ranks[0].step


@pytest.mark.parametrize(("degree", "expected"), [(1, 2), (2, 1), (3, 2), (4, 1)])
def test_a_key_head_that_is_repeated_takes_memory(degree, expected):
    """With 2 key/value heads of 2 query heads each, 3 ranks hold 2, 1 and 1 key/value heads, and all reserve memory for
    2."""
    local = local_config(tiny_config(), Shard(0, degree))
    assert local.num_kv_heads == expected
    assert KVPool.page_bytes(local, torch.float32) == 2 * 2 * expected * 8 * 4
    assert KVPool(local, 3, torch.float32, "cpu").keys.shape == (2, 4, expected, 8)


def test_a_rank_reads_its_own_part_only(tmp_path):
    file = save_tiny(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    for name in ("up_proj", "down_proj"):
        weight = tensors[f"model.layers.1.mlp.{name}.weight"]
        (weight if name == "up_proj" else weight.T)[24:] = torch.nan
    save_file(tensors, file)
    load_model(tmp_path, shard=Shard(0, 2), reduce=Tensor.clone)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.\w+_proj\.weight holds NaN or inf"):
        load_model(tmp_path, shard=Shard(1, 2), reduce=Tensor.clone)


def test_headers_are_checked_against_the_whole_model(tmp_path):
    """A directory with the shapes of a shard is refused: the files must hold the whole model."""
    save_tiny(tmp_path, intermediate_size=24)
    (tmp_path / "config.json").unlink()
    save_tiny(tmp_path / "whole")
    (tmp_path / "whole" / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"gate_proj\.weight has shape \[24, 32\], expected \[48, 32\]"):
        load_model(tmp_path, shard=Shard(1, 2), reduce=Tensor.clone)


@pytest.mark.parametrize(
    ("rank", "degree", "message"),
    [
        (0, 0, "degree=0 is not a positive integer"),
        (0, 1.0, r"degree=1\.0 is not a positive integer"),
        (3, 3, "rank=3 is out of range; allowed for degree=3: 0 to 2"),
        (-1, 2, "rank=-1 is out of range; allowed for degree=2: 0 to 1"),
    ],
)
def test_bad_shards(rank, degree, message):
    with pytest.raises(ValueError, match=message):
        Shard(rank, degree)


def test_more_ranks_than_heads(tmp_path):
    save_tiny(tmp_path)
    message = "degree=5 is more than the model's 4 query heads; allowed: 1 to 4"
    with pytest.raises(ValueError, match=message):
        local_config(tiny_config(), Shard(0, 5))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, shard=Shard(0, 5), reduce=Tensor.clone)


def test_a_shard_needs_a_sum(tmp_path):
    save_tiny(tmp_path)
    with pytest.raises(ValueError, match="degree=2 without reduce"):
        load_model(tmp_path, shard=Shard(0, 2))


def test_a_shard_is_not_saved(tmp_path):
    save_tiny(tmp_path)
    with pytest.raises(ValueError, match="only a whole model can be saved"):
        save_model(load_model(tmp_path, shard=Shard(0, 2), reduce=Tensor.clone), tmp_path / "copy")
