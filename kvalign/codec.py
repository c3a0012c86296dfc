"""The only file that joins the at-rest stages: encode(cache) -> bytes, decode(bytes) -> cache.

    token ids -> first layers -> features -> expected
    cache -> unrotate keys -> [T, P] -> (x - expected) analysis -> [T, R] -> round(y / step) -> symbols
          -> classes -> rANS blocks -> container                                  and back the same way

Knows no calibration and no files: artifact.py reads and writes what a Codec holds.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from kvalign import container, verbatim
from kvalign.accounting import PayloadSizes
from kvalign.capture import CacheShape, head_tensors, layer_tensors, token_matrix
from kvalign.curve import OperatingPoint, step_for_kl, step_for_ratio
from kvalign.entropy.classes import Tables
from kvalign.entropy.rans import BlockCoder
from kvalign.errors import ConfigInvalid, PayloadInvalid
from kvalign.geometry import KINDS, Kind, TokenSplit
from kvalign.quantize import LARGEST_SYMBOL, STEP_LIMIT, dequantize, quantize
from kvalign.recompute import FirstLayers, Recomputed, same_tokens
from kvalign.resident.cache import ResidentCache, fill, same_weights, uncompressed
from kvalign.resident.interface import register
from kvalign.resident.plan import ResidentPlan
from kvalign.token_steps import COARSEST_SHIFT, FINEST_SHIFT, shift_bytes, shifts_by_attention, step_sizes
from kvalign.transform import Transform, token_classes
from kvalign.watch import Watched, watch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK_TOKENS = 128
_ID_TYPES = {2: "<u2", 4: "<u4"}
_FETCH_AGAIN = "Fetch the payload again."


T = TypeVar("T")
R = TypeVar("R")


class Codec:
    """Turns the KV cache of one model into few bytes, and back.

    shape        geometry and rotary positions of the model's cache
    transforms   one for each feature group, keys then values
    tables       symbol tables of all classes
    curve        operating points by rising step; may be empty while a codec is being fitted
    recommended  the step that encode takes when nothing is asked for
    token_beta   how much finer the step of a token is that the last queries attend to; 0: one step for all
    codec_id     16 bytes; payloads name it, and no other codec reads them
    model        the base model: runs its first layers on the token ids, where shape.recomputed is not 0
    resident     the form of the cache that attention reads; None: this codec has none
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
        model: Any = None,
        resident: ResidentPlan | None = None,
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
        self.resident = resident
        self._model = model

    def encode(
        self,
        cache: Any,
        *,
        input_ids: Tensor | None = None,
        max_kl: float | None = None,
        ratio: float | None = None,
        step: int | None = None,
        attention_mask: Tensor | None = None,
        watched: Watched | None = None,
    ) -> bytes:
        """The cache as bytes.

        cache           a transformers Cache whose layers hold [B, H, T, D], float32, float16 or bfloat16; or a resident
                        cache, whose layers are uncompressed for it
        input_ids       [B, T] integers: the tokens that the cache was made from, from the start of the text; needed
                        where the codec recomputes layers (shape.recomputed), and stored with the payload
        max_kl, ratio   take the step that the stored curve gives for this mean KL in nats, or coded-token ratio
        step            take this step (sixteenths of an octave); with none of the three, the recommended one
        attention_mask  [B, T], zeros for left padding; default: no padding
        watched         what Codec.watch kept while the model read: tokens that its last queries attend to get a finer
                        step, and no layer is run again

        Raises ConfigInvalid for a target outside the measured range, padding that is not on the left, or token ids
        that are missing or not the cache's; SourceUnsupported for a cache that is not this model's.
        """
        coded = isinstance(cache, ResidentCache)
        payload = self._payload(
            uncompressed(cache) if coded else cache,
            self._step(max_kl, ratio, step),
            attention_mask,
            watched,
            input_ids,
            exact=not coded,
        )
        return container.pack(payload)

    def decode(self, data: bytes) -> ResidentCache:
        """A resident cache of the codec's model, ready to go on generating.

        Raises PayloadInvalid when the bytes are damaged or come from another codec, ConfigInvalid when the codec was
        given no model, or has no resident form.
        """
        payload = self._parsed(data)
        padding = torch.tensor([row.padding for row in payload.rows])
        return fill(self.cache(), layer_tensors(self._decoded(payload)), padding)

    def decode_dense(self, data: bytes) -> DynamicCache:
        """The cache as it was encoded, uncompressed, on the model's device and in the dtype it was encoded from.

        Padding holds zeros. Raises PayloadInvalid when the bytes are damaged or come from another codec.
        """
        return self._decoded(self._parsed(data))

    def _decoded(self, payload: container.Payload) -> DynamicCache:
        whole = self._empty(payload, len(payload.rows), payload.tokens)
        for index, row in enumerate(payload.rows):
            held = [(keys[index, :, row.padding :], values[index, :, row.padding :]) for keys, values in whole]
            self._decode_row(payload, row, 0, payload.tokens - row.padding, held)
        cache = DynamicCache()
        for index, (keys, values) in enumerate(whole):
            cache.update(keys, values, index)
        return cache

    def decode_tokens(self, data: bytes, start: int, stop: int, *, row: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of tokens start..stop of one row, [1, H, stop - start, D] of each layer.

        start, stop   counted from the row's first token that is not padding

        Of the blocks only those that hold these tokens are decoded; where layers are recomputed, their model reads the
        tokens up to stop. Raises ConfigInvalid for tokens that the row does not hold, PayloadInvalid as decode does.
        """
        payload = self._parsed(data)
        if not 0 <= row < len(payload.rows) or not 0 <= start < stop <= payload.tokens - payload.rows[row].padding:
            raise ConfigInvalid(
                f"Tokens {start} to {stop} of row {row} are not in this payload of {len(payload.rows)} rows of at most"
                f" {payload.tokens} tokens.",
                "Ask for tokens that were encoded.",
            )
        found = self._empty(payload, 1, stop - start)
        self._decode_row(payload, payload.rows[row], start, stop, [(keys[0], values[0]) for keys, values in found])
        return found

    def _empty(self, payload: container.Payload, rows: int, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Zeros for keys and values of each layer, [rows, H, tokens, D], on the model's device."""
        dtype, device = DTYPES[payload.dtype_code], getattr(self._model, "device", "cpu")
        return [
            (
                torch.zeros(rows, layer.kv_heads, tokens, layer.key_dim, dtype=dtype, device=device),
                torch.zeros(rows, layer.kv_heads, tokens, layer.value_dim, dtype=dtype, device=device),
            )
            for layer in self.shape.geometry.layers
        ]

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        """While the block runs, keep of the model's reading what encode asks for: give it what this yields.

        Raises ConfigInvalid when the codec was given no model.
        """
        if self._model is None:
            raise ConfigInvalid("This codec was given no model to watch.", "Pass the model to Artifact.codec.")
        with watch(self._model, self.shape.recomputed - 1) as watched:
            yield watched

    def cache(self, model: Any = None) -> ResidentCache:
        """An empty resident cache for a model; default: the one that the codec was given.

        Attention reads it as it is when the model's attention implementation is "kvalign"; with any other it works too,
        uncompressed a layer at a time. Raises ConfigInvalid for another model than the codec's, or a codec without a
        resident form; SourceUnsupported for a kind of layer that no cache holds.
        """
        model = self._model if model is None else model
        if model is None:
            raise ConfigInvalid("This codec was given no model to make a cache for.", "Pass the model.")
        if self.resident is None:
            raise ConfigInvalid(
                "This codec has no resident form: it was made before there was one.", "Convert the model again."
            )
        if self._model is not None and model is not self._model and not same_weights(model, self._model):
            raise ConfigInvalid(
                f"This {type(model).__name__} holds other weights than the model that the codec was made for.",
                "Use the codec of this model and revision.",
            )
        register()
        return ResidentCache(self.resident, model)

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
            verbatim=sum(len(row.verbatim) for row in payload.rows) + payload.id_bytes * (held - body),
            side_info=payload.table_bytes
            + payload.id_bytes * body
            + sum(len(block.shifts) for row in payload.rows for block in row.blocks),
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
        self,
        cache: Any,
        step: int,
        attention_mask: Tensor | None,
        watched: Watched | None,
        input_ids: Tensor | None,
        *,
        exact: bool = True,
    ) -> container.Payload:
        tensors = layer_tensors(cache)
        self._check_cache(tensors)
        first = tensors[0][0]
        paddings = _left_padding(attention_mask, first.shape[0], first.shape[2])
        if not container.padding_is_bounded(first.shape[2], paddings):
            raise ConfigInvalid("The batch is almost nothing but padding.", "Crop the padding that all rows share.")
        verbatim_dtype = verbatim.verbatim_dtype(tensors)
        ids = self._checked_ids(input_ids, first.shape[0], first.shape[2])
        id_bytes = 0 if ids is None else _id_bytes(ids)
        rows = [
            self._encode_row(
                cache,
                row,
                padding,
                step,
                verbatim_dtype,
                watched,
                None if ids is None else ids[row, padding:],
                id_bytes,
                exact,
            )
            for row, padding in enumerate(paddings)
        ]
        return container.Payload(
            codec_id=self.codec_id,
            dtype_code=DTYPES.index(first.dtype),
            verbatim_dtype_code=DTYPES.index(verbatim_dtype),
            id_bytes=id_bytes,
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
        watched: Watched | None,
        ids: Tensor | None,
        id_bytes: int,
        exact: bool,
    ) -> container.Row:
        """One row; ids [T] without padding, where layers are recomputed; exact: the cache is as the model made it."""
        tensors = layer_tensors(cache)
        tokens = tensors[0][0].shape[2]
        split = TokenSplit.of(tokens - padding, self.sink_tokens, self.recent_tokens)
        body = slice(padding + split.sink, padding + split.sink + split.body)
        kept = [*range(padding, body.start), *range(body.stop, tokens)]
        features = self._features_of(tensors, row, padding, ids, watched, exact)[split.sink : split.sink + split.body]
        shifts = self._shifts(tensors, row, body, padding, watched)
        coefficients, classes = self._coefficients(cache, row, body, padding, step, shifts, features)
        sizes = step_sizes(step, shifts)
        stored = tensors[self.shape.recomputed :]
        raw_token = 2 * self.shape.stored.values_per_token

        def block(part: slice) -> container.Block:
            symbols = quantize(coefficients[part], sizes[part], classes[part])
            coded = container.Block(self._coder.encode(symbols, classes[part]), shifts=shift_bytes(shifts[part]))
            raw_size = raw_token * (part.stop - part.start)
            if len(coded.stored) >= raw_size or np.abs(symbols).max(initial=0) >= LARGEST_SYMBOL:
                inside = list(range(body.start + part.start, body.start + part.stop))
                return container.Block(verbatim.to_bytes(stored, row, inside, verbatim_dtype), raw=True)
            return coded

        blocks = _in_threads(block, _spans(split.body, BLOCK_TOKENS))
        kept_bytes = verbatim.to_bytes(stored, row, kept, verbatim_dtype)
        return container.Row(padding, 0, _ids_to_bytes(ids, id_bytes), kept_bytes, tuple(blocks))

    def _features_of(
        self,
        tensors: list[tuple[Tensor, Tensor]],
        row: int,
        padding: int,
        ids: Tensor | None,
        watched: Watched | None,
        exact: bool,
    ) -> Tensor:
        """Features of a row's tokens, [T, F], once its cache is seen to come from these token ids."""
        tokens = tensors[0][0].shape[2]
        if ids is None:
            return torch.zeros(tokens - padding, 0)
        known = watched.features(row, padding, ids) if watched is not None else None
        # With features at hand, the first layer alone tells whether the ids are the cache's.
        again = self._recomputed(self._first_layers if known is None else self._first_layer, ids)
        cached = [(keys[row : row + 1, :, padding:], values[row : row + 1, :, padding:]) for keys, values in tensors]
        if not same_tokens(again.layers if exact else again.layers[:1], cached, exact):
            raise ConfigInvalid(
                "The cache was not made from these input_ids: its first layers hold other keys and values.",
                "Give the id of each cached token, from the start of the text, to a codec of the model that read them.",
            )
        return again.features if known is None else known

    def _checked_ids(self, input_ids: Tensor | None, rows: int, tokens: int) -> Tensor | None:
        """[B, T] int64 on the CPU, where layers are recomputed; raises ConfigInvalid."""
        if not self.shape.recomputed:
            return None
        if input_ids is None:
            raise ConfigInvalid(
                f"This codec stores token ids in place of the first {self.shape.recomputed} layers; none were given.",
                "Pass input_ids, the tokens that the cache was made from.",
            )
        ids = torch.as_tensor(input_ids)
        if tuple(ids.shape) != (rows, tokens) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise ConfigInvalid(
                f"input_ids is {tuple(ids.shape)}, {ids.dtype}; the cache holds {(rows, tokens)}.",
                "Give one integer for each cached token, left padding included.",
            )
        vocabulary = self._first_layers.vocabulary
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ConfigInvalid(
                f"input_ids hold {int(ids.min())} to {int(ids.max())}; the model knows 0 to {vocabulary - 1}.",
                "Give token ids of the model's own tokenizer.",
            )
        return ids.long().cpu()

    def _shifts(
        self, tensors: list[tuple[Tensor, Tensor]], row: int, body: slice, padding: int, watched: Watched | None
    ) -> NDArray[np.int8]:
        """Shift of each body token's step, [T] int8; zeros when the queries were not watched."""
        received = [
            found
            for layer in self.shape.judging_layers
            if watched and (found := watched.attention(layer, tensors[layer][0], row, padding)) is not None
        ]
        if not received or not self.token_beta or body.stop == body.start:
            return np.zeros(body.stop - body.start, dtype=np.int8)
        return shifts_by_attention([part[body] for part in received], self.token_beta)

    def _coefficients(
        self,
        cache: Any,
        row: int,
        body: slice,
        padding: int,
        step: int,
        shifts: NDArray[np.int8],
        features: Tensor,
    ) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
        """Coefficients of the body tokens over all groups side by side, and their classes: [T, r] each."""
        positions = torch.arange(body.start, body.stop) - padding
        transforms = self._transforms_for(layer_tensors(cache)[0][0].dtype)
        classes, coded = token_classes(transforms, step, shifts)
        coefficients = torch.empty(classes.shape, dtype=torch.float32)
        start = 0
        for transform, count in zip(transforms, coded, strict=True):
            group = transform.group
            layers = (group.first_layer, group.end_layer)
            x = token_matrix(cache, group.kind, self.shape, row, body, positions, layers)
            coefficients[:, start : start + count] = transform.coefficients(x, features, count)
            start += count
        return coefficients.numpy(), classes

    def _transforms_for(self, dtype: torch.dtype) -> tuple[Transform, ...]:
        """The transforms with products in the cache's dtype where hardware is quick at it, else in float32."""
        if dtype != torch.bfloat16:
            return self.transforms
        return self._bfloat16_transforms

    @cached_property
    def _bfloat16_transforms(self) -> tuple[Transform, ...]:
        return tuple(transform.to(torch.bfloat16) for transform in self.transforms)

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
        if any(not x.sum(dtype=torch.float32).isfinite() for pair in tensors for x in pair):
            raise ConfigInvalid("The cache holds values that are not finite.", "Check what the model was given.")

    # ---- decoding

    def _parsed(self, data: bytes) -> container.Payload:
        payload = container.unpack(data, values_per_token=self.shape.stored.values_per_token)
        if payload.codec_id != self.codec_id:
            raise PayloadInvalid(
                f"The payload was made by codec {payload.codec_id.hex()}; this is {self.codec_id.hex()}.",
                "Load the artifact revision that the payload was made with.",
            )
        if abs(payload.step) > STEP_LIMIT:
            raise PayloadInvalid("The payload's step is out of bounds.", _FETCH_AGAIN)
        if payload.dtype_code >= len(DTYPES) or not 1 <= payload.verbatim_dtype_code < len(DTYPES):
            raise PayloadInvalid("The payload names an unknown dtype.", "Update kvalign.")
        if (payload.id_bytes > 0) != (self.shape.recomputed > 0):
            raise PayloadInvalid(
                "The payload holds token ids where its codec stores every layer, or none where not.", _FETCH_AGAIN
            )
        return payload

    def _decode_row(
        self,
        payload: container.Payload,
        row: container.Row,
        start: int,
        stop: int,
        whole: list[tuple[Tensor, Tensor]],
    ) -> None:
        """Write tokens start..stop of a row into `whole`: keys and values of each layer, [H, stop - start, D]."""
        split = TokenSplit.of(payload.tokens - row.padding, payload.sink_tokens, payload.recent_tokens)
        recent = split.sink + split.body
        verbatim_dtype = DTYPES[payload.verbatim_dtype_code]
        kept = verbatim.from_bytes(row.verbatim, self.shape.stored, split.verbatim, verbatim_dtype)
        first = self._recomputed(self._first_layers, self._ids(payload, row)[:stop])
        body = slice(max(start, split.sink), min(stop, recent))
        coded_from = body.start - (body.start - split.sink) % payload.block_tokens
        coded = (
            self._decode_body(payload, row, coded_from, body.stop, first.features) if body.start < body.stop else None
        )
        for part, kind in enumerate(KINDS):
            for again, target in zip(first.layers, whole, strict=False):
                target[part].copy_(again[part][0, :, start:])
            for layer, target in enumerate(whole[self.shape.recomputed :]):
                out, plain = target[part], kept[kind][layer]
                out[:, : max(0, split.sink - start)] = plain[:, start : min(stop, split.sink)]
                if coded is not None:
                    x = coded[kind][layer][:, body.start - coded_from : body.stop - coded_from]
                    if out.dtype == torch.float16:
                        # What rounding carries past the largest number of the dtype must not become infinite.
                        limit = torch.finfo(torch.float16).max
                        x = x.clamp(-limit, limit)
                    out[:, body.start - start : body.stop - start] = x
                if stop > recent:
                    behind = max(start, recent)
                    out[:, behind - start :] = plain[:, split.sink + behind - recent : split.sink + stop - recent]

    def _decode_body(
        self, payload: container.Payload, row: container.Row, start: int, stop: int, features: Tensor
    ) -> dict[Kind, list[Tensor]]:
        """Body tokens from `start`, where a block begins, to the end of the block that holds `stop` - 1.

        features   [T, F] of the row's tokens up to `stop` at least; may be [0, 0] when no layer is recomputed
        returns    keys (rotated) and values of each stored layer, [H, T, D]; what lies behind `stop` is of no use
        """
        split = TokenSplit.of(payload.tokens - row.padding, payload.sink_tokens, payload.recent_tokens)
        every = _spans(split.body, payload.block_tokens)
        numbers = range((start - split.sink) // payload.block_tokens, -(-(stop - split.sink) // payload.block_tokens))
        first = every[numbers.start].start
        spans = [slice(every[n].start - first, every[n].stop - first) for n in numbers]
        blocks = [row.blocks[n] for n in numbers]
        tokens = spans[-1].stop
        shifts = np.zeros(tokens, dtype=np.int8)
        for span, block in zip(spans, blocks, strict=True):
            if block.shifts:
                shifts[span] = np.frombuffer(block.shifts, dtype=np.int8)
        if not FINEST_SHIFT <= shifts.min() <= shifts.max() <= COARSEST_SHIFT:
            raise PayloadInvalid("A token's step in the payload is shifted out of bounds.", _FETCH_AGAIN)
        dtype = DTYPES[payload.dtype_code]
        transforms = self._transforms_for(dtype)
        classes, counts = token_classes(transforms, payload.step, shifts)
        sizes = step_sizes(payload.step, shifts)
        coefficients = np.zeros(classes.shape, dtype=np.float32)

        def decode(numbered: tuple[slice, container.Block]) -> None:
            span, block = numbered
            if not block.raw:
                coefficients[span] = dequantize(self._coder.decode(block.data, classes[span]), sizes[span])

        _in_threads(decode, list(zip(spans, blocks, strict=True)))
        known = torch.zeros(tokens, transforms[0].features)
        if known.shape[1]:
            seen = features[start : start + tokens]
            known[: seen.shape[0]] = seen
        positions = torch.arange(tokens) + row.position + start
        coded: dict[Kind, list[Tensor]] = {kind: [] for kind in KINDS}
        column = 0
        for transform, count in zip(transforms, counts, strict=True):
            y = torch.from_numpy(coefficients[:, column : column + count])
            column += count
            group = transform.group
            x = transform.tokens(y, known)
            coded[group.kind] += head_tensors(x, group.kind, self.shape, group.first_layer, positions, dtype)
        verbatim_dtype = DTYPES[payload.verbatim_dtype_code]
        for span, block in zip(spans, blocks, strict=True):
            if block.raw:
                plain = verbatim.from_bytes(block.data, self.shape.stored, span.stop - span.start, verbatim_dtype)
                for kind in KINDS:
                    for target, source in zip(coded[kind], plain[kind], strict=True):
                        target[:, span] = source
        return coded

    def _ids(self, payload: container.Payload, row: container.Row) -> Tensor:
        """Token ids of a row, [T] int64 without padding; raises PayloadInvalid for ids the model does not know."""
        if not payload.id_bytes:
            return torch.zeros(0, dtype=torch.int64)
        ids = torch.from_numpy(np.frombuffer(row.ids, dtype=_ID_TYPES[payload.id_bytes]).astype(np.int64))
        if row.position:
            raise PayloadInvalid("A row of the payload holds token ids and does not begin at position 0.", _FETCH_AGAIN)
        if ids.numel() and int(ids.max()) >= self._first_layers.vocabulary:
            raise PayloadInvalid("A row of the payload names tokens that the model does not know.", _FETCH_AGAIN)
        return ids

    def _recomputed(self, layers: FirstLayers, ids: Tensor) -> Recomputed:
        """What a row's ids give, [T]; a row of padding alone holds none, and no model runs on none."""
        if not ids.numel():
            return Recomputed([], torch.zeros(0, self.transforms[0].features))
        return layers.run(ids)

    @cached_property
    def _first_layers(self) -> FirstLayers:
        if self.shape.recomputed and self._model is None:
            raise ConfigInvalid(
                f"This codec recomputes the first {self.shape.recomputed} layers of its model, and was given no model.",
                "Load it with kvalign.load, or pass the model to Artifact.codec.",
            )
        return FirstLayers(self._model, self.shape.recomputed)

    @cached_property
    def _first_layer(self) -> FirstLayers:
        return FirstLayers(self._model, 1)

    @cached_property
    def _coder(self) -> BlockCoder:
        return BlockCoder(self.tables)


def _spans(tokens: int, block_tokens: int) -> list[slice]:
    return [slice(start, min(start + block_tokens, tokens)) for start in range(0, tokens, block_tokens)]


def _in_threads(work: Callable[[T], R], items: list[T]) -> list[R]:
    """work of each item, on as many threads as torch uses; compiled code lets go of the interpreter."""
    if len(items) < 2 or torch.get_num_threads() < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return list(threads.map(work, items))


def _id_bytes(ids: Tensor) -> int:
    return 2 if int(ids.max()) < 1 << 16 else 4


def _ids_to_bytes(ids: Tensor | None, id_bytes: int) -> bytes:
    return b"" if ids is None else ids.numpy().astype(_ID_TYPES[id_bytes]).tobytes()


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
