"""The GPU library's matrix products of many tokens, where they have the bits of `smc.kernels.fixed_order`.

The library chooses its kernel by the sizes of a product. Most kernels add up the inputs one after another, as ours do,
and are often faster for many tokens; some cut the inputs. So a product of each size is first computed both ways, and
the library is used for this size only if all bits are equal and it takes less time: whether it is changes no result.
The numbers of this product are random, but each sum would be zero without rounding: what is left of it shows the order
of its terms, which another result would hide when it is rounded to 16 bits. A product of several parts is one call for
each part, which adds its sums to those of the parts before in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from smc.kernels.compile_jobs import is_recording
from smc.kernels.fixed_order import linear_fixed, splits_of
from smc.kernels.linear import reduce

PIECES = (4096, 2048, 1024, 512, 256)
"""Numbers of tokens into which prompts are divided, because the library is checked for each number."""
SMALL = 2.0**-17
"""Standard deviation of the bias with which the library is checked."""
AHEAD = 2_000_000
"""Clocks, about 1 ms, for which the GPU waits before products are timed, so that the host has queued them by then."""
TIMED = 4
"""Number of products that are timed together."""
_Size = tuple[int, int, int, int, bool, torch.dtype]


class LibraryProducts:
    """Products of many tokens with unquantised weights, in one order of sums: by the library for sizes for which it has
    been seen to be as exact and faster, otherwise by our kernel."""

    def __init__(self) -> None:
        self._pays: dict[_Size, bool] = {}

    def multiply(
        self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, splits: int | None, *, divided: bool
    ) -> Tensor:
        """Return x W^T (+ bias) as `linear_fixed` does. `divided`: in `PIECES`, for numbers of tokens that are hardly
        ever the same twice."""
        splits = splits or splits_of(*weight_OI.shape)
        pieces = _pieces(len(x_TI)) if divided else [len(x_TI)]
        if pieces == [len(x_TI)]:
            if self._uses(x_TI, weight_OI, bias_O, splits):
                return by_library(x_TI, weight_OI, bias_O, splits)
            return linear_fixed(x_TI, weight_OI, splits, bias_O)
        out_TO = x_TI.new_empty(len(x_TI), len(weight_OI))
        for x, out in zip(x_TI.split(pieces), out_TO.split(pieces)):
            if len(x) in PIECES and self._uses(x, weight_OI, bias_O, splits):
                by_library(x, weight_OI, bias_O, splits, out)
            else:
                made = linear_fixed(x, weight_OI, splits, bias_O)
                reduce(made.view(-1, *out.shape), out)
        return out_TO

    def _uses(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, splits: int) -> bool:
        """Return whether the library multiplies this size. It does not if the size is first seen while a graph is
        captured, because the check waits for the device, nor in a dry run, in which our kernel may not run; the size is
        checked when it is next seen."""
        size = (*x_TI.shape, weight_OI.shape[0], splits, bias_O is not None, x_TI.dtype)
        if size not in self._pays:
            if not x_TI.is_cuda or torch.cuda.is_current_stream_capturing() or is_recording():
                return False
            self._pays[size] = _pays(x_TI, weight_OI, bias_O, splits)
        return self._pays[size]


def _pays(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, splits: int) -> bool:
    """Return whether the library gives the same bits as our kernel for a product of this size, in less time."""
    try:
        x_TI, other_OI = cancelling(x_TI, weight_OI)
        shift_O = None if bias_O is None else small_bias(bias_O)
        theirs_TO = by_library(x_TI, other_OI, shift_O, splits)
        ours_TO = torch.empty_like(theirs_TO)

        def ours(weight_OI: Tensor) -> Tensor:
            made = linear_fixed(x_TI, weight_OI, splits, shift_O)
            # In a pass the reader of the parts adds them up, which takes about as long as here.
            return reduce(made, ours_TO) if made.ndim == 3 else made

        if not torch.equal(ours(other_OI), theirs_TO):
            return False
        # Two weights in turn, so that less of them is still in the cache, as in a pass over all layers.
        weights = (weight_OI, other_OI)
        return _milliseconds(lambda weight: by_library(x_TI, weight, shift_O, splits), weights) < _milliseconds(
            ours, weights
        )
    except torch.OutOfMemoryError:
        return False


def _milliseconds(multiply: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> float:
    """Return the time of `TIMED` products with these weights in turn on the GPU, without what the host needs to queue
    them: the lesser of two."""
    found = []
    for _ in range(2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD)
        begin.record()
        for i in range(TIMED):
            multiply(weights[i % len(weights)])
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found)


def cancelling(x_TI: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return operands of the shapes and types of these, whose products are zero but for rounding: each of the last half
    of the inputs has the opposite of the product that one of the first half has."""
    device, half = x_TI.device, x_TI.shape[1] // 2
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(half, generator=generator, device=device)

    def operand(like: Tensor, sign: int) -> Tensor:
        made = torch.empty_like(like, memory_format=torch.contiguous_format).normal_(generator=generator)
        made[:, half : 2 * half] = sign * made[:, order]
        made[:, 2 * half :] = 0
        return made

    return operand(x_TI, 1), operand(weight_OI, -1)


def small_bias(like_O: Tensor) -> Tensor:
    """Return a bias of this shape and type that is about as large as what rounding leaves of cancelling products, so
    that results show whether it is added before or after these."""
    generator = torch.Generator(like_O.device).manual_seed(1)
    return torch.empty_like(like_O).normal_(generator=generator).mul_(SMALL)


def by_library(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, splits: int, out_TO: Tensor | None = None
) -> Tensor:
    """Return x W^T (+ bias) [T, O] in x's type, added up part by part."""
    if splits == 1:
        made_TO = F.linear(x_TI, weight_OI, bias_O)
        return made_TO if out_TO is None else out_TO.copy_(made_TO)
    total_TO: Tensor | None = None
    for x_part, weight_part in zip(x_TI.chunk(splits, 1), weight_OI.chunk(splits, 1)):
        if total_TO is None:
            total_TO = torch.mm(x_part, weight_part.t(), out_dtype=torch.float32)
            if bias_O is not None:
                total_TO += bias_O
        else:
            total_TO = torch.addmm(total_TO, x_part, weight_part.t(), out_dtype=torch.float32)
    assert total_TO is not None
    return total_TO.to(x_TI.dtype) if out_TO is None else out_TO.copy_(total_TO)


def _pieces(tokens: int) -> list[int]:
    """Return the numbers of tokens of pieces, the largest first; the last one may be any number below the least of
    `PIECES`."""
    pieces = []
    for size in PIECES:
        count, tokens = divmod(tokens, size)
        pieces += [size] * count
    return [*pieces, tokens] if tokens else pieces
