"""What happens inside the heads: how alike they are before and after rotation, and which channels carry them.

Rotations are fitted on one text, everything that is told is measured on another. Keys are taken before rotary
positions, as the codec sees them; sinks, which it does not code, are left out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvalign.align.channels import ChannelSums
from kvalign.align.procrustes import HeadRotations, HeadSimilarity, different_heads
from kvalign.capture import Captured
from kvalign.geometry import KINDS, Geometry, Kind

# Cross-products of keys and of values are held at once up to this; above it the text is read once for each.
_TOGETHER_BYTES = 1 << 30
# Of a token in the pictures of one kind: 256 heads of 128 channels, which take 80 s and 2.2 GB on two cores.
MOST_NUMBERS = 1 << 15


@dataclass(frozen=True)
class HeadPictures:
    """Of keys or values, over N heads of D channels, float32 each.

    before, after       [N, N]: mean cosine similarity of each pair over tokens, and with one rotated onto the other
    absolute, variance  [N, D]: mean of |x|, and variance, of each channel over the largest of its head
    left_out            heads of another width, which cannot be compared, or of layers left out for their number
    """

    before: Tensor
    after: Tensor
    absolute: Tensor
    variance: Tensor
    left_out: int

    @property
    def mean_before(self) -> float:
        return different_heads(self.before)

    @property
    def mean_after(self) -> float:
        return different_heads(self.after)


@dataclass(frozen=True)
class Columns:
    """Which columns of a kind's token matrix are compared: the layers of the commonest head width, in order.

    Of a model whose heads hold more than MOST_NUMBERS together, every second layer, or third, and so on.
    """

    kind: Kind
    slices: tuple[slice, ...]
    heads: int
    dim: int
    left_out: int

    @classmethod
    def of(cls, geometry: Geometry, kind: Kind) -> "Columns":
        widths = Counter[int]()
        for layer in geometry.layers:
            widths[layer.head_dim(kind)] += layer.kv_heads
        dim, heads = widths.most_common(1)[0]
        alike = [index for index, layer in enumerate(geometry.layers) if layer.head_dim(kind) == dim]
        taken = alike[:: -(-heads * dim // MOST_NUMBERS)]
        offsets = geometry.offsets(kind)
        slices = tuple(slice(offsets[index], offsets[index + 1]) for index in taken)
        heads = sum(geometry.layers[index].kv_heads for index in taken)
        return cls(kind, slices, heads, dim, widths.total() - heads)

    @property
    def product_bytes(self) -> int:
        return 2 * (self.heads * self.dim) ** 2

    def take(self, matrix: Tensor) -> Tensor:
        """[T, P] -> [T, N, D]."""
        return torch.cat([matrix[:, part].unflatten(1, (-1, self.dim)) for part in self.slices], dim=1)


Sequences = Callable[[], Iterable[Captured]]


def measure_heads(
    geometry: Geometry, fitting: Sequences, held_out: Sequences, *, sink_tokens: int
) -> dict[Kind, HeadPictures]:
    """Pictures of keys and values; fitting, held_out: give the sequences of each text, from the start at each call.

    Memory does not grow with text: N^2 D^2 / 2 float32 for each kind. Each text is asked for once, or twice where the
    products of both kinds do not fit together. 2 T N^2 D^2 flops for each kind and text; N^2 / 2 decompositions of
    D x D for each kind.
    """
    columns = [Columns.of(geometry, kind) for kind in KINDS]
    together = sum(item.product_bytes for item in columns) <= _TOGETHER_BYTES
    found: dict[Kind, HeadPictures] = {}
    for group in [columns] if together else [[item] for item in columns]:

        def tokens(sequences: Sequences, group: list[Columns] = group) -> Iterator[list[Tensor]]:
            for captured in sequences():
                yield [item.take(captured.of(item.kind)[sink_tokens:]) for item in group]

        pictures = head_pictures([(item.heads, item.dim) for item in group], tokens(fitting), tokens(held_out))
        found |= {
            item.kind: HeadPictures(*picture, left_out=item.left_out)
            for item, picture in zip(group, pictures, strict=True)
        }
    return found


def head_pictures(
    shapes: Sequence[tuple[int, int]], fitting: Iterator[list[Tensor]], held_out: Iterator[list[Tensor]]
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """before, after, absolute, variance of each stream; shapes: (N, D) of each, streams: [T, N, D] float32 of each."""
    rotations = [HeadRotations(heads, dim) for heads, dim in shapes]
    channels = [ChannelSums(heads, dim) for heads, dim in shapes]
    for parts in fitting:
        for rotation, x in zip(rotations, parts, strict=True):
            rotation.update(x)
    similarities: list[HeadSimilarity] = [rotation.fit() for rotation in rotations]
    for parts in held_out:
        for similarity, sums, x in zip(similarities, channels, parts, strict=True):
            similarity.update(x)
            sums.update(x)
    return [
        (similarity.before(), similarity.after(), sums.absolute(), sums.variance())
        for similarity, sums in zip(similarities, channels, strict=True)
    ]
