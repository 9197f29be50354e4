"""Every method of decoding without batches, devices and caches: to be read, and to test the engine against.

A model is a function from a sequence to the log-probabilities of its next token. A `Reference` answers one request in
rounds of three stages:

    draft    the draft model extends rows by K tokens
    verify   the target scores the blocks, or draws its own tokens after them
    select   the rows that continue become the particles

In lockstep the rows that have just been drafted are the blocks. In look-ahead the blocks are the particles' last
tokens, drafted one round earlier, and the rows guess what follows them. The stage that remaps block tables has no
counterpart here, since a row is a tuple of tokens.

Random numbers have the engine's keys (`smc.philox`). For the same seed the engine therefore returns the same answer
after the same rounds, up to rounding, while its exponent of coupled drafting is the one given here. Only this equality
depends on which slot a particle is in. Temperatures are above 0, and resampling is systematic."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smc.algorithm.expansion import CANDIDATES_PER_ROW, EXPANSION_POSITION, LEAD_GAIN
from smc.algorithm.selection import BRANCH_POSITION, EQUAL, PREFIX_POSITION
from smc.executor.select import LEAST_SHARE
from smc.executor.worker import FIRST_STEP
from smc.philox import STREAMS_PER_PARTICLE, Purpose, exponentials
from smc.round.tensors import KEPT_CANDIDATES

# The engine's constants. A row offers its 32 likeliest tokens (CANDIDATES_PER_ROW), an inner node 16 (KEPT_CANDIDATES).
# LEAD_GAIN is more than all other gains together; a distinct particle below a tenth of the mean weight (LEAST_SHARE)
# may be dropped. EQUAL is a tolerance. The others only place random numbers.

Tokens = tuple[int, ...]
Model = Callable[[Tokens], Tensor]
"""Log-probabilities [V], float32, of the token after a sequence."""


@dataclass(frozen=True)
class Task:
    """A request, and how it is decoded."""

    target: Model
    draft: Model
    prompt: Tokens
    end: int
    """The token that ends an answer."""
    max_tokens: int
    seed: int = 0
    particles: int = 4
    """N: particles, or rows that are verified."""
    block: int = 3
    """K: tokens that a round drafts for a row."""
    branches: int | None = None
    """F: a round of look-ahead drafts N F rows. None: lockstep, N rows."""
    exponent: float = 1.0
    """Exponent of coupled drafting."""
    alpha: float = 1.0
    ess_threshold: float = 0.5
    redrafted: int = 0
    """R: tokens that a round of look-ahead first drafts after a block of one token, which is what a miss leaves."""


@dataclass(frozen=True)
class Row:
    """A particle, or a sequence that continues one."""

    tokens: Tokens
    """Prompt and answer."""
    mass: float = 0.0
    """Log of the weight (SMC), or of the probability by the draft's estimate (exact decoding). The engine's begins
    anew in each exact round, which changes no order."""
    logq: tuple[float, ...] = ()
    """log q of the last tokens: those that the target has not scored."""
    start: int = 0
    """Number of tokens before those that the present round drafts."""
    slot: int = 0
    """Slot of the particle that the row continues."""

    def add(self, token: int, mass: float = 0.0, *logq: float) -> Row:
        return Row((*self.tokens, token), self.mass + mass, self.logq + logq, self.start, self.slot)


class Reference(ABC):
    """What all methods share."""

    def __init__(self, task: Task) -> None:
        self.task, self.rounds = task, 0
        self.lookahead, self.width = task.branches is not None, task.particles * (task.branches or 1)
        self.particles = self.first()

    def run(self) -> Tokens:
        """Decode to the end and return the answer."""
        while not all(self.ended(row.tokens) and self.is_scored(row) for row in self.particles):
            self.round()
        return self.answer().tokens[len(self.task.prompt) :]

    def round(self) -> tuple[list[Row], list[Row], Any]:
        """Run a round. Returns the blocks, the rows and what verification found."""
        self.rounds += 1
        self.redraft()
        self.particles = [replace(row, start=len(row.tokens)) for row in self.particles]
        rows = self.draft()
        blocks = self.particles if self.lookahead else rows
        verified = self.verify(blocks)
        self.particles = self.placed(self.select(rows, verified))
        return blocks, rows, verified

    @abstractmethod
    def first(self) -> list[Row]:
        """Return the first particles: the prompt and a token of the target."""

    def redraft(self) -> None:
        """Draft again before the round, if the method does so."""
        return

    @abstractmethod
    def draft(self) -> list[Row]: ...

    @abstractmethod
    def verify(self, blocks: list[Row]) -> Any: ...

    @abstractmethod
    def select(self, rows: list[Row], verified: Any) -> list[Row]: ...

    @abstractmethod
    def answer(self) -> Row: ...

    def is_scored(self, row: Row) -> bool:
        """Whether the target has seen the whole row."""
        return not row.logq

    def ended(self, tokens: Tokens) -> bool:
        length = len(tokens) - len(self.task.prompt)
        return length == self.task.max_tokens or (length > 0 and tokens[-1] == self.task.end)

    def chain(self, row: Row, round_: int, stream: int) -> Row:
        """Let the draft draw tokens until K tokens of the row are of this round."""
        while len(row.tokens) < row.start + self.task.block and not self.ended(row.tokens):
            logq = self.task.draft(row.tokens)
            token = self.draw(logq, len(row.tokens), Purpose.PROPOSAL, round_, stream)
            row = row.add(token, 0.0, logq[token].item())
        return row

    def powered(self, tokens: Tokens) -> tuple[Tensor, float]:
        """Return log p^alpha after a sequence, normalised, and the log of its normaliser."""
        raised = self.task.alpha * self.task.target(tokens)
        log_z = raised.logsumexp(-1) if self.task.alpha != 1 else torch.zeros(())
        return raised - log_z, log_z.item()

    def own_draw(self, tokens: Tokens) -> int:
        """The target's own draw after a sequence. Its key is the position alone, so it is plain decoding's token."""
        return self.draw(self.powered(tokens)[0], len(tokens), Purpose.TARGET)

    def draw(self, logp: Tensor, position: int, purpose: Purpose, round_: int = 0, stream: int = 0) -> int:
        """Draw a token: the winner of an exponential race, which has the largest log p + Gumbel noise."""
        return int((self.variates(len(logp), position, purpose, round_, stream) / logp.exp()).argmin())

    def variates(self, count: int, position: int, purpose: Purpose, round_: int = 0, stream: int = 0) -> Tensor:
        """Standard exponential variates. Minus their logs are Gumbel noise."""
        first, second, _, _ = self.words(position, purpose, round_, stream)
        return exponentials(torch.tensor(first), torch.tensor(second), count)

    def uniform(self, position: int, purpose: Purpose, round_: int, stream: int = 0) -> float:
        high, low, _, _ = self.words(position, purpose, round_, stream)
        return (high << 21 | low >> 11) * 2.0**-53

    def words(self, position: int, purpose: Purpose, round_: int, stream: int) -> tuple[int, int, int, int]:
        seed = self.task.seed % 2**64
        return philox((position, stream, round_, purpose), (seed % 2**32, seed >> 32))

    def placed(self, rows: list[Row]) -> list[Row]:
        """Put rows into slots: the first one that continues a slot stays there, the others take free slots in order.
        Returns them in the order of their slots."""
        firsts = {row.slot: row for row in reversed(rows)}
        free = (slot for slot in range(self.task.particles) if slot not in firsts)
        others = [replace(row, slot=next(free)) for row in rows if row is not firsts[row.slot]]
        return sorted([*firsts.values(), *others], key=lambda row: row.slot)


class ExactWalk(Reference):
    """Exact decoding: the draft grows a tree, and the target's own draws walk through it."""

    misses = 0
    """Look-ahead rounds in which no row began with the outcome."""

    def first(self) -> list[Row]:
        self.known = len(self.task.prompt) + 1
        """Number of tokens that the target has drawn, prompt included."""
        self.node_mass: dict[Tokens, float] = {}
        """Mass of each node of the tree, a node being the sequence that leads to it."""
        return [Row((*self.task.prompt, self.own_draw(self.task.prompt)))]

    def answer(self) -> Row:
        return self.particles[0]

    def is_scored(self, row: Row) -> bool:
        return len(row.tokens) == self.known

    def draft(self) -> list[Row]:
        """Grow a tree from the outcomes of the blocks that are verified."""
        return self.tree(likeliest(self.outcomes(), self.width), self.task.block - 1, self.width)

    def tree(self, first: list[Row], steps: int, width: int) -> list[Row]:
        """Grow a tree from its first level: each further level keeps the likeliest tokens after all rows of the level
        before. Choose the rows to verify among its paths."""
        levels = [first]
        for _ in range(steps):
            offers = [offer for row in levels[-1] for offer in self.offers(row)]
            levels.append(likeliest(self.useful(offers, levels[-1], width), width))
        self.node_mass = {row.tokens: row.mass for rows in levels for row in rows}
        return self.paths(levels, width)

    def redraft(self) -> None:
        """Let the particle grow a tree of its own if its block is a single token, as after a miss: its rows are the
        blocks that this round verifies."""
        block, *others = self.particles
        if self.task.redrafted and not others and self.is_scored(block) and not self.ended(block.tokens):
            root = replace(block, mass=0.0, start=self.known - 1)
            rows = self.tree([root], self.task.redrafted, self.task.particles)
            self.particles = [replace(row, slot=slot) for slot, row in enumerate(rows)]

    def outcomes(self) -> list[Row]:
        """How the walk may go on: from a node of the block where it may end, by a token that the block does not have
        there. In lockstep the only node is the last token that the target has drawn."""
        nodes = dict.fromkeys(row.tokens[:n] for row in self.particles for n in range(self.known, len(row.tokens) + 1))
        found, seen = [], set()
        for row in self.particles:
            found += self.offers(row)
            for n in range(self.known, len(row.tokens)):
                node = row.tokens[:n]
                if node not in seen:
                    inner = Row(node, self.node_mass[node], start=n, slot=row.slot)
                    found += [offer for offer in self.offers(inner, KEPT_CANDIDATES) if offer.tokens not in nodes]
                seen.add(node)
        return found

    def offers(self, row: Row, most: int = CANDIDATES_PER_ROW) -> list[Row]:
        """Extend a row by each token that may win the target's draw, with the log-probability that it does, by the
        draft's estimate: the draft knows the noise of that draw (coupled drafting). What has ended offers itself."""
        if self.ended(row.tokens):
            return [row]
        logq = self.task.draft(row.tokens)
        noise = -self.variates(len(logq), len(row.tokens), Purpose.TARGET).log()
        wins, tokens = torch.log_softmax(self.task.exponent * logq + noise, -1).topk(min(most, len(logq)))
        return [row.add(token, win) for token, win in zip(tokens.tolist(), wins.tolist())]

    def useful(self, offers: list[Row], rows: list[Row], width: int) -> list[Row]:
        """After an outcome, at most N rows can become the next block: leave out further ones."""
        if not self.grows_ahead or width == self.task.particles:
            return offers
        ended = {row.tokens for row in rows if self.ended(row.tokens)}
        count = Counter(tokens[: row.start + 1] for row in rows if (tokens := row.tokens) in ended)
        kept = {offers[0].tokens} | ended
        for offer in sorted((offer for offer in offers if offer.tokens not in ended), key=lambda row: -row.mass):
            outcome = offer.tokens[: offer.start + 1]
            if count[outcome] < self.task.particles:
                kept.add(offer.tokens)
            count[outcome] += 1
        return [offer for offer in offers if offer.tokens in kept]

    @property
    def grows_ahead(self) -> bool:
        """Whether rows have tokens after their outcome, which is their first token in look-ahead."""
        return self.lookahead and self.task.block > 1

    def paths(self, levels: list[list[Row]], width: int) -> list[Row]:
        """Choose those paths from an outcome to a leaf that hold the most of the tree together."""
        gain: dict[Tokens, float] = defaultdict(float)
        rows: dict[tuple[Tokens, ...], Row] = {}
        top = max(row.mass for row in levels[0])
        for level, of_level in enumerate(levels):
            for row in of_level:
                size = len(row.tokens)
                path = tuple(row.tokens[:n] for n in range(min(row.start + 1, size), size + 1))
                rows.pop(path[:-1], None)
                rows[path] = row
                # In look-ahead the first token is the target's own if the row is used, so drafting it gains nothing.
                if size == row.start + level + 1 and (level or not self.grows_ahead):
                    gain[row.tokens] = math.exp(row.mass - top)
            gain[of_level[0].tokens] += LEAD_GAIN
        if self.grows_ahead:
            rows = {path: row for path, row in rows.items() if len(path) > 1 or self.ended(row.tokens) or gain[path[0]]}
        taken = heaviest_paths(list(rows), gain, width, self.task.particles)
        outcomes = [row.tokens[: row.start + 1] for row in levels[0]]
        return [rows[path] for path in sorted(taken, key=lambda path: outcomes.index(path[0]))]

    def verify(self, blocks: list[Row]) -> tuple[Tokens, int | None]:
        """Walk along the target's draws until they leave the blocks. Returns the outcome: the node where this happens,
        and the token drawn there; None: the node ends the answer."""
        node, token = blocks[0].tokens[: self.known], None
        while not self.ended(node):
            token = self.next_token(node, blocks)
            if not any(row.tokens[: len(node) + 1] == (*node, token) for row in blocks):
                return node, token
            node = (*node, token)
        return node, None

    def next_token(self, node: Tokens, blocks: list[Row]) -> int:
        return self.own_draw(node)

    def select(self, rows: list[Row], verified: tuple[Tokens, int | None]) -> list[Row]:
        """Keep the rows ahead that begin with the outcome (a hit), at most N. Without one, start again from it."""
        node, token = verified
        begin = node if token is None else (*node, token)
        self.known = len(begin)
        hits = [row for row in rows if self.lookahead and row.tokens[: len(begin)] == begin]
        if hits and token is not None:
            return likeliest(hits, self.task.particles)
        self.misses += self.lookahead and token is not None
        return [Row(begin, slot=next((row.slot for row in self.particles if row.tokens[: len(node)] == node), 0))]


