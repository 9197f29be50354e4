"""Masks of constrained requests: which tokens may follow each row, computed on the host while a model runs.

A model's stage is divided. The tokens that it is going to run are copied to the host, and the pass is queued. The host
computes masks from the tokens (`smc.constraint_masks`) and copies them to the device, where drawing and scoring wait
for them. A row's tokens are read from its pages (`smc.executor.logit_changes`), so they follow its block table wherever
that goes.

Every method draws from p(x | allowed): the target's distribution p without the forbidden tokens, renormalised. A
population whose distribution is that of whole answers given the constraint (`by_answer`) multiplies its weights at
every token by the mass Z of the allowed tokens: p(x) = p(x | allowed) Z. For such a population p is truncated before it
is masked, for all others afterwards.

Local axes: U batch indices with a constraint, Y columns past the vocabulary, Z masks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device
from smc.constraint_masks import Follower, MaskWriter
from smc.constraints import Compiler
from smc.distributions import DistributionSpec
from smc.executor.graph_runner import StageRunner, TimeSpans
from smc.executor.sampling import Sampling
from smc.mask_reader import MaskPath
from smc.round.plan import IN_FLIGHT, RoundPlan, SequenceHandoff
from smc.round.tensors import Blocks, LastTokens, PageTokens, SlotState, TokenTree
from smc.stops import StopMachine
from smc.types import ModelRole, mask_span

Fetched = Callable[[], list[np.ndarray]]
"""Waits for arrays that are being copied to the host, and returns them."""
Paths = Iterator[tuple[int, MaskPath]]
"""The masks that are needed, each with a batch index of its request."""


@dataclass(frozen=True)
class Sharing:
    """How the ranks that hold parts of one model agree on values that only the leader computes."""

    leads: bool = True
    """Whether this rank is the leader."""
    broadcast: Callable[[Tensor], object] | None = None
    """Replaces a tensor's values by those of the leader; None: there is one rank."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor, with the values of the leader."""
        if self.broadcast is not None:
            self.broadcast(tensor)
        return tensor


