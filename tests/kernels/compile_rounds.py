"""Compiles the kernels of a round for an H100, on a machine without one, and prints their names as JSON. The compiler
refuses some code that the interpreter accepts, such as a variable that has another type in a branch.

The first variant of a kernel is compiled to the end. The others go once as far as Triton's intermediate code for GPUs,
where everything has been refused that a constant or a type of an argument can make wrong: the rest is LLVM's and
ptxas's, and is three quarters of the time.

    python -m tests.kernels.compile_rounds"""

from __future__ import annotations

import gc
import json
import os
import re
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, product
from types import SimpleNamespace
from typing import Any

from smc.types import OF_BOTH_MODELS, Decoding

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from smc.algorithm.coupling import Coupling
from smc.algorithm.expansion import CandidateTokens, Expansion, SourceRows
from smc.algorithm.resampling import Spans
from smc.algorithm.verification import match_samples
from smc.attention.backend import ForwardBatch
from smc.distributions import DistributionSpec, Processors
from smc.executor.invariant_forward import InvariantForward
from smc.executor.ops import RoundOps
from smc.executor.select import SelectStage
from smc.executor.triton_forward import TritonForward
from smc.executor.triton_ops import TritonOps
from smc.executor.verify import lay_out_blocks
from smc.kernels.experts import chosen_experts, experts, sort_by_expert
from smc.kernels.int4 import gate_up_int4, linear_int4, linear_int4_fixed, widened
from smc.kernels.truncation import apply_mask
from smc.memory.kv_cache import KVPool
from smc.model.decoder import Choice, Experts, RopeTable
from smc.model.linear import INT4, Linear
from smc.model.loader import random_model
from smc.model.quantisation import Int4Format
from smc.philox import DrawKeys, Purpose, RoundKeys
from smc.round.plan import Contexts, Penalties
from smc.round.tensors import (
    ChainDraws,
    ChosenTokens,
    Continuation,
    GrownRows,
    InnerNodes,
    OwnDraws,
    PageTokens,
    Rows,
    TargetDraws,
)
from tests.attention.packed import PAGES, Built, Case
from tests.kernels.rounds import Round
from tests.kernels.test_draft import DraftRound
from tests.kernels.test_inner_nodes import grown_rows
from tests.kernels.test_slot_update import selection_of
from tests.model.tiny import random_decoder, tiny_config

CPU = torch.device("cpu")
KINDS = [
    OF_BOTH_MODELS,
    *(frozenset({kind}) for kind in sorted(OF_BOTH_MODELS) if kind is not Decoding.REJECTION),
]


