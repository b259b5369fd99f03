"""Predicts how many tokens a forward and backward pass has memory for: one formula per tensor.

A prediction, not a promise: it is measured against peaks in `benchmarks/results/`. Sizes in bytes. A pass is fullest
at one of a few moments; at each, some tensors grow with its tokens and some with the tile only.
"""

from __future__ import annotations

from dataclasses import dataclass

# cuBLAS and varlen workspaces, the LM head's tiles (256 MiB each way), fragmentation.
RESERVE_BYTES = 2 * 2**30

# Moments of a pass, and what runs then.
LAYER = "a layer's backward"
ATTENTION = "attention's backward, first group"
FINISH = "backward of a tile, after attention"
PROJECT = "backward of a tile, before attention"
HEAD = "backward of the last norm"
_TILED = (ATTENTION, FINISH, PROJECT)


@dataclass(frozen=True)
class ModelShape:
    """What activations depend on.

    Attributes:
        num_layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: width of the MLP, of all experts that a token visits.
        query_width: query heads times head size.
        key_width: key heads times head size.
        vocabulary: rows of the LM head.
        element_bytes: of an activation.
        checkpoints: whether gradient checkpointing keeps layer inputs only.
        head_dim: size of a head.
        trains_base: whether layers and LM head have gradients of their own, not an adapter's alone.
    """

    num_layers: int
    hidden: int
    intermediate: int
    query_width: int
    key_width: int
    vocabulary: int
    element_bytes: int
    checkpoints: bool
    head_dim: int = 128
    trains_base: bool = True

    @property
    def layer_bytes_per_token(self) -> int:
        """One layer while its backward runs: its activations, their gradients, attention's fp32 `dq`."""
        attention_backward = 4 * self.query_width + 2 * 2 * self.query_width
        return self.tile_bytes_per_token + attention_backward + self.rotary_bytes_per_token

    @property
    def tile_bytes_per_token(self) -> int:
        """The same without what attention's backward makes: activations and their gradients."""
        activations = 8 * self.hidden + 3 * self.query_width + 4 * self.key_width + 5 * self.intermediate
        return self.element_bytes * activations

    @property
    def rotary_bytes_per_token(self) -> int:
        """Cosines and sines, one pair for all layers."""
        return 2 * self.element_bytes * self.head_dim

    @property
    def kept_bytes_per_token(self) -> int:
        """What all layers keep from forward to backward."""
        if self.checkpoints:
            return self.element_bytes * self.num_layers * self.hidden
        kept = 6 * self.hidden + 2 * self.query_width + 3 * self.key_width + 4 * self.intermediate
        return self.element_bytes * self.num_layers * kept

    @property
    def bytes_per_token(self) -> int:
        """Activation memory of one token at the peak of backward, without levers."""
        return self.layer_bytes_per_token + self.kept_bytes_per_token

    @property
    def gradient_bytes_after_attention(self) -> int:
        """Weight gradients of one layer's output projection and MLP, in the weights' dtype."""
        return self.trains_base * self.element_bytes * self.hidden * (self.query_width + 3 * self.intermediate)

    @property
    def gradient_bytes_before_attention(self) -> int:
        """Weight gradients of one layer's query, key and value projections, in the weights' dtype."""
        return self.trains_base * self.element_bytes * self.hidden * (self.query_width + 2 * self.key_width)

    @property
    def head_bytes(self) -> int:
        """The LM head's weight gradient, fp32 while it is made, and its cast."""
        return self.trains_base * (4 + self.element_bytes) * self.vocabulary * self.hidden

    @property
    def quadratic_cost(self) -> float:
        """Attention's work of a token and one position before it, per linear work of a token.

        Forward, in multiply-adds: a layer's matrices against `QK` and `PV` over half of the square.
        """
        matrices = self.hidden * (2 * self.query_width + 2 * self.key_width + 3 * self.intermediate)
        return self.query_width / matrices


