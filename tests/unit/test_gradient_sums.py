"""Sums of gradients over tiles are wide and are cast once."""

from __future__ import annotations

import torch

from trl_budget.gradient_sums import GradientSums


def test_bf16_gradients_that_a_bf16_sum_would_lose_are_kept() -> None:
    parameter = torch.zeros(3, dtype=torch.bfloat16)
    sums = GradientSums([parameter], 257)
    sums.add([torch.ones(3, dtype=torch.bfloat16)])
    for _ in range(256):  # each is half a unit in the last place of 1: a bf16 sum stays at 1
        sums.add([torch.full((3,), 2.0**-8, dtype=torch.bfloat16)])
    (total,) = sums.take()
    assert total is not None
    assert total.dtype == torch.bfloat16
    assert total.tolist() == [2.0, 2.0, 2.0]


def test_one_tile_has_no_buffer_of_its_own() -> None:
    gradient = torch.ones(3, dtype=torch.bfloat16)
    sums = GradientSums([torch.zeros(3, dtype=torch.bfloat16)], 1)
    sums.add([gradient])
    assert sums.take()[0] is gradient


def test_a_gradient_that_was_handed_in_is_not_written_to() -> None:
    gradient = torch.ones(3)
    sums = GradientSums([torch.zeros(3)], 2)
    sums.add([gradient])
    sums.add([torch.ones(3)])
    assert sums.take()[0].tolist() == [2.0, 2.0, 2.0]
    assert gradient.tolist() == [1.0, 1.0, 1.0]


def test_a_parameter_without_a_gradient_has_none_and_keeps_that_of_the_other_part() -> None:
    first, second, third = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    sums = GradientSums([first, second, third], 2)
    for _ in range(2):
        sums.add([None, torch.ones(1), None])
    taken = sums.take([torch.full((1,), 5.0), torch.full((1,), 3.0), None])
    assert [None if t is None else t.item() for t in taken] == [5.0, 5.0, None]


def test_fp64_is_summed_in_fp64() -> None:
    sums = GradientSums([torch.zeros(1, dtype=torch.float64)], 2)
    sums.add([torch.ones(1, dtype=torch.float64)])
    sums.add([torch.full((1,), 1e-12, dtype=torch.float64)])
    assert sums.take()[0].item() == 1 + 1e-12