class NoDriver:
    """Driver of a GPU that does not exist."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Accepted(Exception):
    """Ends a compilation early: the compiler has accepted a further variant of a kernel."""


def accept(*_: object) -> None:
    raise Accepted


def check_pairs(module: Any) -> Any:
    """Assert two properties of the int4 kernels. One call of the inline instructions takes two words that a thread
    holds one after the other: they must be neighbours of one output. Tensor cores must take the widened weights from
    registers."""
    text = str(module)
    for line in text.splitlines():
        if "elementwise_inline_asm" in line and "0x43004300" in line:
            words = re.search(r": tensor<(\w+)xi32, (#\w+)>", line)
            layout = words and re.search(rf"^{words[2]} = (.*)$", text, re.MULTILINE)
            assert layout and NEIGHBOURS.search(layout[1]), f"{line[-300:]}: {layout and layout[1]}"
            assert not (moved := THROUGH_MEMORY.search(text)), f"widened weights leave the registers: {moved}"
            CHECKED.append(words[1])
    check_scores(module)
    return module


def check_scores(module: Any) -> None:
    """Assert that a kernel computes the scores of coupled drafting once, not in the threads of each register layout."""
    text = str(module)
    if "@_survey(" in text:
        logarithms = text.count("math.log ")
        assert logarithms <= 1, f"scores are computed {logarithms} times"
        SCORED.append(logarithms)


THROUGH_MEMORY = re.compile(
    r"(local_alloc .*tensor<\d+x(64|128)xbf16, #linear|convert_layout .*tensor<\d+x(64|128)xbf16.*dot_op).*"
)
"""Matches code that moves widened weights through shared memory. Groups of 32 are not matched: they have too few words
for the register layout of tensor cores."""
NEIGHBOURS = re.compile(r"register = \[\[0, 1\]|sizePerThread = \[\d+, (2|4|8|16)\].*order = \[1, 0\]")
SCORED: list[int] = []
"""How often the variants of `_survey` compute scores."""
CHECKED: list[str] = []
"""Word shapes whose layouts have been checked."""


def compile_only(compiled: set[str]) -> None:
    """Make every later launch compile its kernel and add its name to `compiled`."""
    run, add_all_stages, begun, accepted = JITFunction.run, CUDABackend.add_stages, "", set()

    def warm_up(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        nonlocal begun
        begun = self.fn.__name__
        with suppress(Accepted):
            run(self, *args, grid=grid, warmup=True, **options)
        compiled.add(begun)

    def add_stages(self: CUDABackend, stages: dict, *how: Any) -> None:
        add_all_stages(self, stages, *how)
        lay_out = stages["ttgir"]
        stages["ttgir"] = lambda *args: check_pairs(lay_out(*args))
        if begun in compiled:
            stages["llir"] = accept

    def is_accepted(*, key: str, fn: Any, **_: Any) -> bool:
        """Triton keeps no variant that is not compiled to the end, and would take it again for every launch."""
        before = len(accepted)
        accepted.add((fn.module, fn.name, key))
        return len(accepted) == before

    triton.knobs.runtime.jit_cache_hook = is_accepted
    triton.runtime.driver.set_active(NoDriver())
    JITFunction.run, CUDABackend.add_stages = warm_up, add_stages


def target_stages(kinds: frozenset[Decoding], lookahead: bool) -> None:
    made = Round(1, kinds, lookahead, CPU)
    logq_SQ, drafted = made.here(made.floats(made.slots + 1, made.most)), made.drafted()
    laid_out = lay_out_blocks(made.state, logq_SQ, made.plan, None if lookahead else drafted)
    inputs = made.inputs(laid_out, drafted, match_samples)
    scored, stage = (
        RoundOps().score_rows(inputs),
        SelectStage(None, inputs.state, RoundOps(), lookahead=lookahead),
    )
    own = stage._select_independent(inputs.plan, scored) if Decoding.INDEPENDENT in kinds else None
    trees = stage._select_trees(inputs.plan, scored, drafted.block) if kinds - {Decoding.INDEPENDENT} else None
    none_T1 = torch.zeros(len(laid_out.label_T), 1)
    TritonOps().collect_outputs(
        laid_out, made.plan, none_T1[:, 0], TargetDraws(none_T1.long(), none_T1, none_T1[:, 0]), None
    )
    TritonOps().score_rows(inputs)
    TritonOps().apply_selection(inputs, scored, own, trees)
    stage.ops = TritonOps()
    if own is not None:
        stage._select_independent(inputs.plan, scored)
    if trees is not None:
        stage._select_trees(inputs.plan, scored, drafted.block)
    selection, blocks = selection_of(made), laid_out.blocks
    TritonOps().lay_out_blocks(made.state, logq_SQ, made.plan, None if lookahead else drafted)
    TritonOps().match_samples(
        blocks.tokens_AQ, blocks.count_A, inputs.verified.drawn_AQ, blocks.alive_A, made.plan.arrays.groups
    )
    next_ = TritonOps().remap_target(made.state, logq_SQ, made.plan, drafted, selection, lookahead)
    TritonOps().advance(made.state, made.plan.arrays.slot_A, selection, next_)


def node_stages(lookahead: bool) -> None:
    """Run what only rounds do that run common tokens once."""
    made = Round(1, frozenset({Decoding.WALK}), lookahead, CPU)
    plan = replace(made.plan, kind=replace(made.plan.kind, nodes=40))
    logq_SQ, drafted = made.here(made.floats(made.slots + 1, made.most)), made.drafted()
    laid_out = lay_out_blocks(made.state, logq_SQ, plan, None if lookahead else drafted)
    TritonOps().lay_out_nodes(plan, laid_out)
    none_T1 = torch.zeros(40, 1)
    draws = TargetDraws(none_T1.long(), none_T1, none_T1[:, 0])
    TritonOps().collect_outputs(RoundOps().lay_out_nodes(plan, laid_out), plan, None, draws, None)
    drafting = DraftRound(1, frozenset({Decoding.WALK}), lookahead, CPU)
    plan = replace(drafting.plan, kind=replace(drafting.plan.kind, nodes=40))
    TritonOps().prune_tree(plan, several_steps(grown_rows(drafting)), lookahead)


def several_steps(grown: GrownRows) -> GrownRows:
    """Return rows of several steps: kernels have code between two steps, which a single step does not compile."""
    return grown._replace(steps=grown.steps[:1] * 3)


def draft_rows(kinds: frozenset[Decoding], lookahead: bool) -> None:
    """Run what begins a draft, extends its rows and ends it."""
    made = DraftRound(1, kinds, lookahead, CPU)
    plan, tree = made.plan, made.tree()
    inputs = TritonOps().begin_draft(made.state, plan, made.law, made.k, by_round=True)
    none_X = torch.zeros_like(tree.root_X)
    chosen = own = chains = None
    if kinds - {Decoding.INDEPENDENT}:
        ess_G = plan.arrays.threshold_G
        expansion = Expansion(none_X, none_X, tree.mass_X, tree.alive_X, ess_G, ess_G > 0, ess_G > 0)
        chosen = ChosenTokens(expansion, CandidateTokens(none_X[:, None], tree.logq_XK[:, :1], tree.logq_XK[:, :1]))
    if Decoding.INDEPENDENT in kinds:
        own = OwnDraws(tree.tokens_XK[:, :1].int(), tree.logq_XK[:, :1])
    if Decoding.REJECTION in kinds:
        chains = ChainDraws(none_X, none_X, tree.logq_XK[:, 0])
    for step, before in enumerate((inputs.tree, tree)):
        TritonOps().reparent(before, Continuation(chosen, own, chains), plan, made.state, step=step)
    TritonOps().pack_rows(made.state, plan, tree)
    TritonOps().remap_draft(made.state, plan, tree, selection_of(made), made.k)


def draft_stages(has_head: bool, dtype: torch.dtype, cut: bool) -> None:
    # Rows at multiples of 16 bytes, as those of real vocabularies: a thread loads as much at once as it can.
    made, vocab = DraftRound(1, frozenset({Decoding.WALK}), True, CPU), 5008
    plan, places = made.plan, len(made.plan.arrays.slot_A)
    ids_M = torch.arange(vocab) * 2 if has_head else None
    coupling = Coupling(plan.arrays.exponent_A, plan.target_distribution.temperature_R, plan.arrays.seed_A, ids_M)
    kept_RV, one_R, long_R = torch.zeros(5, vocab), torch.ones(places), torch.zeros(places, dtype=torch.int64)
    distribution = DistributionSpec.of(top_k_R=[35] * places).to(CPU)._replace(active=Processors.TEMPERATURE)
    if cut:
        distribution = distribution._replace(active=distribution.active | Processors.TOP_K)
    keys = DrawKeys(long_R, long_R, long_R[:, None], long_R, Purpose.PROPOSAL)
    logits_RV = torch.from_numpy(np.random.default_rng(0).normal(size=(places, vocab))).to(dtype)
    mask_RW = torch.zeros(places, vocab // 16 + 1, dtype=torch.int32)
    apply_mask(logits_RV, mask_RW, vocab, ids_M, fails=not cut)
    for kept in (None, kept_RV):
        TritonOps().sampling(vocab).propose_candidates(
            logits_RV, distribution, 0.2, keys, has_rest=True, coupling=coupling, kept_RV=kept
        )
    selection = selection_of(made)
    TritonOps().observe_draws(made.state, plan, made.tree(), selection, kept_RV, coupling)
    nodes, grown = InnerNodes.allocate(made.slots, made.k, vocab, CPU), grown_rows(made)
    TritonOps().store_inner_nodes(nodes, made.state, plan, grown, selection)
    for ahead in (True, False):
        TritonOps().prune_tree(plan, several_steps(grown), ahead)
    candidates = grown.steps[0].candidates
    particles = RoundOps().begin_draft(made.state, plan, made.law, made.k, by_round=True).tree
    TritonOps().with_inner_nodes(nodes, plan, particles, candidates)
    TritonOps().limit_outcomes(plan, grown.tree, candidates, True)
    token_RC, share_RC = torch.zeros(places, 33, dtype=torch.int64), torch.zeros(places, 33)
    bounds = Spans(torch.zeros(1, dtype=torch.int32), torch.full((1,), places, dtype=torch.int32))
    most_G, decoding_G, random_G = (
        bounds.size_G,
        torch.full((1,), 2, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
    )
    candidates, is_there_R = CandidateTokens(token_RC, share_RC, share_RC), torch.ones(places) > 0
    source = SourceRows(candidates, one_R.double(), is_there_R, bounds, is_there_R)
    keys_G = RoundKeys(random_G, random_G)
    TritonOps().expand(source, bounds, most_G, decoding_G, keys_G, step=0, total=places, has_rest=True)


def passes(family: str) -> None:
    """Run a pass of few rows over short contexts, and one over shared prefixes."""
    case = Case([33, 17], [[(33, 4), (37, 2)], [(17, 1)]], 4, (4, 2), tail=1, padding=0)
    config = tiny_config(family, hidden_size=64, head_dim=64, num_heads=4, num_kv_heads=2, intermediate_size=64)
    model, built = random_decoder(config).bfloat16(), Built(case)
    pool, rope = KVPool(config, PAGES, torch.bfloat16, CPU), RopeTable(config, 256)
    reader = SimpleNamespace(model=model, pool=pool, rope=rope, width=256, device=CPU)
    rows = (built.tables(), built.spans(), built.groups())
    for kind, contexts in product((TritonForward, InvariantForward), (Contexts.SHORT, Contexts.SHARED)):
        where = Rows(*rows, queries=case.queries, contexts=contexts)
        kind(reader)(torch.zeros(len(built.start_R) * case.queries, dtype=torch.int64), where)
    path_RB = torch.zeros(len(built.start_R), 6, dtype=torch.int32)
    where = Rows(*rows, queries=1, contexts=Contexts.SHORT, path_RB=path_RB)
    for kind in (TritonForward, InvariantForward):
        kind(reader)(torch.zeros(len(built.start_R), dtype=torch.int64), where)
    tokens_T, bounds = np.zeros(100, dtype=np.int64), (np.array([0]), np.array([100]))
    if (module := model.layers[0].experts) is not None:
        none_TC, x_TE = torch.zeros(100, module.chosen, dtype=torch.int32), torch.zeros(100, 64).bfloat16()
        chosen_experts(module, x_TE, Choice(none_TC, none_TC.float()), sort_by_expert(none_TC, module.count))
        return
    batch = ForwardBatch(np.ones((1, 100), np.int32), *bounds, np.ones(100), np.arange(100), np.arange(2), bounds[0])
    InvariantForward(reader, of_prompts=True).run_prompt(reader, tokens_T, batch, np.array([99]))


def penalised_rows() -> None:
    """Penalise the logits of all tokens and of one of each row, in the whole vocabulary and in a part of it."""
    vocab, one_A, long_A = 5008, torch.ones(3), torch.zeros(3, dtype=torch.int64)
    penalties, logits_TV = Penalties(one_A, one_A, one_A, long_A), torch.zeros(12, vocab)
    token_B, tokens_T = torch.zeros(PAGES, dtype=torch.int32), torch.zeros(12, dtype=torch.int64)
    for tail, dtype in ((1, torch.bfloat16), (None, torch.float32)):
        case = Case([33, 17], [[(33, 4), (37, 2)], [(17, 1)]], 4, (4, 2), tail=tail, padding=0)
        built, is_part = Built(case), tail is None
        rows = Rows(built.tables(), built.spans(), built.groups(), queries=4, contexts=Contexts.SHORT)
        tokens = PageTokens(token_B, 2 * vocab if is_part else vocab, torch.arange(vocab) * 2 if is_part else None)
        TritonOps().penalise(tokens, logits_TV.to(dtype), penalties, tokens_T, rows, None)
        TritonOps().penalise(tokens, logits_TV[:3].to(dtype), penalties, tokens_T, rows, torch.arange(3) * 4)


def int4_passes() -> None:
    """Run a pass of an int4 model, and int4 products with and without zero points."""
    case = Case([33, 17], [[(33, 4), (37, 2)], [(17, 1)]], 4, (4, 2), tail=1, padding=0)
    config = tiny_config("qwen2", hidden_size=256, head_dim=64, num_heads=4, num_kv_heads=2, intermediate_size=256)
    model, built = random_model(config, dtype=INT4, device=CPU), Built(case)
    pool, rope = KVPool(config, PAGES, torch.bfloat16, CPU), RopeTable(config, 256)
    forward = TritonForward(SimpleNamespace(model=model, pool=pool, rope=rope, width=256))
    where = Rows(built.tables(), built.spans(), built.groups(), queries=case.queries, contexts=Contexts.SHORT)
    forward(torch.zeros(len(built.start_R) * case.queries, dtype=torch.int64), where)
    x_TI = torch.zeros(64, 256, dtype=torch.bfloat16)
    for group, with_zeros in ((32, 16), (64, 1), (128, 64)):
        for tokens in (1, 16, 64):
            matrix = Linear(256, 256)
            matrix.to_int4(Int4Format(group, tokens == with_zeros, "F16"))
            linear_int4(x_TI[:tokens], matrix, 1, pdl=True)
        linear_int4(x_TI.half(), matrix, pdl=True)
        gate_up_int4(x_TI, matrix, pdl=True)
        linear_int4_fixed(x_TI.repeat(64, 1), matrix, 2)
        widened(matrix, slice(0, 256), torch.bfloat16)
    for chosen, zeros in ((2, True), (1, False)):
        config = tiny_config("mixtral", hidden_size=256, intermediate_size=256, experts_per_token=chosen)
        made = Experts(config).bfloat16()
        made.gate_up.to_int4(Int4Format(64, zeros, "BF16"))
        made.down.to_int4(Int4Format(64, zeros, "BF16"))
        experts(made, x_TI, pdl=True)


if __name__ == "__main__":
    gc.disable()
    names: set[str] = set()
    compile_only(names)
    for each, ahead in zip(KINDS, cycle((True, False))):
        target_stages(each, ahead)
        draft_rows(each, ahead)
    for ahead in (True, False):
        node_stages(ahead)
    for head, dtype, is_cut in ((False, torch.bfloat16, False), (True, torch.float32, True)):
        draft_stages(head, dtype, is_cut)
    for family in ("mistral", "olmo2", "gemma3_text", "qwen3_moe"):
        passes(family)
    penalised_rows()
    int4_passes()
    assert CHECKED and 1 in SCORED
    print(json.dumps(sorted(names)))
