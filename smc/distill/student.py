"""Creates and saves the draft that is trained: layers cut from the target, a new small shape, or an existing draft.

Local axes: Z conversations."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smc.distill.trainer import LossMix, answer_states, head_loss, parts_of
from smc.model.check import require_pair
from smc.model.config import SAVED_FAMILIES, ModelConfig
from smc.model.decoder import Decoder
from smc.model.files import read_json
from smc.model.loader import initial_model, load_model, save_with_config
from smc.model.tokenizer import Tokenizer
from smc.model.vocabularies import add_rows

DEPTH_SHARE = 7
"""Default number of layers of the target for one layer of the draft."""
PER_LAYER_FIELDS = ("layer_types", "no_rope_layers")
"""Fields of config.json with an entry for each layer."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class StudentSpec:
    """Description of the draft to train. Raises ValueError for options that contradict each other."""

    layers: int | None = None
    """Number of layers cut from the target; default: one of seven, at least two."""
    shape: str | None = None
    """`WIDTHxLAYERS`: a new model of this hidden size, with an embedding and a head of its own."""
    draft: Path | None = None
    """Directory of an existing draft that is trained further."""
    own_embedding: bool = False
    """Whether embedding and head are trained, too. Otherwise they stay those of the target, or of the given draft."""

    def __post_init__(self) -> None:
        given = [name for name in ("layers", "shape", "draft") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"--{given[0]} and --{given[1]} exclude each other; give one of them")
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"--layers {self.layers}; allowed: >= 1")
        if self.shape is not None and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", self.shape):
            raise ValueError(f"--shape {self.shape!r}; allowed: WIDTHxLAYERS, such as 256x6")
        if self.shape is not None and self.own_embedding:
            raise ValueError("--own-embedding has no effect with --shape, whose embedding is always its own")


@dataclass(frozen=True)
class Student:
    """A draft in training."""

    model: Decoder
    """Model in float32 on a CPU, in bfloat16 on a GPU."""
    hf_config: Mapping[str, Any]
    """Contents of the draft's config.json."""
    origin: str
    """Origin of the initial weights, as text for the card."""

    @property
    def trained_weights(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)


def make_student(target: Decoder, target_dir: Path, spec: StudentSpec, layers: Sequence[int] = ()) -> Student:
    """Create the draft to train. `layers`: layers of the target from `choose_layers`. Raises ValueError for a draft
    that this target cannot have."""
    if spec.draft is not None:
        weight = target.embed.weight
        model = load_model(spec.draft, dtype=weight.dtype, device=weight.device)
        add_rows(model, Tokenizer.load(target_dir).size)  # the draft will have the target's tokenizer
        config = _without_quantisation(spec.draft) | {"vocab_size": model.config.vocab_size}
        student = Student(model, config, f"the draft {spec.draft.name}")
    elif spec.shape is not None:
        student = _of_shape(target, spec.shape)
    else:
        student = _of_layers(target, target_dir, spec, layers)
    student.model.requires_grad_(True)
    if not (spec.own_embedding or spec.shape):
        student.model.embed.requires_grad_(False)
        student.model.lm_head.requires_grad_(False)
    return student


def check_student(target: ModelConfig, target_dir: Path, spec: StudentSpec) -> None:
    """Raise ValueError for a draft that this target cannot have."""
    if spec.draft is not None:
        require_pair(target_dir, spec.draft)
    elif spec.shape is not None:
        _config_of_shape(target, spec.shape)
    elif spec.layers is not None:
        candidate_layers(target.num_layers, spec.layers)


def choose_layers(target: Decoder, spec: StudentSpec, rows_Z: np.ndarray, vocab: int) -> tuple[int, ...]:
    """Choose the layers of the target that the draft is cut from: those whose untrained draft is nearest to the target
    on the answers of a sample of conversations. Empty for a student that is not cut."""
    if spec.draft is not None or spec.shape is not None:
        return ()
    candidates = candidate_layers(target.config.num_layers, spec.layers or default_layers(target.config))
    with torch.no_grad():
        p_TE = _hidden_answers(target, rows_Z)
        return min(candidates, key=lambda layers: _kl(target, p_TE, cut(target, layers), rows_Z, vocab))


def default_layers(target: ModelConfig) -> int:
    return min(target.num_layers, max(2, round(target.num_layers / DEPTH_SHARE)))


