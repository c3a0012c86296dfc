"""What one layer holds: pages of codes, and in 16 bit the first tokens of the text and the newest. Knows no attention.

    slots      0 .. coded          on pages, every one of them
               coded .. slots      newest tokens, in 16 bit, waiting until a page of them is full
    sinks      first tokens behind a row's padding, in 16 bit besides: attention takes them from here

A token is coded once, from what the model computed; nothing is ever coded again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalign import kernels
from kvalign.errors import ConfigInvalid
from kvalign.geometry import KINDS, Kind
from kvalign.kernels import cpu
from kvalign.resident.layout import PAGE_TOKENS
from kvalign.resident.plan import GroupPlan, LayerPlan

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT16_SAFE = 60_000.0


@dataclass
class Pages:
    """Codes of one kind of one group.

    codes   [B, N, page_bytes] uint8
    scales  [B, N, PAGE_TOKENS] uint8, logarithms
    """

    codes: Tensor
    scales: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.codes, self.scales = change(self.codes), change(self.scales)

    def add(self, codes: Tensor, scales: Tensor) -> None:
        self.codes = torch.cat([self.codes, codes], dim=1)
        self.scales = torch.cat([self.scales, scales], dim=1)


class LayerState:
    """One layer's part of a resident cache.

    plan           of this layer
    sink_tokens    kept in 16 bit behind the padding of each row
    recent_tokens  newest tokens that are never coded yet
    """

    def __init__(self, plan: LayerPlan, sink_tokens: int, recent_tokens: int) -> None:
        self.plan = plan
        self.sink_tokens = sink_tokens
        self.recent_tokens = recent_tokens
        self.counts: list[int] = []  # tokens of each page; fewer than PAGE_TOKENS only where it was cropped
        self.pages: list[dict[Kind, Pages]] = []  # of each group
        self.raw_tokens = 0  # newest tokens in the buffers below, behind the sinks
        self.padding = torch.zeros(0, dtype=torch.int64)  # [B]
        self.most_padding = 0
        self.first_coded_array = np.zeros(0, dtype=np.uint64)
        self.dtype = torch.float32  # of what was appended
        self._raw: dict[Kind, Tensor] = {}  # [B, H, sinks + room, D] in 16 bit
        self._gathered: dict[int, cpu.Coded] = {}  # forgotten whenever pages change

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without what is gathered of pages, which is the original's."""
        return {**self.__dict__, "_gathered": {}}

    # ---- sizes

    @property
    def is_empty(self) -> bool:
        return not self._raw

    @property
    def coded_tokens(self) -> int:
        return sum(self.counts)

    @property
    def slots(self) -> int:
        """Tokens held of each row, padding included."""
        return self.coded_tokens + self.raw_tokens

    @property
    def rows(self) -> int:
        return self.padding.numel()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of memory by purpose."""
        pages = [page for group in self.pages for page in group.values()]
        return {
            "coded": sum(page.codes.numel() + page.scales.numel() for page in pages),
            "verbatim": sum(raw.numel() * raw.element_size() for raw in self._raw.values()),
        }

    # ---- filling

    def append(self, keys: Tensor, values: Tensor, padding: Tensor) -> None:
        """Take new tokens, [B, H, T, D], in 16 bit. padding [B]: slots before each row's first token, as known now."""
        self._check(keys, values, padding)
        keys, values = keys.detach(), values.detach()
        if self.is_empty:
            self._begin(keys, values)
        self._set_padding(padding)
        self._make_room(keys.shape[2])
        self._fit_range(keys, values)
        at = self.sink_tokens + self.raw_tokens
        for kind, new in zip(KINDS, (keys, values), strict=True):
            self._raw[kind][:, :, at : at + new.shape[2]] = new
            self.fill_sinks(self._raw[kind], new, self.slots)
        self.raw_tokens += keys.shape[2]

    def settle(self) -> None:
        """Code the oldest tokens beyond the recent ones, a page at a time."""
        count = max(0, self.raw_tokens - self.recent_tokens) // PAGE_TOKENS
        if not count:
            return
        tokens = count * PAGE_TOKENS
        span = slice(self.sink_tokens, self.sink_tokens + tokens)
        for group, pages in zip(self.plan.groups, self.pages, strict=True):
            for kind in KINDS:
                heads = self._raw[kind][:, group.first_head : group.end_head, span]
                pages[kind].add(*kernels.encode(group.side(kind), heads.transpose(1, 2).flatten(2).float()))
        self.counts += [PAGE_TOKENS] * count
        self._gathered.clear()
        left = self.raw_tokens - tokens
        for kind, raw in self._raw.items():
            kept = self._buffer(raw, self._usual_room())
            kept[:, :, : self.sink_tokens] = raw[:, :, : self.sink_tokens]
            kept[:, :, self.sink_tokens : self.sink_tokens + left] = raw[:, :, span.stop : span.stop + left]
            self._raw[kind] = kept
        self.raw_tokens = left

    def crop(self, tokens: int) -> None:
        """Forget the newest `tokens` of every row."""
        assert tokens >= 0
        self._gathered.clear()
        tokens = min(tokens, self.slots)
        from_raw = min(tokens, self.raw_tokens)
        self.raw_tokens -= from_raw
        tokens -= from_raw
        while tokens:
            gone = min(tokens, self.counts[-1])
            self.counts[-1] -= gone
            tokens -= gone
            if not self.counts[-1]:
                self.counts.pop()
        for group in self.pages:
            for pages in group.values():
                if pages.codes.shape[1] > len(self.counts):
                    # Copies, so that the memory behind what is gone is given back.
                    pages.codes = pages.codes[:, : len(self.counts)].clone()
                    pages.scales = pages.scales[:, : len(self.counts)].clone()

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Pick, repeat or reorder the rows of the batch: `change` is given each tensor, rows first."""
        self._gathered.clear()
        for group in self.pages:
            for pages in group.values():
                pages.each(change)
        self._raw = {kind: change(raw) for kind, raw in self._raw.items()}
        self._set_padding(change(self.padding))

    def reset(self) -> None:
        """Forget everything."""
        self.__init__(self.plan, self.sink_tokens, self.recent_tokens)  # type: ignore[misc]

    # ---- reading

    def raw(self, kind: Kind) -> Tensor:
        """[B, H, sinks + raw tokens, D] in 16 bit; which of them count is said by raw_slots."""
        return self._raw[kind][:, :, : self.sink_tokens + self.raw_tokens]

    def raw_buffer(self, kind: Kind) -> Tensor:
        """The memory behind raw, [B, H, capacity, D], contiguous."""
        return self._raw[kind]

    @property
    def first_coded(self) -> Tensor:
        """[B]: first slot that attention takes from pages; padding and sinks come before it."""
        return self.padding + self.sink_tokens

    def raw_slots(self) -> Tensor:
        """[B, sinks + raw tokens] int64: the slot of each raw token; -1 where it does not count."""
        sinks = self.padding[:, None] + torch.arange(self.sink_tokens, device=self.padding.device)
        newest = torch.arange(self.coded_tokens, self.slots, device=self.padding.device).expand(self.rows, -1)
        sinks = sinks.masked_fill(sinks >= self.slots, -1)
        return torch.cat([sinks, newest.masked_fill(newest < self.first_coded[:, None], -1)], dim=1)

    def coded_slots(self, first_page: int = 0, end_page: int | None = None) -> Tensor:
        """[N x PAGE_TOKENS] int64: the slot of each token of pages; -1 where a page holds none."""
        parts = []
        start = sum(self.counts[:first_page])
        for count in self.counts[first_page:end_page]:
            slots = torch.full((PAGE_TOKENS,), -1, dtype=torch.int64)
            slots[:count] = torch.arange(start, start + count)
            start += count
            parts.append(slots)
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def gathered(self, group: int) -> cpu.Coded:
        """The pages of a group as the processor's kernel reads them."""
        if group not in self._gathered:
            own = self.pages[group]
            keys, values = ((own[kind].codes, own[kind].scales) for kind in KINDS)
            self._gathered[group] = cpu.Coded.of(self.plan.groups[group], keys, values, self.counts)
        return self._gathered[group]

    def dense(self, kind: Kind, dtype: torch.dtype) -> Tensor:
        """Every token of every row, uncompressed: [B, H, slots, D]. For attention that cannot read codes."""
        parts = []
        held = self.coded_slots() >= 0
        for group, pages in zip(self.plan.groups, self.pages, strict=True):
            side, own = group.side(kind), pages[kind]
            x = kernels.coefficients(side, own.codes, own.scales).mT @ side.synthesis + side.mean
            parts.append(x[:, held.to(x.device)].unflatten(2, (group.heads, -1)).transpose(1, 2))
        raw = self.raw(kind).float()
        found = torch.cat([torch.cat(parts, dim=1), raw[:, :, self.sink_tokens :]], dim=2)
        slots = self.raw_slots()[:, : self.sink_tokens]
        for sink in range(self.sink_tokens):
            rows = torch.nonzero(slots[:, sink] >= 0)[:, 0]
            found[rows, :, slots[rows, sink]] = raw[rows, :, sink]
        limit = torch.finfo(dtype).max
        return found.clamp(-limit, limit).to(dtype)

    def fill_sinks(self, raw: Tensor, new: Tensor, start: int) -> None:
        """Copy those of the new tokens, from slot `start` on, that are the first of their rows, into raw."""
        if start >= self.most_padding + self.sink_tokens:
            return
        for row in range(self.rows):
            first = int(self.padding[row])
            low, high = max(first, start), min(first + self.sink_tokens, start + new.shape[2])
            if low < high:
                raw[row, :, low - first : high - first] = new[row, :, low - start : high - start]

    # ---- within

    def _begin(self, keys: Tensor, values: Tensor) -> None:
        self.dtype = keys.dtype
        dtype = torch.float16 if keys.dtype == torch.float32 else keys.dtype
        room = max(self._usual_room(), self.sink_tokens + keys.shape[2])
        for kind, new in zip(KINDS, (keys, values), strict=True):
            shape = (new.shape[0], new.shape[1], room, new.shape[3])
            self._raw[kind] = torch.zeros(shape, dtype=dtype, device=new.device)
        self._set_padding(torch.zeros(keys.shape[0], dtype=torch.int64, device=keys.device))
        self.plan = self.plan.to(keys.device)
        self.pages = [
            {kind: _no_pages(group, kind, keys.shape[0], keys.device) for kind in KINDS} for group in self.plan.groups
        ]

    def _set_padding(self, padding: Tensor) -> None:
        """Keep what every token needs of it; the same tensor comes again and again."""
        if padding is not self.padding:
            self.padding = padding
            self.most_padding = int(padding.max()) if padding.numel() else 0
            self.first_coded_array = self.first_coded.cpu().numpy().astype(np.uint64)

    def _usual_room(self) -> int:
        """What decoding needs: a page waits until it is full."""
        return self.sink_tokens + self.recent_tokens + PAGE_TOKENS

    def _fit_range(self, keys: Tensor, values: Tensor) -> None:
        """From float16 to bfloat16, where tokens come that float16 cannot hold."""
        if keys.dtype == torch.float16 or self._raw["keys"].dtype != torch.float16 or not keys.numel():
            return
        if max(float(keys.abs().max()), float(values.abs().max())) >= _FLOAT16_SAFE:
            self._raw = {kind: raw.to(torch.bfloat16) for kind, raw in self._raw.items()}

    def _make_room(self, tokens: int) -> None:
        needed = self.sink_tokens + self.raw_tokens + tokens
        for kind, raw in self._raw.items():
            if raw.is_inference() and not torch.is_inference_mode_enabled():
                # What was begun in inference mode goes on outside of it.
                self._raw[kind] = raw.clone()
            if raw.shape[2] < needed:
                grown = self._buffer(raw, needed)
                grown[:, :, : raw.shape[2]] = raw
                self._raw[kind] = grown

    @staticmethod
    def _buffer(like: Tensor, room: int) -> Tensor:
        return like.new_zeros(like.shape[0], like.shape[1], room, like.shape[3])

    def _check(self, keys: Tensor, values: Tensor, padding: Tensor) -> None:
        plan = self.plan
        wanted = [(plan.kv_heads, plan.key_dim), (plan.kv_heads, plan.value_dim)]
        found = [(x.shape[1], x.shape[3]) for x in (keys, values)]
        if wanted != found:
            raise ConfigInvalid(
                f"A layer got (KV heads, width) {found[0]} and {found[1]} of keys and values; this cache was made for"
                f" {wanted[0]} and {wanted[1]}.",
                "Use the cache with the model that it was made for.",
            )
        if keys.shape[::2] != values.shape[::2] or padding.numel() != keys.shape[0]:
            raise ConfigInvalid(
                f"A layer got keys {tuple(keys.shape)}, values {tuple(values.shape)} and padding of {padding.numel()}"
                " rows.",
                "Give as many rows of each, and as many tokens.",
            )
        if not self.is_empty and keys.shape[0] != self.rows:
            raise ConfigInvalid(
                f"The cache holds {self.rows} rows; the new tokens have {keys.shape[0]}.",
                "Use one cache for one batch.",
            )
        if keys.dtype not in _DTYPES or values.dtype != keys.dtype:
            raise ConfigInvalid(
                f"The new tokens are {keys.dtype} and {values.dtype}.", "float32, bfloat16 and float16 are cached."
            )


def _no_pages(group: GroupPlan, kind: Kind, rows: int, device: torch.device) -> Pages:
    side = group.side(kind)
    return Pages(
        torch.zeros(rows, 0, side.layout.page_bytes, dtype=torch.uint8, device=device),
        torch.zeros(rows, 0, PAGE_TOKENS, dtype=torch.uint8, device=device),
    )
