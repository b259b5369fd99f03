"""The global gradient norm on the host, with the bits of `torch.nn.utils.get_total_norm`.

torch takes the norms of CPU tensors one after the other, each on one core: 1.3 s for 4 B fp32 gradients on 16 cores
(benchmarks/results/host_kernels.json: .45 s per 1e9 against .044 s). The same call for each tensor, from several
threads, gives the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from trl_budget.host_threads import num_host_cores

THREADED_FROM_ELEMENTS = 2**24


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all gradients, summed in the order given.

    Args:
        gradients: fp32 host tensors.

    Returns:
        fp32 scalar on the host; 0 for no gradients.
    """
    return norm_of_norms(norms_of(gradients)) if is_threaded(gradients) else get_total_norm(gradients)


def is_threaded(gradients: Sequence[Tensor]) -> bool:
    """Whether there is enough to measure for several threads."""
    return sum(g.numel() for g in gradients) >= THREADED_FROM_ELEMENTS


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each gradient, fp32 scalars on the host."""
    if not is_threaded(gradients):
        return [torch.linalg.vector_norm(gradient) for gradient in gradients]
    norms: dict[int, Tensor] = {}
    largest_first = sorted(range(len(gradients)), key=lambda index: -gradients[index].numel())
    with ThreadPoolExecutor(num_host_cores()) as pool:
        measured = pool.map(lambda index: torch.linalg.vector_norm(gradients[index]), largest_first)
        norms.update(zip(largest_first, measured, strict=True))
    return [norms[index] for index in range(len(gradients))]


def norm_of_norms(norms: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all gradients from the norms of each, summed in the order given; 0 for none."""
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else get_total_norm([])
