"""Stock TRL with adapters over a base that stays as it was loaded: the reference of what is trained beside vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def with_frozen_base(trainer: Any) -> Any:
    """Gives stock's base its old bits back after each sync, which moves it by the rounding of merge and unmerge."""
    generation = trainer.vllm_generation
    stock_weights = generation._iter_named_params

    def weights_of_adapters() -> Iterator[tuple[str, Tensor]]:
        frozen = [(p, p.detach().clone()) for p in trainer.model.parameters() if not p.requires_grad]
        yield from stock_weights()
        for parameter, value in frozen:
            parameter.data.copy_(value)

    generation._iter_named_params = weights_of_adapters
    return trainer
