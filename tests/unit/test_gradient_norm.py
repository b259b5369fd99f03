"""The norm of large gradients: as accurate as a GPU's where stock measures on a GPU, torch's bits elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch_reference import backward, random_gradients, random_parameters

from trl_budget import HostAdamW, gradient_norm
from trl_budget.gradient_norm import BLOCK_ELEMENTS, ROW_ELEMENTS, norm_of_norms, norms_of, num_rows, row_norms
from trl_budget.host_threads import HostThreads

LARGE = 3 * BLOCK_ELEMENTS + 5
DISTRIBUTIONS = {"normal": lambda n: torch.randn(n) * 1e-3, "equal": lambda n: torch.full((n,), 1e-3)}


@pytest.fixture
def in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU parameters are measured as GPU parameters are."""
    monkeypatch.setattr(gradient_norm, "is_measured_in_rows", lambda _: True)


def fp64_norm(*tensors: Tensor) -> float:
    return sum(float(t.double().square().sum()) for t in tensors) ** 0.5


def relative(value: float | Tensor, expected: float) -> float:
    return abs(float(value) - expected) / expected


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_large_gradient_is_within_4e_6_of_fp64_where_torch_is_not(kind: str, count: int, in_rows: None) -> None:
    gradient = DISTRIBUTIONS[kind](LARGE)
    expected = fp64_norm(gradient)
    parameter = Parameter(torch.empty(0))
    assert relative(norms_of({parameter: gradient}, HostThreads(count))[parameter], expected) < 4e-6
    assert relative(torch.linalg.vector_norm(gradient), expected) > 1e-4


@pytest.mark.parametrize(
    "num_elements", [0, 1, 17, ROW_ELEMENTS - 1, ROW_ELEMENTS, ROW_ELEMENTS + 1, 3 * ROW_ELEMENTS + 7, LARGE]
)
def test_rows_are_torchs_norms_of_pieces_whatever_the_threads(num_elements: int, in_rows: None) -> None:
    gradient = torch.randn(num_elements)
    expected = [torch.linalg.vector_norm(piece) for piece in gradient.split(ROW_ELEMENTS)][: num_rows(gradient)]
    assert row_norms(gradient).tolist() == [float(norm) for norm in expected]
    parameter = Parameter(torch.empty(0))
    norms = [norms_of({parameter: gradient}, HostThreads(count))[parameter].item() for count in (1, 3)]
    assert norms == [norm_of_norms(expected).item()] * 2


def test_gradients_of_cpu_parameters_have_torchs_bits() -> None:
    gradients = {Parameter(torch.empty(0)): torch.randn(n) for n in (LARGE, 3, 0, ROW_ELEMENTS + 1)}
    norms = norms_of(gradients, HostThreads(2))
    assert list(norms) == list(gradients)
    assert norm_of_norms(list(norms.values())) == torch.nn.utils.get_total_norm(gradients.values())


def test_no_gradients_have_a_norm_of_zero() -> None:
    assert norm_of_norms([]) == torch.nn.utils.get_total_norm([]) == 0.0
    assert norms_of({}, HostThreads(2)) == {}


@pytest.mark.parametrize("gradient_placement", ["device", "host"])
def test_clipping_and_skipping_use_the_accurate_norm(gradient_placement: str, in_rows: None) -> None:
    parameters = random_parameters([(LARGE,), (17,)], torch.bfloat16)
    gradients = random_gradients(parameters, 0)
    optimizer = HostAdamW(parameters, gradient_placement=gradient_placement)
    backward(parameters, gradients)
    expected = fp64_norm(*[g.float() for g in gradients])
    assert relative(optimizer.clip_grad_norm_(1.0), expected) < 4e-6
    assert relative(fp64_norm(*[optimizer.gradient(p) for p in parameters]), 1.0) < 4e-6