def candidate_layers(total: int, count: int) -> list[tuple[int, ...]]:
    """Return the sets of `count` layers that a draft may be cut from, of a target with `total` layers. Raises
    ValueError if `count` is larger than `total`."""
    if count > total:
        raise ValueError(f"--layers {count}; allowed for this target: at most {total}")
    spread = [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]
    head = -(-count // 2)
    found = [
        tuple(spread),
        tuple(range(count)),
        (*range(head), *range(total - (count - head), total)),
        (*range(count - 1), total - 1),
        tuple(i * total // count for i in range(count)),
    ]
    return list(dict.fromkeys(found))


def _of_layers(target: Decoder, target_dir: Path, spec: StudentSpec, layers: Sequence[int]) -> Student:
    config, model = target.config, cut(target, layers, copy=True)
    if spec.own_embedding:
        model.embed.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
        model.lm_head.weight = (
            model.embed.weight if config.tied_embeddings else torch.nn.Parameter(model.lm_head.weight.detach().clone())
        )
    return Student(
        model,
        _cut_config(_without_quantisation(target_dir), layers),
        f"layers {', '.join(map(str, layers))} of the target's {config.num_layers}",
    )


def cut(target: Decoder, layers: Sequence[int], copy: bool = False) -> Decoder:
    """Return a decoder of these layers of the target, which shares the target's weights. With `copy`, its layers and
    its last norm have weights of their own."""
    config = target.config
    with torch.device("meta"):
        model = Decoder(
            replace(
                config,
                num_layers=len(layers),
                window_layers=tuple(i for i, layer in enumerate(layers) if layer in config.window_layers),
                unrotated_layers=tuple(i for i, layer in enumerate(layers) if layer in config.unrotated_layers),
            )
        )
    theirs = dict(target.named_parameters(remove_duplicate=False))
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        head, _, rest = name.partition(".")
        index, _, inner = rest.partition(".")
        weight = theirs[f"layers.{layers[int(index)]}.{inner}" if head == "layers" else name]
        owner, _, last = name.rpartition(".")
        shared = head in ("embed", "lm_head") or not copy
        made = weight if shared else torch.nn.Parameter(weight.detach().clone())
        setattr(model.get_submodule(owner), last, made)
    return model.eval()


def _kl(target: Decoder, p_TE: Tensor, model: Decoder, rows_Z: np.ndarray, vocab: int) -> float:
    """Return the KL divergence, nats a token, of an untrained draft from the target, whose hidden states are `p_TE`."""
    loss, _, _ = head_loss(target, model, p_TE, _hidden_answers(model, rows_Z), vocab, LossMix(kl=1.0), 1.0)
    return loss.item() / len(p_TE)


def _hidden_answers(model: Decoder, rows_Z: np.ndarray) -> Tensor:
    """Return the hidden states [T, E] from which answer tokens are predicted."""
    return torch.cat([answer_states(model, *part) for part in parts_of(rows_Z, model.embed.weight.device)])


def _config_of_shape(target: ModelConfig, shape: str) -> ModelConfig:
    """Return the configuration of a new model of shape `WIDTHxLAYERS`. Raises ValueError for a shape that the target's
    family or heads do not allow."""
    if target.unpadded_head_dim is not None:
        raise ValueError(
            f"--shape {shape} with a target whose heads have {target.unpadded_head_dim} features, which a GPU pads; "
            "cut layers with --layers, or give --device cpu"
        )
    width, layers = map(int, shape.split("x"))
    if width % target.head_dim:
        raise ValueError(f"--shape {shape}; the width must be a multiple of the target's head size, {target.head_dim}")
    if target.family not in SAVED_FAMILIES:
        raise ValueError(f"--shape is not available for {target.family}; cut layers with --layers")
    heads = width // target.head_dim
    return replace(
        target,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=math.gcd(heads, target.num_kv_heads),
        intermediate_size=-(-width * 8 // 3 // 64) * 64,
        tied_embeddings=True,
    )


def _of_shape(target: Decoder, shape: str) -> Student:
    own = _config_of_shape(target.config, shape)
    weight, origin = target.embed.weight, f"random weights, {own.hidden_size} wide, {own.num_layers} layers"
    return Student(initial_model(own, seed=0).to(weight.device, weight.dtype), own.to_hf(), origin)


def _without_quantisation(directory: Path) -> dict[str, Any]:
    raw = read_json(directory / "config.json")
    raw.pop("quantization_config", None)
    return raw


def _cut_config(raw: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    raw = raw | {"num_hidden_layers": len(layers)}
    for name in PER_LAYER_FIELDS:
        if isinstance(raw.get(name), list):
            raw[name] = [raw[name][layer] for layer in layers]
    return raw


def save_student(student: Student, target_dir: Path, out: Path) -> None:
    """Write the draft's directory, in bfloat16, with the target's tokenizer. Raises ValueError if its config.json would
    describe another model."""
    config = {key: value for key, value in student.hf_config.items() if key not in ("torch_dtype", "dtype")}
    save_with_config(student.model, out, config | {"torch_dtype": "bfloat16"}, torch.bfloat16)
    for name in TOKENIZER_FILES:
        if (target_dir / name).is_file():
            shutil.copyfile(target_dir / name, out / name)
    device = student.model.embed.weight.device
    if (found := ModelConfig.from_hf(out).on_device(device)) != student.model.config:
        raise ValueError(f"{out}: config.json describes {found}, but the draft is {student.model.config}")