@dataclass(frozen=True)
class MemoryLevers:
    """What is done about the memory that grows with the length of a pass.

    Attributes:
        offload: whether layer inputs spend forward and backward in host memory.
        tile_tokens: tokens of a tile in which a layer runs but for its attention; None: whole.
        num_head_groups: groups of key/value heads whose attention's backward runs one after the other; None: all at
            once.
    """

    offload: bool = False
    tile_tokens: int | None = None
    num_head_groups: int | None = None

    @property
    def splits_layers(self) -> bool:
        """Whether a layer's attention runs apart from the rest of it."""
        return self.tile_tokens is not None or self.num_head_groups is not None


@dataclass(frozen=True)
class MemoryRow:
    """One tensor, or a few that live and die together.

    Attributes:
        name: what it is.
        moments: when it is there.
        bytes_per_token: what grows with the tokens of the pass.
        fixed_bytes: what does not.
    """

    name: str
    moments: tuple[str, ...]
    bytes_per_token: int
    fixed_bytes: int = 0


@dataclass(frozen=True)
class MomentMemory:
    """All that is there at one moment.

    Attributes:
        moment: which.
        rows: the tensors.
    """

    moment: str
    rows: tuple[MemoryRow, ...]

    @property
    def bytes_per_token(self) -> int:
        """Of all rows."""
        return sum(row.bytes_per_token for row in self.rows)

    @property
    def fixed_bytes(self) -> int:
        """Of all rows."""
        return sum(row.fixed_bytes for row in self.rows)


def memory_rows(shape: ModelShape, levers: MemoryLevers) -> list[MemoryRow]:
    """Every tensor that a pass holds at one of its fullest moments, for printing and to compare with a measurement."""
    layer_moments = _TILED if levers.splits_layers else (LAYER,)
    layer = _split_layer_rows(shape, levers) if levers.splits_layers else _whole_layer_rows(shape)
    rotary = MemoryRow("rotary cosines and sines", (*layer_moments, HEAD), shape.rotary_bytes_per_token)
    return [*_kept_rows(shape, levers, layer_moments), *layer, rotary, *_head_rows(shape)]


def moments(shape: ModelShape, levers: MemoryLevers) -> list[MomentMemory]:
    """The fullest moments of a pass, the one with the most bytes per token first."""
    rows = memory_rows(shape, levers)
    names = dict.fromkeys(moment for row in rows for moment in row.moments)
    found = [MomentMemory(name, tuple(row for row in rows if name in row.moments)) for name in names]
    return sorted(found, key=lambda moment: -moment.bytes_per_token)


def allocatable_bytes(free_bytes: int, reserved_bytes: int, allocated_bytes: int, cap_bytes: int | None) -> int:
    """What torch can still allocate on a device.

    Args:
        free_bytes: of the card. The pool of a vLLM that sleeps is free, and torch counts it as reserved and allocated.
        reserved_bytes: by torch's allocator.
        allocated_bytes: of these, by tensors.
        cap_bytes: what the allocator may reserve, that pool included; None without a cap.
    """
    left = free_bytes if cap_bytes is None else min(free_bytes, cap_bytes - reserved_bytes)
    return left + reserved_bytes - allocated_bytes


