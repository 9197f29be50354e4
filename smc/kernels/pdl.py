"""Programmatic dependent launch: a kernel begins while the one before it ends.

The kernels of a decoding step take a few microseconds each, and of these the launch is one. A kernel that is launched
so waits (`gdc_wait`) until the one before it has ended and can be seen. It says (`gdc_launch_dependents`) from when on
the next may come, and the rule that all else rests on is that it waits first, in every program: so whoever comes finds
what the kernel two before left, and all before that. What it reads before it waits is that, and nothing that the kernel
just before writes: tables of pages, weights of norms, the residual that an earlier norm left; rows' own attention,
which comes while prefixes are read, queries, keys and values. It writes nothing earlier. Where warps of a program have
tasks of their own (`smc.attention.specialized`), those that copy a prefix's keys and values, which earlier passes
stored, need not wait, since others of every program do.

A kernel that comes early takes its places then, and likely gets fewer of them where a multiprocessor still holds much
of the one before. Products, and the last kernel of attention, say it last, when their sums are made; norms, and what
stores keys and values, once they have waited, since those before them have left their places then: so the kernel that
reads prefixes, with a program for each multiprocessor, finds them free. It says it once it has waited, too: rows' own
attention takes little room. Each was measured, and so was asking for weights in advance, which made passes slower
(`docs/performance.md`)."""

from __future__ import annotations

import torch

CAPABILITY = (9, 0)
"""Of GPUs: the first that know it."""


def supports_pdl(device: torch.device | str) -> bool:
    """Whether kernels of a device can be launched so."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def launch_options(pdl: bool) -> dict[str, bool]:
    """Launch keywords; without it none, so that the interpreter and older drivers see nothing new."""
    return {"launch_pdl": True} if pdl else {}