def likeliest(offers: list[Row], most: int) -> list[Row]:
    """Keep the offers of largest mass, in their order, and always the first one: it continues the row that is the whole
    tree if there is one row. So a larger tree holds every smaller one."""
    order = sorted(range(1, len(offers)), key=lambda i: -offers[i].mass)
    return [offers[i] for i in sorted([0, *order[: most - 1]])]


def heaviest_paths(paths: Sequence[tuple], gain: Mapping[Any, float], most: int, most_of_first: int) -> list[tuple]:
    """Repeatedly take the path whose nodes gain most, without the nodes of paths taken before. At most `most_of_first`
    paths have the same first node."""
    taken: list[tuple] = []
    held: set[Any] = set()
    begun: Counter[Any] = Counter()
    while len(taken) < most:
        left = [path for path in paths if path not in taken and begun[path[0]] < most_of_first]
        if not left:
            break
        best = max(left, key=lambda path: sum(gain[node] for node in path if node not in held))
        taken.append(best)
        held.update(best)
        begun[best[0]] += 1
    return taken


class ExactRejection(ExactWalk):
    """Exact decoding by rejection: chains drawn from the draft's distribution q, of which the target keeps a token with
    probability min(1, p / q)."""

    def draft(self) -> list[Row]:
        """Draw chains, equally many after each particle. In look-ahead their first tokens are guesses: the likeliest
        tokens, one after another."""
        rows, count = [], len(self.particles)
        for rank in range(self.width):
            which = rank * count // self.width
            row, guess = self.particles[which], rank + which * self.width // -count
            if self.lookahead and not self.ended(row.tokens):
                order = self.task.draft(row.tokens).topk(min(self.width // self.task.particles, self.width)).indices
                row = row.add(int(order[guess % len(order)]))
            rows.append(self.chain(row, 0, rank))
        return rows

    def next_token(self, node: Tokens, blocks: list[Row]) -> int:
        """Try the chains that go through the node, one after another, each against what the rejected ones have left of
        p: r is first p, and after a rejection max(0, r - q), normalised. If none is kept, draw from r."""
        r, q = (model(node).double().exp() for model in (self.task.target, self.task.draft))
        position = len(node)
        for rank, row in enumerate(blocks):
            if row.tokens[:position] == node and len(row.tokens) > position:
                token, stream = row.tokens[position], row.slot if self.lookahead else rank
                if self.uniform(position, Purpose.TRIAL, 0, stream) * q[token] < r[token]:
                    return token
                rest = (r - q).clamp(min=0)
                r = rest / rest.sum() if rest.any() else r
        return int((r.log() - self.variates(len(r), position, Purpose.REMAINDER).log()).argmax())


class SmcIndependent(Reference):
    """SMC with particles that draw for themselves, and are resampled when few of them hold most of the weight."""

    log_z = 0.0
    """Log of the estimate of the target's total mass on answers; after `run`, that of all rounds."""

    def first(self) -> list[Row]:
        logp, log_z = self.powered(self.task.prompt)
        slots = range(self.task.particles)
        return [row for slot in slots for row in self.next_rows(Row(self.task.prompt, log_z, slot=slot), logp, slot)]

    def answer(self) -> Row:
        """Draw a particle by weight."""
        masses = [row.mass for row in self.particles]
        self.log_z += self.log_z_of(masses)
        return self.particles[index_of(self.uniform(0, Purpose.FINAL, self.rounds), masses)]

    def log_z_of(self, masses: list[float]) -> float:
        return logsumexp(masses) - math.log(len(masses))

    def draft(self) -> list[Row]:
        """Draw K tokens for each branch of each particle. A particle that has ended has one branch: itself."""
        rows = []
        for row in self.particles:
            branches = 1 if self.ended(row.tokens) else self.width // self.task.particles
            share = replace(row, mass=row.mass - math.log(branches), logq=())
            rows += [self.chain(share, self.rounds, row.slot * STREAMS_PER_PARTICLE + f) for f in range(branches)]
        return rows

    def verify(self, blocks: list[Row]) -> list[Row]:
        """Multiply weights by p^alpha / q of the tokens that the target has not scored."""
        return [replace(row, mass=row.mass + sum(self.ratios(row)), logq=()) for row in blocks]

    def ratios(self, row: Row) -> list[float]:
        """alpha log p - log q of each token that the target has not scored."""
        first = len(row.tokens) - len(row.logq)
        logp = [self.task.target(row.tokens[:n])[row.tokens[n]].item() for n in range(first, len(row.tokens))]
        return [self.task.alpha * p - q for p, q in zip(logp, row.logq)]

    def select(self, rows: list[Row], verified: list[Row]) -> list[Row]:
        candidates = self.rows_ahead(rows, verified) if self.lookahead else self.rows_with_bonus(verified)
        if all(row.mass == -math.inf for row in candidates):
            return self.surviving(self.particles if self.lookahead else rows)
        return self.chosen(candidates)

    def rows_ahead(self, rows: list[Row], verified: list[Row]) -> list[Row]:
        """Weigh rows drafted ahead: by the block before them, their share of its particle, and p^alpha / q of their
        first token, which the target has just computed."""
        before = {row.slot: (row.mass, scored.mass) for row, scored in zip(self.particles, verified)}
        weighed = []
        for row in rows:
            mass, scored = before[row.slot]
            share = row.mass - mass if mass > -math.inf else 0.0
            first = self.ratios(replace(row, tokens=row.tokens[: row.start + 1], logq=row.logq[:1]))
            weighed.append(replace(row, mass=scored + share + sum(first), logq=row.logq[1:]))
        return weighed

    def rows_with_bonus(self, verified: list[Row]) -> list[Row]:
        """Continue blocks by the token that the target draws after them (lockstep)."""
        rows = []
        for rank, row in enumerate(verified):
            if self.ended(row.tokens):
                rows.append(row)
            else:
                logp, log_z = self.powered(row.tokens)
                rows += self.next_rows(replace(row, mass=row.mass + log_z), logp, rank)
        return [replace(row, logq=()) for row in rows]

    def next_rows(self, row: Row, logp: Tensor, rank: int) -> list[Row]:
        """Continue a row by a token of the target."""
        stream = row.slot * STREAMS_PER_PARTICLE
        return [row.add(self.draw(logp, len(row.tokens), Purpose.TARGET, self.rounds, stream))]

    def chosen(self, candidates: list[Row]) -> list[Row]:
        """Resample all candidates if the effective sample size of the particles is low. Otherwise each particle keeps
        one of its branches, drawn by weight, with the weight of all of them."""
        n = self.task.particles
        families = [[row for row in candidates if row.slot == root.slot] for root in self.particles]
        masses = [logsumexp([row.mass for row in family]) for family in families]
        ess = 1 / sum(math.exp(2 * (mass - logsumexp(masses))) for mass in masses)
        if ess < self.task.ess_threshold * n * (1 - EQUAL):
            self.log_z += logsumexp(masses) - math.log(n)
            shift = self.uniform(0, Purpose.SELECTION, self.rounds)
            drawn = (index_of((j + shift) / n, [row.mass for row in candidates]) for j in range(n))
            return [replace(candidates[i], mass=0.0) for i in drawn]
        kept = []
        for slot, (family, mass) in enumerate(zip(families, masses)):
            point = self.uniform(BRANCH_POSITION + slot, Purpose.SELECTION, self.rounds)
            kept.append(replace(family[index_of(point, [row.mass for row in family])], mass=mass))
        return kept

    def surviving(self, blocks: list[Row]) -> list[Row]:
        """No candidate has weight. Continue from a prefix of a block that has, drawn by weight, and the target's own
        next token."""
        self.log_z, prefixes = -math.inf, []
        for row in blocks:
            ratios = self.ratios(row)
            kept = next((i for i, ratio in enumerate(ratios) if ratio == -math.inf), len(ratios))
            tokens = row.tokens[: len(row.tokens) - len(ratios) + kept]
            prefixes.append(replace(row, tokens=tokens, mass=row.mass + sum(ratios[:kept]), logq=()))
        point = self.uniform(PREFIX_POSITION, Purpose.SELECTION, self.rounds)
        row = replace(prefixes[index_of(point, [row.mass for row in prefixes])], mass=0.0)
        row = row if self.ended(row.tokens) else row.add(self.own_draw(row.tokens))
        return [replace(row) for _ in range(self.copies)]

    @property
    def copies(self) -> int:
        """Number of particles that continue a surviving prefix."""
        return self.task.particles


class SmcDistinct(SmcIndependent):
    """SMC with particles drawn without replacement: candidate tokens of all rows compete, so no two rows are equal."""

    copies = 1

    def first(self) -> list[Row]:
        logp, log_z = self.powered(self.task.prompt)
        rows = self.kept(self.next_rows(Row(self.task.prompt, log_z), logp, 0), FIRST_STEP, self.task.particles)
        return self.placed([replace(row, logq=()) for row in rows])

    def log_z_of(self, masses: list[float]) -> float:
        """Distinct particles stand for different parts of the distribution, so their weights add up."""
        return logsumexp(masses)

    def draft(self) -> list[Row]:
        """At each step keep N F of the candidates after all rows."""
        rows = [replace(row, logq=()) for row in self.particles]
        ranks = [row.slot for row in rows]
        for step in range(self.task.block):
            offers = []
            for rank, row in zip(ranks, rows):
                if self.ended(row.tokens):
                    offers.append(row)
                else:
                    offers += self.offers(row, self.task.draft(row.tokens), Purpose.PROPOSAL, rank)
            rows, ranks = self.kept(offers, step, self.width), list(range(self.width))
        return rows

    def next_rows(self, row: Row, logp: Tensor, rank: int) -> list[Row]:
        return self.offers(row, logp, Purpose.TARGET, rank)

    def offers(self, row: Row, log_dist: Tensor, purpose: Purpose, rank: int) -> list[Row]:
        """Extend a row by each of its likeliest tokens, and by one token drawn from the rest of the distribution, which
        stands for all the rest. Their masses add up to that of the row."""
        masses, tokens = log_dist.topk(min(CANDIDATES_PER_ROW, len(log_dist)))
        found = [row.add(token, mass, mass) for token, mass in zip(tokens.tolist(), masses.tolist())]
        rest = log_dist.scatter(-1, tokens, -torch.inf)
        mass = rest.logsumexp(-1)
        if mass > -torch.inf:
            token = self.draw(rest - mass, len(row.tokens), purpose, self.rounds, rank)
            found.append(row.add(token, mass.item(), log_dist[token].item()))
        return found

    def kept(self, offers: list[Row], step: int, most: int, least: float = 0.0) -> list[Row]:
        uniform = self.uniform(EXPANSION_POSITION + step, Purpose.SELECTION, self.rounds)
        return without_replacement(offers, most, uniform, least)

    def chosen(self, candidates: list[Row]) -> list[Row]:
        return self.kept(candidates, self.task.block, self.task.particles, LEAST_SHARE)


def without_replacement(offers: list[Row], most: int, uniform: float, least: float = 0.0) -> list[Row]:
    """Draw at most `most` of the offers: offer j with probability pi = min(1, c m_j), such that these add up to `most`.
    It then has the mass m_j / pi, so that its expected mass is m_j. `least`: at most m_j / (least * mean mass)."""
    offers = [row for row in offers if row.mass > -math.inf]
    top = max(row.mass for row in offers)
    masses = [math.exp(row.mass - top) for row in offers]
    heaviest, c = sorted(masses, reverse=True), math.inf
    if len(offers) > most:
        # The heaviest offers are certain (pi = 1) as long as the next one would be, too.
        sure = next(k for k in range(most) if heaviest[k] * (most - k) <= sum(heaviest[k:]))
        c = (most - sure) / sum(heaviest[sure:])
    limit = most / (least * sum(masses)) if least else math.inf
    drawn, reach = [], 0.0
    for row, mass in zip(offers, masses):
        # Of the points u, u + 1, .., at most one is in the offer's part of the line, which is pi long.
        pi = min(1.0, c * mass, limit * mass)
        before, reach = reach, reach + pi
        if pi == 1 or math.floor(reach - uniform) > math.floor(before - uniform):
            drawn.append(replace(row, mass=row.mass - math.log(pi)))
    return drawn[:most]


def index_of(point: float, masses: list[float]) -> int:
    """Return the index of the log-weight in whose part of the line from 0 to 1 the point is."""
    reach = torch.tensor(masses, dtype=torch.float64).softmax(-1).cumsum(-1)
    return int((reach <= point * reach[-1]).sum())


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits: Philox4x32-10 (Salmon et al. 2011, section 3.3)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def logsumexp(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).logsumexp(-1))