def tokens_that_fit(free_bytes: int, coming_bytes: int, shape: ModelShape, levers: MemoryLevers | None = None) -> int:
    """How many tokens a pass may hold.

    Args:
        free_bytes: what the device can still allocate once the trainer is built.
        coming_bytes: gradients and optimizer state that will be allocated beside the activations.
        shape: the policy.
        levers: None: none.
    """
    left = free_bytes - coming_bytes - RESERVE_BYTES - shape.head_bytes
    full = moments(shape, levers or MemoryLevers())
    return max(0, min((left - moment.fixed_bytes) // moment.bytes_per_token for moment in full))


def offloaded_bytes_per_token(shape: ModelShape) -> int:
    """Host memory of one token of a pass whose layer inputs are offloaded."""
    return shape.element_bytes * shape.num_layers * shape.hidden


def _kept_rows(shape: ModelShape, levers: MemoryLevers, layer_moments: tuple[str, ...]) -> list[MemoryRow]:
    if not levers.offload:
        name = "layer inputs" if shape.checkpoints else "activations of all layers"
        return [MemoryRow(name, (*layer_moments, HEAD), shape.kept_bytes_per_token)]
    one = shape.element_bytes * shape.hidden
    return [
        MemoryRow("layer input", layer_moments, one),
        MemoryRow("input of the layer below, on its way back", layer_moments, one),
    ]


def _whole_layer_rows(shape: ModelShape) -> list[MemoryRow]:
    return [
        MemoryRow("activations of a layer and their gradients", (LAYER,), shape.tile_bytes_per_token),
        MemoryRow("attention's backward: dq in fp32", (LAYER,), 4 * shape.query_width),
        MemoryRow("attention's backward: dk and dv of all heads", (LAYER,), 2 * 2 * shape.query_width),
    ]


def _split_layer_rows(shape: ModelShape, levers: MemoryLevers) -> list[MemoryRow]:
    """One layer, whose attention's gradients replace its inputs and outputs group by group."""
    element, groups = shape.element_bytes, levers.num_head_groups or 1
    hidden, query, projected = shape.hidden, shape.query_width, shape.query_width + 2 * shape.key_width
    head = (ATTENTION,)
    rows = [
        MemoryRow("gradient of the layer's output", _TILED, element * hidden),
        MemoryRow("gradient of the layer's input", _TILED, element * hidden),
        MemoryRow("q, k, v", (ATTENTION, FINISH), element * projected),
        MemoryRow("attention's output", (ATTENTION, FINISH), element * query),
        MemoryRow("attention's log-sum-exp, fp32", (ATTENTION, FINISH), 4 * query // shape.head_dim),
        MemoryRow("gradient of attention's output", (ATTENTION, FINISH), element * query),
        MemoryRow("a group's dq in fp32", head, -(-4 * query // groups)),
        MemoryRow("a group's dk and dv of all heads", head, -(-2 * element * query // groups)),
        MemoryRow("a group's dq", head, -(-element * query // groups)),
        MemoryRow("a group's dk and dv", head, -(-2 * element * shape.key_width // groups)),
        MemoryRow("dq, dk, dv of all groups", (PROJECT,), element * projected),
    ]
    tile = shape.tile_bytes_per_token
    if levers.tile_tokens is None:
        return [*rows, MemoryRow("the layer but for attention, and gradients", (FINISH, PROJECT), tile)]
    after, before = shape.gradient_bytes_after_attention, shape.gradient_bytes_before_attention
    fp32_share = 4 // element
    return [
        *rows,
        MemoryRow("a tile of the layer and its gradients", (FINISH, PROJECT), 0, levers.tile_tokens * tile),
        MemoryRow("weight gradients after attention, fp32 sums", (FINISH,), 0, fp32_share * after),
        MemoryRow("weight gradients after attention", _TILED, 0, after),
        MemoryRow("weight gradients before attention, fp32 sums", (PROJECT,), 0, fp32_share * before),
        MemoryRow("weight gradients before attention", (PROJECT,), 0, before),
    ]


def _head_rows(shape: ModelShape) -> list[MemoryRow]:
    """The last norm, which computes in fp32 and is not checkpointed: the square's backward makes four of its size.

    The fused LM head holds less: 14 bytes per token and hidden unit in its backward, the norm's fp32 input, its output
    before and after the choice of tokens, and its own gradient in fp32 and in the model's dtype. Source:
    `Qwen3RMSNorm.forward` in transformers 5.24, `ChunkedLogProbFunction` in TRL 1.16, torch's `pow_backward`.
    """
    return [
        MemoryRow("last norm's input, fp32", (HEAD,), 4 * shape.hidden),
        MemoryRow("its gradient through the scaling, fp32", (HEAD,), 4 * shape.hidden),
        MemoryRow("its gradient through the variance and three factors, fp32", (HEAD,), 4 * 4 * shape.hidden),
    ]
