"""The operations of a round on a GPU: which kernel, or function that launches kernels, is which operation of
`RoundOps`."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from smc.attention.backend import ForwardBatch
from smc.executor.forward import Reader, StaticForward
from smc.executor.graph_runner import GraphRunner, StageRunner
from smc.executor.invariant_forward import InvariantForward, is_invariant
from smc.executor.ops import RoundOps
from smc.executor.prompt_rows import PromptForward, PromptRows
from smc.executor.sampling import HeadSampling, Sampling
from smc.executor.triton_forward import TritonForward, run_prompt
from smc.executor.triton_sampling import PromptSampling, TritonHeadSampling, TritonSampling
from smc.executor.whole_pass import InvariantDraftForward, WholePassForward
from smc.kernels import apply_selection as applying
from smc.kernels import draft, draft_tree, expansion, nodes, penalties, remap, truncation
from smc.kernels import sampling as logits
from smc.kernels import select as selecting
from smc.kernels import verify as verifying
from smc.model.draft_vocab import DraftVocab
from smc.types import ModelRole, Numerics


class TritonOps(RoundOps):
    """Triton kernels, in CUDA graphs. Replaces every operation of `RoundOps`."""

    def __init__(self) -> None:
        self._of_prompts: WeakKeyDictionary[Reader, InvariantForward | None] = WeakKeyDictionary()
        self._prompt_rows: WeakKeyDictionary[Reader, PromptRows] = WeakKeyDictionary()

    def numerics(self, reader: Reader) -> Numerics:
        return Numerics.INVARIANT if is_invariant(reader) else Numerics.FASTEST

    def stage_runner(self, device: torch.device) -> StageRunner:
        return GraphRunner(device)

    def forward(self, reader: Reader) -> StaticForward:
        is_draft, invariant = reader.name is ModelRole.DRAFT, self._invariant(reader) is not None
        if not is_draft:
            return InvariantForward(reader) if invariant else TritonForward(reader)
        return InvariantDraftForward(reader, self.drafting(reader)) if invariant else self.drafting(reader)

    def drafting(self, reader: Reader) -> TritonForward:
        """Return a draft's passes where their bits do not matter."""
        return WholePassForward(reader)

    def run_prompt(self, reader: Reader, tokens_T: np.ndarray, batch: ForwardBatch, output_T: np.ndarray) -> Tensor:
        forward, rows = self._invariant(reader), self._rows_of(reader)
        if rows.takes(batch):
            return rows(reader, tokens_T, batch, output_T)
        if forward is None:
            return run_prompt(reader, tokens_T, batch, output_T)
        return forward.run_prompt(reader, tokens_T, batch, output_T)

    def prompt_logits(self, reader: Reader, hidden_RE: Tensor) -> Tensor:
        forward = self._invariant(reader)
        return super().prompt_logits(reader, hidden_RE) if forward is None else forward.logits(hidden_RE).float()

    def _invariant(self, reader: Reader) -> InvariantForward | None:
        """Return the operations on prompts in one order of sums; None: the reader does without."""
        if reader not in self._of_prompts:
            self._of_prompts[reader] = InvariantForward(reader, of_prompts=True) if is_invariant(reader) else None
        return self._of_prompts[reader]

    def _rows_of(self, reader: Reader) -> PromptRows:
        if reader not in self._prompt_rows:
            kind = PromptForward if self._invariant(reader) is None else InvariantForward
            self._prompt_rows[reader] = PromptRows(reader, kind(reader))
        return self._prompt_rows[reader]

    def sampling(self, vocab: int) -> Sampling:
        return TritonSampling(vocab)

    def prompt_sampling(self, reader: Reader) -> Sampling:
        # The sums of torch are divided by the number of rows, and kernels need compiling.
        return super().prompt_sampling(reader) if self._invariant(reader) is None else PromptSampling(reader.vocab_size)

    def head_sampling(self, vocab: DraftVocab, device: torch.device) -> HeadSampling:
        return TritonHeadSampling(self.sampling(len(vocab.ids_M)), vocab, device)

    add_biases = staticmethod(logits.add_biases)
    apply_mask = staticmethod(truncation.apply_mask)
    penalise = staticmethod(penalties.penalise)

    begin_draft = staticmethod(draft.begin_draft)
    expand = staticmethod(expansion.expand)
    reparent = staticmethod(draft.reparent)
    prune_tree = staticmethod(draft_tree.prune_tree)
    store_inner_nodes = staticmethod(draft_tree.store_inner_nodes)
    limit_outcomes = staticmethod(draft_tree.limit_outcomes)
    with_inner_nodes = staticmethod(draft_tree.with_inner_nodes)
    pack_rows = staticmethod(draft.pack_rows)
    observe_draws = staticmethod(draft.observe_draws)

    lay_out_blocks = staticmethod(verifying.lay_out_blocks)
    lay_out_nodes = staticmethod(nodes.lay_out_nodes)
    collect_outputs = staticmethod(verifying.collect_outputs)
    verify_chains = staticmethod(verifying.verify_chains)
    match_samples = staticmethod(verifying.match_samples)

    score_rows = staticmethod(selecting.score_rows)
    select = staticmethod(selecting.select)
    assign_rows = staticmethod(expansion.assign_rows)
    apply_selection = staticmethod(applying.apply_selection)

    remap_draft = staticmethod(remap.remap_draft)
    remap_target = staticmethod(remap.remap_target)
    advance = staticmethod(remap.advance)
    remap_block_table = staticmethod(remap.remap_block_table)
