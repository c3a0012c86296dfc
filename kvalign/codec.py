"""The only file that joins the at-rest stages: encode(cache) -> bytes, decode(bytes) -> cache.

    cache -> unrotate keys -> [T, P] -> (x - mean) analysis -> [T, R] -> round(y / step) -> symbols
          -> classes -> rANS blocks -> container                                  and back the same way

Knows no calibration and no files: artifact.py reads and writes what a Codec holds.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from kvalign import container, verbatim
from kvalign.accounting import PayloadSizes
from kvalign.capture import CacheShape, layer_tensors, token_matrix
from kvalign.curve import OperatingPoint, step_for_kl, step_for_ratio
from kvalign.entropy.classes import LOWEST, Tables
from kvalign.entropy.rans import BlockCoder
from kvalign.errors import ConfigInvalid, PayloadInvalid
from kvalign.geometry import KINDS, Kind, TokenSplit
from kvalign.quantize import LARGEST_SYMBOL, STEP_LIMIT, dequantize, quantize
from kvalign.token_steps import COARSEST_SHIFT, FINEST_SHIFT, shift_bytes, shifts_by_attention, step_sizes
from kvalign.transform import Transform
from kvalign.watch import RecentQueries

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK_TOKENS = 128


class Codec:
    """Turns the KV cache of one model into few bytes, and back.

    shape        geometry and rotary positions of the model's cache
    transforms   one for each feature group, keys then values
    tables       symbol tables of all classes
    curve        operating points by rising step; may be empty while a codec is being fitted
    recommended  the step that encode takes when nothing is asked for
    token_beta   how much finer the step of a token is that the last queries attend to; 0: one step for all
    codec_id     16 bytes; payloads name it, and no other codec reads them
    """

    def __init__(
        self,
        shape: CacheShape,
        transforms: Sequence[Transform],
        tables: Tables,
        *,
        sink_tokens: int,
        recent_tokens: int,
        recommended: int,
        token_beta: float = 0.0,
        curve: Sequence[OperatingPoint] = (),
        codec_id: bytes = bytes(container.CODEC_ID_BYTES),
    ) -> None:
        self.shape = shape
        self.transforms = tuple(transforms)
        self.tables = tables
        self.sink_tokens = sink_tokens
        self.recent_tokens = recent_tokens
        self.recommended = recommended
        self.token_beta = token_beta
        self.curve = tuple(sorted(curve, key=lambda point: point.step))
        self.codec_id = codec_id

    def encode(
        self,
        cache: Any,
        *,
        max_kl: float | None = None,
        ratio: float | None = None,
        step: int | None = None,
        attention_mask: Tensor | None = None,
        queries: RecentQueries | None = None,
    ) -> bytes:
        """The cache as bytes.

        cache           a transformers Cache whose layers hold [B, H, T, D]; float32, float16 or bfloat16
        max_kl, ratio   take the step that the stored curve gives for this mean KL in nats, or coded-token ratio
        step            take this step (sixteenths of an octave); with none of the three, the recommended one
        attention_mask  [B, T], zeros for left padding; default: no padding
        queries         the prefix's last queries (watch.watch_queries): tokens that they attend to get a finer step

        Raises ConfigInvalid for a target outside the measured range, or padding that is not on the left;
        SourceUnsupported for a cache that is not this model's.
        """
        payload = self._payload(cache, self._step(max_kl, ratio, step), attention_mask, queries)
        return container.pack(payload)

    def decode(self, data: bytes, model: Any = None) -> DynamicCache:
        """The cache, in the dtype it was encoded from, ready to go on generating; padding holds zeros.

        model   takes its device; default CPU
        Raises PayloadInvalid when the bytes are damaged or come from another codec.
        """
        payload = self._parsed(data)
        cache = DynamicCache()
        rows = [self._decode_row(payload, row) for row in payload.rows]
        device = getattr(model, "device", "cpu")
        for layer in range(len(self.shape.geometry.layers)):
            keys = torch.stack([row["keys"][layer] for row in rows])
            values = torch.stack([row["values"][layer] for row in rows])
            cache.update(keys.to(device), values.to(device), layer)
        return cache

    def cache(self, model: Any) -> DynamicCache:
        """An empty cache for this model."""
        return DynamicCache(config=model.config)

    def sizes(self, data: bytes) -> PayloadSizes:
        """Where the bytes of a payload went."""
        payload = self._parsed(data)
        held = sum(payload.tokens - row.padding for row in payload.rows)
        splits = [
            TokenSplit.of(payload.tokens - row.padding, payload.sink_tokens, payload.recent_tokens)
            for row in payload.rows
        ]
        body = sum(split.body for split in splits)
        return PayloadSizes(
            coded=sum(len(block.data) for row in payload.rows for block in row.blocks),
            verbatim=sum(len(row.verbatim) for row in payload.rows),
            side_info=payload.table_bytes + sum(len(block.shifts) for row in payload.rows for block in row.blocks),
            body_tokens=body,
            verbatim_tokens=held - body,
        )

    def _step(self, max_kl: float | None, ratio: float | None, step: int | None) -> int:
        if sum(choice is not None for choice in (max_kl, ratio, step)) > 1:
            raise ConfigInvalid("More than one of max_kl, ratio and step was given.", "Give at most one.")
        if step is not None:
            if abs(step) > STEP_LIMIT:
                raise ConfigInvalid(f"Step {step} is outside -{STEP_LIMIT} to {STEP_LIMIT}.", "Give a step in between.")
            return step
        if max_kl is not None:
            return step_for_kl(self.curve, max_kl)
        if ratio is not None:
            return step_for_ratio(self.curve, ratio)
        return self.recommended

    # ---- encoding

    def _payload(
        self, cache: Any, step: int, attention_mask: Tensor | None, queries: RecentQueries | None
    ) -> container.Payload:
        tensors = layer_tensors(cache)
        self._check_cache(tensors)
        first = tensors[0][0]
        verbatim_dtype = verbatim.verbatim_dtype(tensors)
        rows = [
            self._encode_row(cache, row, padding, step, verbatim_dtype, queries)
            for row, padding in enumerate(_left_padding(attention_mask, first.shape[0], first.shape[2]))
        ]
        return container.Payload(
            codec_id=self.codec_id,
            dtype_code=DTYPES.index(first.dtype),
            verbatim_dtype_code=DTYPES.index(verbatim_dtype),
            step=step,
            block_tokens=BLOCK_TOKENS,
            tokens=first.shape[2],
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            rows=tuple(rows),
        )

    def _encode_row(
        self,
        cache: Any,
        row: int,
        padding: int,
        step: int,
        verbatim_dtype: torch.dtype,
        queries: RecentQueries | None,
    ) -> container.Row:
        tensors = layer_tensors(cache)
        tokens = tensors[0][0].shape[2]
        split = TokenSplit.of(tokens - padding, self.sink_tokens, self.recent_tokens)
        body = slice(padding + split.sink, padding + split.sink + split.body)
        kept = [*range(padding, body.start), *range(body.stop, tokens)]
        shifts = self._shifts(tensors, row, body, padding, queries)
        symbols, classes = self._symbols(cache, row, body, padding, step, shifts)
        blocks = []
        for start in range(0, split.body, BLOCK_TOKENS):
            part = slice(start, min(start + BLOCK_TOKENS, split.body))
            block = container.Block(self._coder.encode(symbols[part], classes[part]), shifts=shift_bytes(shifts[part]))
            raw_size = 2 * self.shape.geometry.values_per_token * (part.stop - part.start)
            if len(block.stored) >= raw_size or np.abs(symbols[part]).max(initial=0) >= LARGEST_SYMBOL:
                inside = list(range(body.start + part.start, body.start + part.stop))
                block = container.Block(verbatim.to_bytes(tensors, row, inside, verbatim_dtype), raw=True)
            blocks.append(block)
        return container.Row(padding, 0, verbatim.to_bytes(tensors, row, kept, verbatim_dtype), tuple(blocks))

    def _shifts(
        self, tensors: list[tuple[Tensor, Tensor]], row: int, body: slice, padding: int, queries: RecentQueries | None
    ) -> NDArray[np.int8]:
        """Shift of each body token's step, [T] int8; zeros when the queries were not watched."""
        received = [
            found
            for layer, (keys, _) in enumerate(tensors)
            if queries and (found := queries.attention(layer, keys, row, padding)) is not None
        ]
        if not received or not self.token_beta or body.stop == body.start:
            return np.zeros(body.stop - body.start, dtype=np.int8)
        return shifts_by_attention([part[body] for part in received], self.token_beta)

    def _symbols(
        self, cache: Any, row: int, body: slice, padding: int, step: int, shifts: NDArray[np.int8]
    ) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
        """Symbols of the body tokens over all groups side by side, and their classes: [T, r] each."""
        positions = torch.arange(body.start, body.stop) - padding
        sizes = step_sizes(step, shifts)
        matrices = {kind: token_matrix(cache, kind, self.shape, row, body, positions).cpu() for kind in KINDS}
        symbols, classes = [], []
        for transform in self.transforms:
            coded = transform.token_classes(step, shifts)
            x = matrices[transform.group.kind][:, transform.group.start : transform.group.stop]
            y = (x - transform.mean) @ transform.analysis[:, : coded.shape[1]]
            symbols.append(np.where(coded >= LOWEST, quantize(y, sizes).numpy(), 0))
            classes.append(coded)
        return np.concatenate(symbols, axis=1), np.concatenate(classes, axis=1)

    def _check_cache(self, tensors: list[tuple[Tensor, Tensor]]) -> None:
        wanted = [(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in self.shape.geometry.layers]
        found = [(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in tensors]
        if found != wanted:
            other = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
            fact = "" if other is None else f"; layer {other} has {found[other]} where the codec has {wanted[other]}"
            raise ConfigInvalid(
                f"The cache has {len(found)} layers, this codec was made for {len(wanted)}"
                f" of (KV heads, key width, value width){fact}.",
                "Use the codec of the model that made the cache.",
            )
        shapes = {(x.shape[0], x.shape[2]) for pair in tensors for x in pair}
        if len(shapes) > 1 or any(0 in shape for shape in shapes):
            raise ConfigInvalid(
                f"The cache holds (rows, tokens) {sorted(shapes)[:4]}.",
                "Give a cache of one row and one token or more, as many in every layer.",
            )
        if tensors[0][0].dtype not in DTYPES:
            raise ConfigInvalid(f"The cache is {tensors[0][0].dtype}.", "float32, float16 and bfloat16 are coded.")
        if any(not torch.isfinite(x).all() for pair in tensors for x in pair):
            raise ConfigInvalid("The cache holds values that are not finite.", "Check what the model was given.")

    # ---- decoding

    def _parsed(self, data: bytes) -> container.Payload:
        payload = container.unpack(data, values_per_token=self.shape.geometry.values_per_token)
        if payload.codec_id != self.codec_id:
            raise PayloadInvalid(
                f"The payload was made by codec {payload.codec_id.hex()}; this is {self.codec_id.hex()}.",
                "Load the artifact revision that the payload was made with.",
            )
        if abs(payload.step) > STEP_LIMIT:
            raise PayloadInvalid("The payload's step is out of bounds.", "Fetch the payload again.")
        if payload.dtype_code >= len(DTYPES) or not 1 <= payload.verbatim_dtype_code < len(DTYPES):
            raise PayloadInvalid("The payload names an unknown dtype.", "Update kvalign.")
        return payload

    def _decode_row(self, payload: container.Payload, row: container.Row) -> dict[Kind, list[Tensor]]:
        """Keys and values of each layer, [H, T, D] in the cache's dtype."""
        held = payload.tokens - row.padding
        split = TokenSplit.of(held, payload.sink_tokens, payload.recent_tokens)
        dtype = DTYPES[payload.dtype_code]
        verbatim_dtype = DTYPES[payload.verbatim_dtype_code]
        kept = verbatim.from_bytes(row.verbatim, self.shape.geometry, split.verbatim, verbatim_dtype)
        body = self._decode_body(payload, row, split, verbatim_dtype)
        result: dict[Kind, list[Tensor]] = {}
        for kind in KINDS:
            result[kind] = []
            for whole, coded in zip(kept[kind], body[kind], strict=True):
                padding = torch.zeros(coded.shape[0], row.padding, coded.shape[2])
                parts = [padding, whole[:, : split.sink], coded, whole[:, split.sink :]]
                # What rounding carries past the largest number of the dtype must not become infinite.
                limit = torch.finfo(dtype).max
                result[kind].append(torch.cat(parts, dim=1).clamp_(-limit, limit).to(dtype))
        return result

    def _decode_body(
        self, payload: container.Payload, row: container.Row, split: TokenSplit, verbatim_dtype: torch.dtype
    ) -> dict[Kind, list[Tensor]]:
        """Body tokens as float32 keys (rotated) and values of each layer, [H, T, D]."""
        spans = [
            slice(start, min(start + payload.block_tokens, split.body))
            for start in range(0, split.body, payload.block_tokens)
        ]
        shifts = np.zeros(split.body, dtype=np.int8)
        for span, block in zip(spans, row.blocks, strict=True):
            if block.shifts:
                shifts[span] = np.frombuffer(block.shifts, dtype=np.int8)
        if shifts.size and not FINEST_SHIFT <= shifts.min() <= shifts.max() <= COARSEST_SHIFT:
            raise PayloadInvalid("A token's step in the payload is shifted out of bounds.", "Fetch the payload again.")
        parts = [transform.token_classes(payload.step, shifts) for transform in self.transforms]
        classes = np.concatenate(parts, axis=1)
        symbols = np.zeros(classes.shape, dtype=np.int32)
        for span, block in zip(spans, row.blocks, strict=True):
            if not block.raw:
                symbols[span] = self._coder.decode(block.data, np.ascontiguousarray(classes[span]))
        widths = [part.shape[1] for part in parts]
        sizes = step_sizes(payload.step, shifts)
        coded = self._synthesise(symbols, widths, sizes, row.position + split.sink, DTYPES[payload.dtype_code])
        for span, block in zip(spans, row.blocks, strict=True):
            if block.raw:
                plain = verbatim.from_bytes(block.data, self.shape.geometry, span.stop - span.start, verbatim_dtype)
                for kind in KINDS:
                    for target, source in zip(coded[kind], plain[kind], strict=True):
                        target[:, span] = source
        return coded

    def _synthesise(
        self, symbols: NDArray[np.int32], widths: list[int], sizes: Tensor, first_position: int, dtype: torch.dtype
    ) -> dict[Kind, list[Tensor]]:
        """symbols [T, r], of which each transform takes its width of columns; sizes [T, 1]."""
        positions = torch.arange(symbols.shape[0]) + first_position
        result: dict[Kind, list[Tensor]] = {kind: [] for kind in KINDS}
        column = 0
        for transform, coded in zip(self.transforms, widths, strict=True):
            y = dequantize(torch.from_numpy(symbols[:, column : column + coded]), sizes)
            column += coded
            x = torch.addmm(transform.mean, y, transform.synthesis[:coded])
            start = 0
            for index in range(transform.group.first_layer, transform.group.end_layer):
                layer = self.shape.geometry.layers[index]
                width = layer.width(transform.group.kind)
                heads = x[:, start : start + width].unflatten(1, (layer.kv_heads, -1)).transpose(0, 1)
                start += width
                if transform.group.kind == "keys":
                    heads = self.shape.ropes[index].redo(heads, positions, dtype)
                result[transform.group.kind].append(heads.contiguous())
        return result

    @cached_property
    def _coder(self) -> BlockCoder:
        return BlockCoder(self.tables)


def _left_padding(attention_mask: Tensor | None, rows: int, tokens: int) -> list[int]:
    """Padded positions before each row's first token."""
    if attention_mask is None:
        return [0] * rows
    if tuple(attention_mask.shape) != (rows, tokens):
        raise ConfigInvalid(
            f"attention_mask is {tuple(attention_mask.shape)}; the cache holds {(rows, tokens)}.",
            "Give one mask entry for each cached token.",
        )
    held = attention_mask.bool().cpu()
    padding = [int(tokens - row.sum()) for row in held]
    if any(not row[count:].all() for row, count in zip(held, padding, strict=True)):
        raise ConfigInvalid("attention_mask is not left padding.", "Pad on the left: zeros first, then ones.")
    return padding
