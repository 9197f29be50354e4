"""Runs requests through a real engine and looks inside it between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Output, Request
from smc.api.sampling_params import Method, SamplingParams
from smc.executor.forward import StaticForward
from smc.executor.graph_runner import StageRunner
from smc.executor.ops import RoundOps
from smc.executor.round_executor import ModelRunner
from smc.executor.worker import ModelWorker
from smc.local_engine import ModelPair, local_engine
from smc.round.plan import Contexts
from smc.round.tensors import RowGroups, Rows, RowSpans, RowTables
from smc.scheduler.engine import Engine
from smc.scheduler.sequence_group import SequenceGroup
from smc.types import BOTH_MODELS, ModelRole
from tests.pairwise import one_of

FORMS = [
    EngineConfig(form="lockstep", block=3),
    EngineConfig(form="lookahead", block=3, branches=1),
    EngineConfig(form="lookahead", block=3, branches=4),
]
CASES = [FORMS[0], FORMS[2]]
"""For tests of both forms."""
LOCKSTEP_FIRST, LOOKAHEAD_FIRST = one_of(*CASES), one_of(*CASES[::-1])
"""For tests of behaviour that does not depend on the form: `make test` runs the first case only."""


def processed(config: EngineConfig) -> EngineConfig:
    """`config` that reports log-probabilities of the distribution that tokens are drawn from."""
    return replace(config, logprobs_mode="processed")


def wide(config: EngineConfig) -> EngineConfig:
    """`config` with room for a whole population of requests at once: one round of all costs little more than one of a
    few."""
    return replace(config, max_slots=2048, pages=40_000)


def config_id(config: EngineConfig) -> str:
    return f"{config.form}-K{config.block}-F{config.branches}"


def request(prompt: Sequence[int] = (0, 1, 2), request_id: str = "r", method: str = "smc", **params) -> Request:
    """Return a request, of SMC unless the method is given: most of what these tests check has its particles."""
    return Request(request_id, tuple(prompt), SamplingParams(method=method, **params))


def answers(engine: Engine, requests: Iterable[Request]) -> dict[str, Answer]:
    """Run `requests`; return the answer of each, by its id. Afterwards the engine must be empty."""
    done = {output.answer.request_id: output.answer for output in engine.run(requests) if output.answer}
    assert_empty(engine)
    return done


def answer(pair: ModelPair, config: EngineConfig, **params) -> Answer:
    return answers(local_engine(pair, config), [request(**params)])["r"]


def workers(engine: Engine) -> dict[str, ModelWorker]:
    return engine.workers


def assert_empty(engine: Engine) -> None:
    """Assert that nothing is reserved or claimed, every page is free, and every reference is accounted for."""
    engine.check_books()
    for cache in engine.memory.caches.values():
        cache.clear()
    for allocator in engine.memory.allocators.values():
        allocator.check()
        assert allocator.num_free == allocator.capacity


def step_through(engine: Engine, check: Callable[[Engine], None]) -> list[Output]:
    outputs = []
    while not engine.idle:
        outputs += engine.step()
        check(engine)
    return outputs


class TokensOfPages:
    """Records the token for which each KV page was written: observes the tokens that a model runs, and the pages that
    store them."""

    def __init__(self, engine: Engine, side: str) -> None:
        worker = engine.workers[side]
        self.token_of_page = np.full(worker.pages + 1, -1, dtype=np.int64)
        model = worker.model

        def listening(tokens_T: torch.Tensor, rope_T2D: torch.Tensor, attend) -> torch.Tensor:
            new = attend.__self__.new
            stored_T = tokens_T if new.index_T is None else tokens_T[new.index_T]
            self.token_of_page[new.pages_T.numpy()] = stored_T.numpy()
            return model(tokens_T, rope_T2D, attend)

        worker.model = Listening(model, listening)
        engine.executor.runners[side]._forward.model = worker.model

    def tokens(self, pages: Sequence[int]) -> list[int]:
        return self.token_of_page[pages].tolist()


def open_particles(engine: Engine, group: SequenceGroup, side: str) -> list[tuple[int, list[int]]]:
    """(slot, tokens whose keys and values the slot must hold) for each particle of a group that has not ended."""
    slots, of_pair = engine.slots, group.rules.roles == BOTH_MODELS
    found = []
    for slot in group.slots[~slots.ended_S[group.slots]].tolist():
        if side == "target" and of_pair:
            kept = slots.block_S[slot]  # the block in flight has not been run
        else:
            # The last token has not been run; in lockstep, nor has the one before it, except where that one is the
            # target's own and the draft knows it.
            both = (
                engine.config.form == "lockstep"
                and group.rounds > 0
                and side == "draft"
                and group.rules.roles == BOTH_MODELS
            )
            # Also where a population without weight has continued from a prefix.
            cuts = group.params.method is Method.EXACT or group.counters.collapses > 0
            pending = slots.length_S[slot] + group.prompt_size - slots.held_S[side][slot]
            kept = slots.length_S[slot] - (pending if both and cuts and pending in (1, 2) else 2 if both else 1)
        found.append((slot, [*group.request.prompt, *slots.tokens_SL[slot, :kept].tolist()]))
    return found


def check_kv(engine: Engine, written: dict[str, TokensOfPages]) -> int:
    """Assert that each particle's pages were written for exactly its tokens, prompt included, and that the page
    accounting balances. Returns the number of particles checked."""
    slots, seen = engine.slots, 0
    engine.memory.check()
    for group in running(engine):
        for side in group.rules.roles:
            allocator, table_SL = engine.memory.allocators[side], engine.executor.runners[side].state.table_SL
            assert (slots.head_S[side][group.slots[group.count :]] == 0).all(), "a slot without a particle holds pages"
            for slot, tokens in open_particles(engine, group, side):
                assert slots.held_S[side][slot] == len(tokens)
                if not group.in_flight:  # else the model may be a round ahead of the record
                    assert (
                        table_SL[slot, : len(tokens)].tolist()
                        == allocator.path(slots.head_S[side][slot], len(tokens)).tolist()
                    )
            for slot in group.slots[: group.count].tolist():
                held = int(slots.held_S[side][slot])
                tokens = [*group.request.prompt, *slots.tokens_SL[slot, : slots.length_S[slot]].tolist()]
                assert written[side].tokens(allocator.path(slots.head_S[side][slot], held)) == tokens[:held]
                seen += 1
        for side in {stream.role for stream in group.streams if stream.unconditional}:
            seen += _check_companions(engine, group, side, written[side])
    return seen


def assert_pages_follow(engine: Engine, requests: Iterable[Request]) -> None:
    """Run the requests, and `check_kv` after every step. At the end nothing is held."""
    written, seen = {side: TokensOfPages(engine, side) for side in ModelRole}, []
    for one in requests:
        engine.submit(one)
    step_through(engine, lambda engine: seen.append(check_kv(engine, written)))
    assert sum(seen) > 100
    assert_empty(engine)


def _check_companions(engine: Engine, group: SequenceGroup, side: str, written: TokensOfPages) -> int:
    """Assert that the unconditional rows of a guided group hold its answers after its negative prompt, as far as the
    model has run them. Returns the number of particles checked."""
    slots, allocator = engine.slots, engine.memory.allocators[side]
    for slot in group.slots[: group.count].tolist():
        companion = int(slots.unconditional_S[slot])
        held = int(slots.held_S[side][companion])
        assert held - group.negative_size == slots.held_S[side][slot] - group.prompt_size
        tokens = [*group.request.negative_prompt, *slots.tokens_SL[slot, : held - group.negative_size].tolist()]
        path = allocator.path(int(slots.head_S[side][companion]), held)
        assert written.tokens(path) == tokens
        if not group.in_flight and not slots.ended_S[slot]:
            assert engine.executor.runners[side].state.table_SL[companion, :held].tolist() == path.tolist()
    return group.count


class Listening:
    """A model whose calls go to a listener instead; the listener calls the model."""

    def __init__(self, model, call: Callable) -> None:
        self.logits, self.config, self.embed, self._call = model.logits, model.config, model.embed, call

    def __call__(self, *arguments):
        return self._call(*arguments)


@torch.inference_mode()
def next_log_probs(side: ModelRunner, slot: int, held: int, token: int) -> torch.Tensor:
    """log p [V] after running `token` behind the first `held` positions of a slot. Reads the slot's paged KV and leaves
    it unchanged."""
    forward = StaticForward(side._forward.model, copy.deepcopy(side.worker.pool), side.worker.rope)
    one = torch.ones(1, dtype=torch.int32)
    # An unused page: the first one past those that the table can name.
    table_SL = side.state.table_SL[slot : slot + 1].clone()
    table_SL[0, held] = side.worker.pages
    rows = Rows(
        RowTables(table_SL, one * 0),
        RowSpans(one * held, one),
        RowGroups(one * 0, one * 0, one, one * 0),
        queries=1,
        contexts=Contexts.SHARED,
    )
    hidden = forward(torch.tensor([token]), rows)
    return torch.log_softmax(forward.logits(hidden)[-1].double(), -1)


class Padding(StageRunner):
    """Pads rounds to few shapes and lets the next round be requested before the last is read, as on a GPU, but captures
    no graphs."""

    records = True


class PaddingOps(RoundOps):
    """Torch operations with padded rounds."""

    def stage_runner(self, device: torch.device) -> StageRunner:
        return Padding(device)


def running(engine: Engine) -> list[SequenceGroup]:
    return [group for group in engine.registry.groups.values() if group.is_running]
