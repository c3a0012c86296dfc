"""Run a model over tokens and yield its keys and values. The only file that knows how models are built.

What the cache holds is taken as it is (after key norms, after rotary positions), so that a new family needs no
new code. Geometry and rotary pairing are measured on short forward passes, because configs mislead.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvalign.errors import SourceInvalid, SourceUnsupported
from kvalign.geometry import KINDS, Geometry, Kind, LayerGeometry
from kvalign.rope import NO_ROPE, Pairing, Rope
from kvalign.watch import attention_input, joined_inputs, output_projection, watch

_FULL_CACHE_ONLY = "kvalign converts causal models whose every layer keeps a full KV cache."
_PROBE_TOKENS = 12
_PROBE_OFFSET = 5
# Keys of two passes at shifted positions agree to the rounding of the pass; a wrong pairing is off by its own size.
_UNROTATION_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class CacheShape:
    """What a codec must know about the model whose cache it codes.

    ropes       one entry a layer
    recomputed  how many of the first layers are computed again from the token ids instead of being stored
    """

    geometry: Geometry
    ropes: tuple[Rope, ...]
    recomputed: int = 0

    @property
    def stored(self) -> Geometry:
        """The layers that a payload holds."""
        return Geometry(self.geometry.layers[self.recomputed :])

    @property
    def judging_layers(self) -> range:
        """Layers whose attention judges tokens: every third stored one says as much as all (docs/log.md)."""
        return range(self.recomputed, len(self.geometry.layers), 3)

    def runs(self, first: int, end: int) -> list[range]:
        """Layers first..end cut into runs of equal shape and rotation, which can be handled as one."""
        found: list[range] = []
        for index in range(first, end):
            if found and self._alike(found[-1].start, index):
                found[-1] = range(found[-1].start, index + 1)
            else:
                found.append(range(index, index + 1))
        return found

    def _alike(self, a: int, b: int) -> bool:
        one, other = self.ropes[a], self.ropes[b]
        return (
            self.geometry.layers[a] == self.geometry.layers[b]
            and (one.pairing, one.scaling) == (other.pairing, other.scaling)
            and torch.equal(one.inv_freq, other.inv_freq)
        )


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a local folder, ready for inference.

    Raises SourceInvalid when weights are missing, have other shapes than the config says, or are not finite:
    transformers would fill them with random numbers and go on.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are listed instead, and refused below by name
        )
    except Exception as error:  # each library below raises errors of its own, some straight from Exception
        if _is_out_of_memory(error):
            raise
        raise SourceInvalid(
            f"transformers cannot load the model: {str(error)[:500]}",
            "Check that the folder loads with AutoModelForCausalLM.from_pretrained.",
        ) from error
    _check_loading(model, info)
    return model.eval().requires_grad_(False)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a local folder; raises SourceInvalid."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception
        raise SourceInvalid(
            f"transformers cannot load the tokenizer: {str(error)[:500]}",
            "Check that the folder loads with AutoTokenizer.from_pretrained.",
        ) from error


def _check_loading(model: nn.Module, info: dict[str, Any]) -> None:
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        names = [str(item) for item in info.get(what) or ()]
        if names:
            raise SourceInvalid(
                f"The weights do not fit the config: {what.replace('_', ' ')}: {', '.join(sorted(names)[:5])}"
                f" ({len(names)} in all).",
                "Publish a complete set of weights for this config.",
            )
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise SourceInvalid(
                f"The weight {name} holds values that are not finite.",
                "Publish weights without NaN or infinity.",
            )


def cache_argument(model: Any) -> str:
    """Name of the cache in forward and generate: `cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def run(model: Any, tokens: Tensor, cache: Any = None, *, logits_to_keep: int = 0, **kwargs: Any) -> tuple[Tensor, Any]:
    """One forward pass. tokens [B, T] int64. Returns logits [B, T or logits_to_keep, vocab] and the cache."""
    if cache is None:
        # Without a config every layer keeps every token, sliding ones too, with the same logits.
        cache = DynamicCache()
    kwargs[cache_argument(model)] = cache
    logits = model(tokens, use_cache=True, logits_to_keep=logits_to_keep, **kwargs).logits
    return logits, cache


def layer_tensors(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """(keys, values) of each layer, [B, H, T, D] each; raises SourceUnsupported for another kind of layer."""
    found = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == values.dim() == 4):
            raise SourceUnsupported(
                f"Layer {index} of the cache ({type(layer).__name__}) holds no keys and values per token.",
                _FULL_CACHE_ONLY,
            )
        found.append((keys, values))
    return found


@torch.no_grad()
def measure_shape(model: Any) -> CacheShape:
    """Geometry and rotary positions, measured on two short forward passes at shifted positions.

    Raises SourceUnsupported when the model keeps no KV cache, or rotates in a way no known pairing undoes.
    """
    tokens = probe_tokens(model, _PROBE_TOKENS)[None]
    here = torch.arange(_PROBE_TOKENS)
    near = _probe(model, tokens, here)
    geometry = Geometry(tuple(LayerGeometry(k.shape[1], k.shape[3], v.shape[3]) for k, v in near))
    candidates = _rope_candidates(model)
    if not candidates:
        return CacheShape(geometry, (NO_ROPE,) * len(near))
    far = _probe(model, tokens, here + _PROBE_OFFSET)
    ropes = tuple(
        _undoing_rope(layer, [NO_ROPE, *candidates], near[layer][0], far[layer][0], here) for layer in range(len(near))
    )
    return CacheShape(geometry, ropes)


def vocabulary(model: Any) -> int:
    """Token ids run from 0 to below this."""
    return int(model.get_input_embeddings().weight.shape[0])


def position_limit(model: Any, otherwise: int = 1 << 30) -> int:
    """Longest sequence that the model takes; `otherwise` where its config names none."""
    return int(getattr(model.config, "max_position_embeddings", None) or otherwise)


def probe_tokens(model: Any, count: int) -> Tensor:
    """Different tokens to try a model on, [count] int64."""
    return (torch.arange(count) * 7919 + 1).remainder(vocabulary(model))


def _probe(model: Any, tokens: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    try:
        layers = layer_tensors(run(model, tokens, position_ids=positions[None])[1])
    except (IndexError, TypeError, AttributeError, ValueError, NotImplementedError) as error:
        raise SourceUnsupported(
            f"The model does not run with a plain KV cache: {str(error)[:300]}", _FULL_CACHE_ONLY
        ) from error
    if not layers or any(keys.shape[-2] != tokens.shape[-1] for keys, _ in layers):
        raise SourceUnsupported("The model keeps no KV cache of one entry per token.", _FULL_CACHE_ONLY)
    return layers


def _rope_candidates(model: Any) -> list[Rope]:
    pairings: tuple[Pairing, ...] = ("half", "interleaved")
    found: list[Rope] = []
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for key, inv_freq in buffers.items():
            if key.endswith("inv_freq") and not key.endswith("original_inv_freq"):
                prefix = key.removesuffix("inv_freq")
                scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
                frequencies = inv_freq.detach().float().cpu().clone()
                if not any(torch.equal(rope.inv_freq, frequencies) and rope.scaling == scaling for rope in found):
                    found += [Rope(pairing, frequencies, scaling) for pairing in pairings]
    return found


def _undoing_rope(layer: int, candidates: list[Rope], near: Tensor, far: Tensor, here: Tensor) -> Rope:
    """The candidate under which the same tokens at two offsets have equal keys."""

    def disagreement(rope: Rope) -> float:
        a = rope.undo(near, here, near.dtype)
        b = rope.undo(far, here + _PROBE_OFFSET, far.dtype)
        return float((a - b).norm() / a.norm())

    rope = min((rope for rope in candidates if rope.rotary_dim <= near.shape[-1]), key=disagreement)
    if disagreement(rope) > _UNROTATION_TOLERANCE[near.dtype]:
        raise SourceUnsupported(
            f"The keys of layer {layer} are rotated by position in a way that kvalign cannot undo exactly.",
            "Half and interleaved pairings with fixed frequencies are known; ask for this model family by name.",
        )
    return rope


def token_matrix(
    cache: Any,
    kind: Kind,
    shape: CacheShape,
    row: int,
    tokens: slice,
    positions: Tensor,
    layers: tuple[int, int] | None = None,
) -> Tensor:
    """Keys (unrotated) or values of one row as [T, P] float32, layers side by side, heads within, channels within.

    On the CPU, where codecs work.

    positions  [T] int64, of the tokens in the slice
    layers     first and end; default: all
    """
    pairs = layer_tensors(cache)
    columns = []
    for run_of_layers in shape.runs(*(layers or (0, len(pairs)))):
        heads = torch.cat([pairs[index][KINDS.index(kind)][row, :, tokens] for index in run_of_layers]).cpu()
        rope = shape.ropes[run_of_layers.start] if kind == "keys" else NO_ROPE
        columns.append(rope.undo(heads, positions, heads.dtype).transpose(0, 1).flatten(1))
    return torch.cat(columns, dim=1)


def head_tensors(
    matrix: Tensor, kind: Kind, shape: CacheShape, first: int, positions: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Inverse of token_matrix: layers from `first` on, keys rotated, [H, T, D] float32 each.

    matrix     [T, P] of whole layers
    dtype      that of the model's activations: it rounds cos and sin to it
    """
    found: list[Tensor] = []
    end, start = first, 0
    while start < matrix.shape[1]:
        start += shape.geometry.layers[end].width(kind)
        end += 1
    start = 0
    for run_of_layers in shape.runs(first, end):
        layer = shape.geometry.layers[run_of_layers.start]
        width = len(run_of_layers) * layer.width(kind)
        heads = matrix[:, start : start + width].unflatten(1, (-1, layer.head_dim(kind))).transpose(0, 1)
        start += width
        rope = shape.ropes[run_of_layers.start] if kind == "keys" else NO_ROPE
        found += rope.redo(heads, positions, dtype).split(layer.kv_heads)
    return found


@dataclass(frozen=True)
class Captured:
    """What one sequence of T tokens leaves, float32 each.

    keys, values  [T, P] over all layers
    features      [T, F]: input of the last recomputed layer's attention; F is 0 when none is
    """

    keys: Tensor
    values: Tensor
    features: Tensor

    def of(self, kind: Kind) -> Tensor:
        return self.keys if kind == "keys" else self.values


@dataclass(frozen=True)
class CapturedGradients:
    """What the loss on a sequence's continuation says of its prefix of T tokens.

    keys, values  [T, P] float32: gradient of the summed loss
    attention     per layer that could be watched, [T]: mean square attention received from the prefix's last queries
    """

    keys: Tensor
    values: Tensor
    attention: list[Tensor]

    def of(self, kind: Kind) -> Tensor:
        return self.keys if kind == "keys" else self.values


@dataclass(frozen=True)
class ForwardSensitivity:
    """What a forward pass alone says an error in each head costs: per layer, [H, D, D] for keys and for values."""

    keys: list[Tensor]
    values: list[Tensor]

    def of(self, kind: Kind) -> list[Tensor]:
        return self.keys if kind == "keys" else self.values


def capture(model: Any, shape: CacheShape, sequences: Iterator[Tensor]) -> Iterator[Captured]:
    """Keys, values and features of each sequence ([T] int64); one forward pass each."""
    for tokens in sequences:
        with torch.no_grad(), attention_input(model, shape.recomputed - 1) as seen:
            _, cache = run(model, tokens[None], logits_to_keep=1)
        yield _captured(cache, shape, seen)


def capture_with_gradients(
    model: Any, shape: CacheShape, tokens: Tensor, prefix: int, generator: torch.Generator
) -> tuple[Captured, CapturedGradients]:
    """As capture, with the gradient of the model's own loss on tokens prefix.. towards the cache of tokens ..prefix.

    That is what coding a prefix can hurt: the loss on the prefix itself was paid while the cache was still exact.
    Labels are sampled from the model's distribution, so that the mean of g g^T is the Fisher information and not
    the empirical one (Kunstner et al. 2019). One forward pass, and a backward pass over the continuation alone.
    """
    with attention_input(model, shape.recomputed - 1) as seen:
        with torch.no_grad(), watch(model) as queries:
            _, before = run(model, tokens[None, :prefix], logits_to_keep=1)
        _refuse_not_finite(before)
        cache, leaves = DynamicCache(), []
        with torch.enable_grad():
            for index, pair in enumerate(layer_tensors(before)):
                keys, values = (x.detach().clone().requires_grad_() for x in pair)
                leaves.append((keys, values))
                cache.update(keys, values, index)
            logits = run(model, tokens[None, prefix:], cache)[0][0]
            labels = torch.multinomial(logits.detach().float().softmax(-1), 1, generator=generator)[:, 0]
            nn.functional.cross_entropy(logits.float(), labels, reduction="sum").backward()
    positions = torch.arange(prefix)
    key_columns, value_columns = [], []
    for (keys, values), rope in zip(leaves, shape.ropes, strict=True):
        assert keys.grad is not None
        assert values.grad is not None
        key_columns.append(rope.undo_gradient(keys.grad[0], positions, keys.dtype).transpose(0, 1).flatten(1))
        value_columns.append(values.grad[0].float().transpose(0, 1).flatten(1))
    attention = [queries.attention(index, leaves[index][0].detach(), 0, 0) for index in shape.judging_layers]
    with torch.no_grad():
        plain = _captured(cache, shape, seen)
    watched = [received for received in attention if received is not None]
    return plain, CapturedGradients(torch.cat(key_columns, dim=1), torch.cat(value_columns, dim=1), watched)


@torch.no_grad()
def capture_with_queries(model: Any, shape: CacheShape, tokens: Tensor) -> tuple[Captured, ForwardSensitivity]:
    """As capture, with a stand-in for gradients where a backward pass does not fit.

    An error dv in a value that a query gives the weight p moves the residual stream by p W dv, W the head's part of the
    output projection; an error dk in a key moves it by p s (q . dk) W (v - mean v), s the scale on scores. Both are
    taken relative to the stream behind the layer, p alike for all:

        F_v = W^T W / |h|^2          F_k = s^2 E[q q^T] E|W (v - mean v)|^2 / |h|^2

    summed over the queries of a KV head. One forward pass. Raises SourceUnsupported when queries or the output
    projection of a layer cannot be seen.
    """
    cache = DynamicCache()
    with watch(model, shape.recomputed - 1, kept=None) as watched:
        kwargs = {cache_argument(model): cache}
        hidden = model(
            tokens[None], use_cache=True, logits_to_keep=1, output_hidden_states=True, **kwargs
        ).hidden_states
    positions = torch.arange(tokens.numel())
    found = ForwardSensitivity([], [])
    for index, (_, values) in enumerate(layer_tensors(cache)):
        kept, projection = watched.queries(index), output_projection(model, index)
        layer = shape.geometry.layers[index]
        if kept is None or projection is None or projection.shape[1] != kept[0].shape[1] * layer.value_dim:
            raise SourceUnsupported(
                f"The queries or the output projection of layer {index} cannot be seen.",
                "Set calibration.metric to gradient or none.",
            )
        queries = shape.ropes[index].undo(kept[0][0], positions, kept[0].dtype).unflatten(0, (layer.kv_heads, -1))
        shares = projection.float().unflatten(1, (layer.kv_heads, -1, layer.value_dim)).permute(1, 2, 0, 3)
        stream = hidden[index + 1][0].float().square().sum(-1).mean()
        left = values[0].float() - values[0].float().mean(1, keepdim=True)
        gram = shares.mT @ shares / stream  # [H, G, D, D]
        moved = torch.einsum("hgde,htd,hte->hg", gram, left, left) / tokens.numel()
        seen = torch.einsum("hgtd,hgte->hgde", queries, queries) / tokens.numel()
        found.keys.append((kept[1] ** 2 * moved[:, :, None, None] * seen).sum(1))
        found.values.append(gram.sum(1))
    return _captured(cache, shape, watched.inputs), found


def _captured(cache: Any, shape: CacheShape, seen: list[Tensor]) -> Captured:
    _refuse_not_finite(cache)
    tokens = layer_tensors(cache)[0][0].shape[-2]
    positions = torch.arange(tokens)
    everything = slice(0, tokens)
    return Captured(
        token_matrix(cache, "keys", shape, 0, everything, positions).detach(),
        token_matrix(cache, "values", shape, 0, everything, positions).detach(),
        joined_inputs(seen, tokens)[0],
    )


def _refuse_not_finite(cache: Any) -> None:
    """One infinite number would turn every sum over the text into NaN."""
    for index, pair in enumerate(layer_tensors(cache)):
        for kind, tensor in zip(KINDS, pair, strict=True):
            if not tensor.isfinite().all():
                raise SourceInvalid(
                    f"The {kind} of layer {index} are not finite on ordinary text.",
                    "Check the model's weights: it gives no usable cache.",
                )
