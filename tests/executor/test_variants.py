"""After the warm-up, no request of any kind needs a kernel variant that is not compiled yet.

The rounds come from an engine on a CPU. Kernel launches are intercepted where Triton's interpreter would run them, and
are not run. Triton itself says which arguments the compiler distinguishes, so models have the dtype that they have on
GPUs, and logits another one where something is added to them."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

pytest.importorskip("triton")

from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import interpreter

from smc.api.engine_config import EngineConfig
from smc.calibration.compile_ahead import plans_of_all_kinds
from smc.calibration.warm_up import REPEATS, rare_requests, warm_up, warm_up_plans
from smc.executor.round_executor import LocalRoundExecutor
from smc.kernels.launch import unspecialized
from smc.local_engine import ModelPair, local_engine
from smc.model.presets import NoText
from smc.scheduler.engine import Engine
from smc.types import ModelRole
from tests.executor.test_kernels import KERNELS
from tests.model.tiny import random_decoder, tiny_config
from tests.scheduler.random_requests import AnySize, some_request

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled there: tests/gpu/test_warm_up.py"
)
VOCAB, CONTEXT = 300, 1024
LOOKAHEAD, LOCKSTEP = (
    EngineConfig(form=form, block=3, max_slots=16, max_context=CONTEXT).on_device("cpu")
    for form in ("lookahead", "lockstep")
)
FORMS = {"lookahead": LOOKAHEAD, "lockstep": LOCKSTEP, "redrafting": replace(LOOKAHEAD, redrafting="always")}
TOGETHER = [1, 2, 4]
"""Numbers of requests that are submitted at once; the requests differ between the two forms."""
MISSED = 0.025
"""Share of the variants that may be left to their first launch: rare mixtures of more rows than a dry run has."""
Call = tuple[str, tuple]
"""A call of the executor: method and arguments."""


def pair(dtype: torch.dtype) -> ModelPair:
    shape = tiny_config(vocab_size=VOCAB, num_layers=1, head_dim=16, max_context=CONTEXT, tied_embeddings=False)
    target, draft = (random_decoder(shape, seed).to(dtype) for seed in (1, 2))
    return ModelPair(target, draft, NoText(VOCAB), CONTEXT)


def noted(engine: Engine) -> list[Call]:
    """A list that collects all calls of the engine to its executor from now on."""
    calls: list[Call] = []
    for name in ("join", "round"):
        method = getattr(engine.executor, name)
        setattr(
            engine.executor,
            name,
            lambda *args, name=name, method=method: (calls.append((name, args)), method(*args))[1],
        )
    return calls


def firsts(calls: list[Call]) -> list[Call]:
    """The calls without repeated rounds: only the first round of each kind stays, as it compiles all that the kind
    needs."""
    of_kind = {args[0].kind: number for number, (name, args) in reversed([*enumerate(calls)]) if name == "round"}
    return [call for number, call in enumerate(calls) if call[0] != "round" or of_kind[call[1][0].kind] == number]


class Variants:
    """Variants of all launched kernels, by model role: in a worker group each role has its own process and compiles for
    itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pair: LocalRoundExecutor) -> None:
        self.found: set[tuple] = set()
        self._side = ""
        for name, side in pair.runners.items():
            for method in ("join", "round", "draft", "remap"):
                if hasattr(side, method):
                    monkeypatch.setattr(side, method, partial(self._of_side, name, getattr(side, method)))
        monkeypatch.setattr(
            interpreter.InterpretedFunction, "run", lambda kernel, *args, **named: self._add(kernel, args, named)
        )
        # Kernels write nothing here, so memory must not be read uninitialised.
        monkeypatch.setattr(torch, "empty", torch.zeros)
        monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
        monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)

    def _of_side(self, name: str, method: Callable, *args: object) -> object:
        self._side = name
        return method(*args)

    def _add(self, kernel: interpreter.InterpretedFunction, args: tuple, named: dict) -> None:
        constants, alike = _constants_of(kernel.fn), kernel.kwargs["do_not_specialize"] or ()
        options = tuple(
            sorted(
                (name, value)
                for name, value in named.items()
                if name not in constants and name not in ("grid", "warmup")
            )
        )
        given = dict(zip(constants, args)) | {name: value for name, value in named.items() if name in constants}
        told = (self._told(name, value, constants[name], name not in alike) for name, value in given.items())
        self.found.add((f"{self._side}: {kernel.fn.__module__}.{kernel.fn.__name__}", *told, options))

    def _told(self, name: str, value: object, constant: bool, specialised: bool) -> tuple:
        if constant:
            return name, value
        told = native_specialize_impl(CUDABackend, value, False, specialised, True)
        return name, told if specialised else unspecialized(*told)


@cache
def _constants_of(kernel: Callable) -> dict[str, bool]:
    """For each parameter of a kernel, whether it is a constexpr."""
    return {
        name: "constexpr" in str(parameter.annotation)
        for name, parameter in inspect.signature(kernel).parameters.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_warm_up_compiles_every_variant(config, monkeypatch):
    # The first round of a request compiles. Those after it are there for captures, of which a CPU has none.
    monkeypatch.setattr("smc.calibration.warm_up.ROUNDS", 2)
    draw = random.Random(config.form)
    # As in a service, the models are not timed yet while the warm-up runs, so its requests have whole trees.
    warmed_up = local_engine(pair(torch.float32), config)
    before = noted(warmed_up)
    warm_up(warmed_up, (), rare_requests(config, warmed_up.context, VOCAB))
    reference = local_engine(pair(torch.float32), config, trees=AnySize(config))
    after = noted(reference)
    for number, together in enumerate(TOGETHER):
        # Few enough rows that all requests run at once, even if each row has an unconditional one.
        rows = config.max_slots // (2 * together)
        requests = [some_request(draw, 4 * number + i, VOCAB, rows) for i in range(together)]
        assert not [output.answer.error for output in reference.run(requests) if output.answer and output.answer.error]
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    kernels = local_engine(pair(torch.bfloat16), config).executor
    variants = Variants(monkeypatch, kernels)
    for plan in plans_of_all_kinds(config, reference.context, VOCAB, list(ModelRole)):
        kernels.round(plan).result()
    ahead = set(variants.found)
    variants.found.clear()
    for plan in list(warm_up_plans(config, reference.context))[::REPEATS]:
        kernels.round(plan).result()
    for name, args in firsts(before):
        getattr(kernels, name)(*args)
    known = set(variants.found)
    for name, args in after:
        getattr(kernels, name)(*args)
    assert len(known) > 50
    # What is compiled before the warm-up is nearly all of it, and no more.
    assert len(known - ahead) <= MISSED * len(known)
    assert ahead <= known
    assert not [(name, _constants(told)) for name, *told, _ in variants.found - known]


def _constants(told: list[tuple]) -> dict[str, object]:
    return {name: value for name, value in told if not isinstance(value, tuple)}