class HeldAnswers:
    """Tokens of the answers so far, by constrained batch index. Each answer is put together when it is first read."""

    def __init__(self, index_U: np.ndarray, prompt_U: np.ndarray, arrays: list[np.ndarray], *, pending: bool) -> None:
        """`arrays`: tokens [U, L] that the model holds after the prompt, number of positions [U] that it holds, pending
        tokens [U, Q] and their number [U], and whether the particle is alive and has not ended [U]. `pending`: answers
        include the pending tokens."""
        self._tokens_UL, self._held_U, self._pending_UQ, self._pending_U, self._open_U = arrays
        self._prompt_U, self._pending = prompt_U, pending
        self._found: dict[int, np.ndarray] = {}
        self._c = {index: c for c, index in enumerate(index_U.tolist())}

    def __iter__(self) -> Iterator[int]:
        return iter(self._c)

    def __contains__(self, index: int) -> bool:
        return index in self._c

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of the answer, int64."""
        if index not in self._found:
            c = self._c[index]
            answer_L = self._tokens_UL[c, : self._held_U[c] - self._prompt_U[c]].astype(np.int64)
            if self._pending:
                answer_L = np.concatenate((answer_L, self._pending_UQ[c, : self._pending_U[c]]))
            self._found[index] = answer_L
        return self._found[index]

    def is_open(self, index: int) -> bool:
        """Whether tokens may follow."""
        return bool(self._open_U[self._c[index]])


class TokenMasks:
    """Computes the masks at one model."""

    def __init__(
        self, compiler: Compiler, state: SlotState, page_tokens: PageTokens, stages: StageRunner, share: Sharing
    ) -> None:
        """Masks are computed by the leader."""
        self._compiler, self._state, self._tokens, self._stages = compiler, state, page_tokens, stages
        self._share, self._writer = share, MaskWriter(compiler)
        self._plan: RoundPlan[np.ndarray] | None = None
        """The round of the last masks."""
        self._failures: dict[int, str] = {}
        """Why constraints cannot be followed any further, by group of this round."""
        self._machines: dict[int, StopMachine] = {}
        """Stop machines that mask tokens, by entry of the stop tables."""
        self._followers: dict[int, Follower] = {}
        """Followers by slot; the slots of one request share one."""
        self._began, self._nanoseconds = 0, 0

    def join(self, group: SequenceHandoff) -> None:
        """Forget the requests that had these slots before."""
        for slot in group.slots_N.tolist():
            self._followers.pop(slot, None)
        if group.machine is not None:
            self._machines.pop(group.stops, None)
            if group.machine.masks:
                self._machines[group.stops] = group.machine

    def take_failures(self) -> dict[int, str]:
        """Return why constraints of the last round have failed, by group."""
        found, self._failures = self._failures, {}
        return found

    def take_span(self, role: ModelRole) -> TimeSpans:
        """Return the time that all masks since the last call took together, as one span that starts when the last mask
        did."""
        began, took, self._nanoseconds = self._began, self._nanoseconds, 0
        return {mask_span(role): (began, began + took)} if took else {}

    def answers(
        self, plan: RoundPlan[np.ndarray], here: RoundPlan[Tensor], *, pending: bool
    ) -> Callable[[], HeldAnswers]:
        """Return a function that gives the answers of particles so far, by batch index: the tokens that the model
        holds, with or without the pending ones. Call it before any of the pending tokens runs."""
        constraints, state = plan.constraints, self._state
        assert constraints is not None, "a round with constrained requests"
        index_U = np.flatnonzero(constraints.entry_A)
        prompt_U = constraints.prompt_A[index_U]
        width = max(int(plan.columns - prompt_U.min()), 1)
        position_UL = np.minimum(prompt_U[:, None] + np.arange(width), state.table_SL.shape[1] - 1)
        slot_U = here.arrays.slot_A[to_device(index_U, state.device)]
        page_UL = state.table_SL[slot_U[:, None], to_device(position_UL, state.device)].long()
        held_U = state.held(slot_U)
        is_open_U = state.alive_S[slot_U] & ~state.ended_S[slot_U]
        fetched = self._fetch(
            [self._tokens.token_B[page_UL], held_U, state.pending_SQ[slot_U], state.pending_S[slot_U], is_open_U]
        )
        return cache(lambda: HeldAnswers(index_U, prompt_U, fetched(), pending=pending))

    def of_particles(self, plan: RoundPlan[np.ndarray], particles: Callable[[], HeldAnswers]) -> Tensor:
        """Return masks [A, W] of the tokens that may follow each particle."""
        held = particles()
        paths = ((index, MaskPath(held[index], len(held[index]), index, 1)) for index in held if held.is_open(index))
        return self._masks(plan, "particles", len(plan.arrays.slot_A), paths)

    def of_rows(
        self,
        plan: RoundPlan[np.ndarray],
        tree: TokenTree,
        last: LastTokens,
        step: int,
        particles: Callable[[], HeldAnswers],
    ) -> Callable[[], Tensor]:
        """Return a function that computes masks [X, W] of the tokens that may follow rows of `step` tokens, which
        continue `particles`."""
        fetched = self._fetch([tree.root_X, tree.cut_X, last.count_X, tree.tokens_XK[:, :step]])

        def masks() -> Tensor:
            held, (root_X, cut_X, runs_X, tokens_XK) = particles(), fetched()

            def paths() -> Paths:
                for row, root in enumerate(root_X.tolist()):
                    if runs_X[row] and root in held:
                        answer_L = held[root]
                        answer_L = np.concatenate((answer_L[: len(answer_L) - cut_X[row]], tokens_XK[row]))
                        yield root, MaskPath(answer_L, len(answer_L), row, 1)

            return self._masks(plan, f"step {step}", len(root_X), paths())

        return masks

    def of_blocks(self, plan: RoundPlan[np.ndarray], here: RoundPlan[Tensor], blocks: Blocks) -> Callable[[], Tensor]:
        """Return a function that computes masks [T, W] of the tokens that may follow each token of blocks. Call it
        before the blocks run."""
        answers = self.answers(plan, here, pending=False)
        fetched = self._fetch([blocks.origin_A, blocks.tokens_AQ, blocks.run_A])

        def masks() -> Tensor:
            held, (origin_A, tokens_AQ, run_A) = answers(), fetched()
            width = tokens_AQ.shape[1]

            def paths() -> Paths:
                for index in held:
                    if run := int(run_A[index]):
                        origin_L = held[int(origin_A[index])]
                        answer_L = np.concatenate((origin_L, tokens_AQ[index, :run]))
                        yield index, MaskPath(answer_L, len(origin_L) + 1, index * width, run)

            return self._masks(plan, "blocks", tokens_AQ.size, paths())

        return masks

    def _masks(self, plan: RoundPlan[np.ndarray], name: str, total: int, paths: Paths) -> Tensor:
        """Return masks [total, W] on the device, in a tensor that is always the same for rounds of one key. Rows that
        are in no path allow all tokens."""
        words, device = self._compiler.words, self._state.device
        pinned = device.type == "cuda"

        def make() -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
            hosts = [
                (
                    torch.empty(total, words, dtype=torch.int32, pin_memory=pinned),
                    torch.empty(total, dtype=torch.int64, pin_memory=pinned),
                )
                for _ in range(IN_FLIGHT if pinned else 1)
            ]
            return torch.empty(total, words, dtype=torch.int32, device=device), cycle(hosts)

        there, hosts = self._stages.keep(plan.kind, f"mask of {name}", make)
        if not self._share.leads:
            return self._share(there)
        if plan is not self._plan:
            self._plan = plan
            self._writer.begin_round()
        began = time.monotonic_ns()
        host, row_Z = next(hosts)
        # Only needed masks are written, one after another: most rows need none if many batch indices have no particle.
        needed: dict[int, list[MaskPath]] = {}
        count, numbers_Z = 0, row_Z.numpy()
        for index, path in paths:
            numbers_Z[count : count + path.masks] = np.arange(path.row, path.row + path.masks)
            needed.setdefault(int(plan.arrays.group_A[index]), []).append(path._replace(row=count))
            count += path.masks
        followers = {group: self._follower(plan, group) for group in needed}
        self._writer.write([(follower, needed[group]) for group, follower in followers.items()], host[:count].numpy())
        self._failures |= {group: one.failure for group, one in followers.items() if one.failure is not None}
        self._began, self._nanoseconds = began, self._nanoseconds + time.monotonic_ns() - began
        there.fill_(-1)
        if count:
            rows_Z, masks_there_ZW = (each[:count].to(device, non_blocking=True) for each in (row_Z, host))
            there.index_copy_(0, rows_Z, masks_there_ZW)
        return self._share(there)

    def _follower(self, plan: RoundPlan[np.ndarray], group: int) -> Follower:
        """Return the follower of a group's request."""
        assert plan.constraints is not None, "a round with constrained requests"
        first, size = int(plan.arrays.first_G[group]), int(plan.arrays.size_G[group])
        slots = plan.arrays.slot_A[first : first + size].tolist()
        follower = next((self._followers[slot] for slot in slots if slot in self._followers), None)
        if follower is None:
            machine = self._machines[int(plan.constraints.entry_A[first])]
            follower = Follower.of(machine, self._compiler)
        self._followers |= dict.fromkeys(slots, follower)
        return follower

    def _fetch(self, tensors: list[Tensor]) -> Fetched:
        """Copy tensors to the host as they are now. Returns a function that waits for the copies."""
        if self._state.device.type == "cpu":
            arrays = [tensor.clone().numpy() for tensor in tensors]
            return lambda: arrays
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(hosts, tensors):
            host.copy_(tensor, non_blocking=True)
        arrived = self._stages.event()

        def fetched() -> list[np.ndarray]:
            assert not isinstance(arrived, int), "an event of a GPU"
            arrived.synchronize()
            return [host.numpy() for host in hosts]

        return fetched


