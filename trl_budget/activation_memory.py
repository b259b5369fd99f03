"""Predicts how many tokens a forward and backward pass has memory for: one formula per owner.

A prediction, not a promise: it is measured against peaks in `benchmarks/results/`. Sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

# cuBLAS and varlen workspaces, the LM head's tiles (256 MiB each way), fragmentation.
RESERVE_BYTES = 2 * 2**30


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
    """

    num_layers: int
    hidden: int
    intermediate: int
    query_width: int
    key_width: int
    vocabulary: int
    element_bytes: int
    checkpoints: bool

    @property
    def layer_bytes_per_token(self) -> int:
        """One layer while its backward runs: its activations, their gradients, attention's fp32 `dq`."""
        activations = 8 * self.hidden + 3 * self.query_width + 4 * self.key_width + 5 * self.intermediate
        attention_backward = 4 * self.query_width + 2 * 2 * self.query_width
        return self.element_bytes * activations + attention_backward

    @property
    def kept_bytes_per_token(self) -> int:
        """What all layers keep from forward to backward."""
        if self.checkpoints:
            return self.element_bytes * self.num_layers * self.hidden
        kept = 6 * self.hidden + 2 * self.query_width + 3 * self.key_width + 4 * self.intermediate
        return self.element_bytes * self.num_layers * kept

    @property
    def bytes_per_token(self) -> int:
        """Activation memory of one token at the peak of backward."""
        return self.layer_bytes_per_token + self.kept_bytes_per_token

    @property
    def head_bytes(self) -> int:
        """The LM head's weight gradient, fp32 while it is made, and its cast."""
        return (4 + self.element_bytes) * self.vocabulary * self.hidden

    @property
    def quadratic_cost(self) -> float:
        """Attention's work of a token and one position before it, per linear work of a token.

        Forward, in multiply-adds: a layer's matrices against `QK` and `PV` over half of the square.
        """
        matrices = self.hidden * (2 * self.query_width + 2 * self.key_width + 3 * self.intermediate)
        return self.query_width / matrices


def tokens_that_fit(free_bytes: int, coming_bytes: int, shape: ModelShape) -> int:
    """How many tokens a pass may hold.

    Args:
        free_bytes: what the device can still allocate once the trainer is built.
        coming_bytes: gradients and optimizer state that will be allocated beside the activations.
        shape: the policy.
    """
    left = free_bytes - coming_bytes - RESERVE_BYTES - shape.head_bytes
    return max(0, left // shape.bytes_per_token)
