"""Pages of a model's cache, which a `transformers.DynamicCache` is copied into and out of."""

from __future__ import annotations

import bisect
import threading
from typing import Any

import torch

from torch_nixl.kv.cache import KVCache

try:
    from transformers import DynamicCache
except ImportError as error:
    raise ImportError(
        "torch_nixl.integrations.transformers needs transformers, which can't be imported "
        f"({error}): pip install 'torch-nixl[transformers]'"
    ) from error

__all__ = ["DynamicCache", "PagePool"]


class PagePool:
    """Pages that fit a model's cache, and who has which. Safe to use from many threads.

    Args:
        config: The model's, of transformers. Every layer has to keep keys and values of all
            positions, in heads of one size.
        num_pages: How many. Each takes ``2 * num_layers * page_size * num_kv_heads * head_dim``
            values.
        model: Whatever tells models apart: name, revision, adapter. Both sides have to say the
            same.
        page_size: Tokens of a page. The two sides' may differ, if one divides the other.
        dtype: That of the model's keys and values.
        device: Where pages lie. Caches may lie elsewhere, and are read onto it.

    Attributes:
        cache: The pages, as servers and clients take them.
        tensor: ``[num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]``, keys before
            values.
        num_pages: How many there are.
        page_size: Tokens of each.

    Raises:
        ValueError: The model keeps something else than keys and values of all positions, or a
            number is not positive.
    """

    def __init__(
        self,
        config: Any,
        num_pages: int,
        *,
        model: str,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{num_pages} pages of {page_size} tokens: expected 1 or more")
        num_layers, num_kv_heads, head_dim = _shape_of(config)
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
        # Written to, unlike zeros(): else the first transfers would wait for the kernel's pages.
        self.tensor = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.cache = KVCache([self.tensor], "LKPTHD", model=model)
        self._lock = threading.Lock()
        self._free = list(range(num_pages))

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def allocate(self, num_tokens: int) -> list[int] | None:
        """Take pages for so many tokens, the lowest ones first; None if there aren't enough now.

        Raises:
            ValueError: There never will be enough, or no token.
        """
        count = -(-num_tokens // self.page_size)
        if not 1 <= count <= self.num_pages:
            raise ValueError(
                f"{num_tokens} tokens: the pool has {self.num_pages} pages of {self.page_size}"
            )
        with self._lock:
            if count > len(self._free):
                return None
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def free(self, pages: list[int]) -> None:
        """Give pages back.

        Raises:
            ValueError: One is free already, or does not exist. None has been given back then.
        """
        with self._lock:
            wrong = set(pages) & set(self._free) or set(pages) - set(range(self.num_pages))
            if wrong or len(set(pages)) != len(pages):
                raise ValueError(f"pages {pages}: some are free, named twice, or don't exist")
            for page in pages:
                bisect.insort(self._free, page)

    def write(self, cache: DynamicCache, pages: list[int]) -> None:
        """Copy a cache's keys and values into pages: on a device, by its current stream.

        Args:
            cache: Of one sequence.
            pages: Those of its tokens, in order.

        Raises:
            ValueError: The cache has other layers, heads, dtype or several sequences, or the pages
                are too few. No page has been written to then.
        """
        layers = [self._of_layer(index, layer) for index, layer in enumerate(cache.layers)]
        if len(layers) != len(self.tensor):
            raise ValueError(f"the cache has {len(layers)} layers, the pool {len(self.tensor)}")
        sizes = {keys.shape[0] for keys, _ in layers}
        if len(sizes) != 1:
            raise ValueError(f"the cache's layers hold different numbers of tokens: {sizes}")
        slots = self._slots(pages, sizes.pop())
        flat = self.tensor.flatten(2, 3)
        for index, parts in enumerate(layers):
            for part, values in enumerate(parts):
                flat[index, part].index_copy_(0, slots, values.to(flat.device))

    def read(self, pages: list[int], num_tokens: int) -> DynamicCache:
        """Copy keys and values out of pages, into a cache of one sequence.

        Raises:
            ValueError: The pages are too few.
        """
        slots = self._slots(pages, num_tokens)
        flat = self.tensor.flatten(2, 3)
        cache = DynamicCache()
        for index in range(len(flat)):
            # As models lay them out: ``[1, num_kv_heads, num_tokens, head_dim]``.
            keys, values = (
                part.index_select(0, slots).transpose(0, 1).unsqueeze(0).contiguous()
                for part in flat[index]
            )
            cache.update(keys, values, index)
        if flat.device.type != "cpu":
            # The pages change hands next, and their next holder may use another stream.
            getattr(torch, flat.device.type).current_stream(flat.device).synchronize()
        return cache

    def _slots(self, pages: list[int], num_tokens: int) -> torch.Tensor:
        """Indices of the first tokens of pages, ``[num_tokens]``."""
        if num_tokens > len(pages) * self.page_size:
            raise ValueError(
                f"{len(pages)} pages of {self.page_size} can't hold {num_tokens} tokens"
            )
        device = self.tensor.device
        first = torch.tensor(pages, dtype=torch.int64, device=device) * self.page_size
        return (first[:, None] + torch.arange(self.page_size, device=device)).flatten()[:num_tokens]

    def _of_layer(self, index: int, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each ``[num_tokens, num_kv_heads, head_dim]``."""
        found = []
        heads, dim = self.tensor.shape[-2:]
        if getattr(layer, "is_sliding", False):
            raise ValueError(f"layer {index} keeps a window of its positions only")
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                raise ValueError(f"layer {index} of the cache has no {name}")
            if tensor.ndim != 4 or tensor.shape[0] != 1:
                raise ValueError(
                    f"layer {index}: {name} have the shape {tuple(tensor.shape)}: expected one "
                    "sequence; take each with cache.batch_select_indices"
                )
            if (tensor.shape[1], tensor.shape[3]) != (heads, dim):
                raise ValueError(
                    f"layer {index}: {name} have {tensor.shape[1]} heads of {tensor.shape[3]} "
                    f"values, the pool's {heads} of {dim}"
                )
            if tensor.dtype != self.tensor.dtype:
                raise ValueError(
                    f"layer {index}: {name} are {tensor.dtype}, not {self.tensor.dtype}"
                )
            found.append(tensor[0].transpose(0, 1))
        return found[0], found[1]

    def __repr__(self) -> str:
        return f"<PagePool {self.cache!r} free={self.num_free}>"


def _shape_of(config: Any) -> tuple[int, int, int]:
    """Layers, heads of keys and values, and values of a head.

    Raises:
        ValueError: A layer is of another kind.
    """
    config = config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        raise ValueError(
            f"{config.model_type} has layers of {', '.join(sorted(others))}: expected that each "
            "keeps keys and values of all positions"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, head_dim