def allowed_tokens(mask_RW: Tensor, vocab: int, ids_M: Tensor | None = None) -> Tensor:
    """Return which tokens a mask allows, bool [R, vocab], or [R, M] for the tokens `ids`."""
    bit_8 = torch.arange(8, dtype=torch.uint8, device=mask_RW.device)
    bytes_RB1 = mask_RW.view(torch.uint8)[:, :, None]
    allowed_RV = ((bytes_RB1 >> bit_8) & 1).flatten(1).bool()
    return allowed_RV[:, :vocab] if ids_M is None else allowed_RV[:, ids_M]


def apply_mask(
    logits_RV: Tensor, mask_RW: Tensor, columns: int, ids_M: Tensor | None = None, *, fails: bool = True
) -> Tensor:
    """Return logits that exclude forbidden tokens; the Triton form is in `smc.kernels.truncation`. If all allowed
    tokens are impossible, for example because of a bias, they become equally likely. If no token is allowed, the row's
    logits become NaN with `fails`, and otherwise stay as they were."""
    own_RV, beyond_RY = logits_RV.float().split((columns, logits_RV.shape[1] - columns), 1)
    allowed_RV = allowed_tokens(mask_RW, columns, ids_M)
    masked_RV = torch.where(allowed_RV, own_RV, -torch.inf)
    is_stuck_R1 = masked_RV.amax(-1, keepdim=True) == -torch.inf
    masked_RV = torch.where(is_stuck_R1 & allowed_RV, 0.0, masked_RV)
    nothing_R1 = ~allowed_RV.any(-1, keepdim=True)
    masked_RV = torch.where(nothing_R1, torch.full_like(own_RV, torch.nan) if fails else own_RV, masked_RV)
    return torch.cat((masked_RV, beyond_RY), 1)


def given_constraint(
    sampling: Sampling,
    logits_TV: Tensor,
    masked_TV: Tensor,
    mask_TW: Tensor,
    distribution_T: DistributionSpec[Tensor],
    by_answer_T: Tensor | None,
) -> tuple[Tensor, DistributionSpec[Tensor], Tensor | None]:
    """Return the target's logits and distributions given the constraint. If some rows are `by_answer`, also return the
    log of the mass [T] that their mask leaves of the distribution, 0 for other rows. `masked`: logits after
    `apply_mask`."""
    if by_answer_T is None:
        return masked_TV, distribution_T, None
    vocab = sampling.vocab
    logp_TV = torch.empty(len(logits_TV), vocab, device=logits_TV.device)
    sampling.write_distribution(logits_TV, distribution_T, logp_TV)
    allowed_TV = allowed_tokens(mask_TW, vocab)
    logp_TV = torch.where(allowed_TV, logp_TV, -torch.inf)
    mass_T = sampling.log_mass(logp_TV)
    # If a truncation leaves no allowed token, an allowed token is drawn all the same, and has no weight.
    is_given_T1 = (by_answer_T & (mass_T > -torch.inf))[:, None]
    own_TV = torch.where(is_given_T1, logp_TV, masked_TV[:, :vocab])
    mass_T = torch.where(by_answer_T, torch.where(allowed_TV.any(-1), mass_T, torch.nan), 0.0)
    return torch.cat((own_TV, masked_TV[:, vocab:]), 1), distribution_T.neutral(by_answer_T), mass_T
