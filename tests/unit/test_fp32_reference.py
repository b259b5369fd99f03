"""fp32 values of a reference that computes in bf16: where they come from, how they are mixed, what they follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trl_budget import fp32_reference
from trl_budget.fp32_reference import Fp32Reference, give_back_fp32_values

BF16 = torch.bfloat16
ALPHA = 0.01


def loaded(seed: int = 0) -> tuple[nn.Module, nn.Module, dict[nn.Parameter, Tensor]]:
    """A bf16 policy and its reference, loaded from the same fp32 values, which are the policy's masters."""
    torch.manual_seed(seed)
    original = nn.Linear(5, 7)
    models = [nn.Linear(5, 7).to(BF16) for _ in range(2)]
    for model in models:
        model.load_state_dict(original.state_dict())
    values = (p.detach().clone() for p in original.parameters())
    return *models, dict(zip(models[0].parameters(), values, strict=True))


@pytest.fixture(params=[2**22, 4], ids=["one block", "many blocks"], autouse=True)
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_reference, "BLOCK_ELEMENTS", request.param)


def assert_cast_of(reference: nn.Module, expected: list[Tensor]) -> None:
    for parameter, values in zip(reference.parameters(), expected, strict=True):
        assert torch.equal(parameter.detach(), values.to(parameter.dtype))


def test_small_shares_add_up_from_the_fp32_values_that_were_loaded() -> None:
    policy, reference, masters = loaded()
    mixer = Fp32Reference(reference, policy, masters.get)
    expected = [master.clone() for master in masters.values()]
    for _ in range(40):
        for (parameter, master), values in zip(masters.items(), expected, strict=True):
            master.add_(1e-3)
            parameter.data.copy_(master)
            values.mul_(1.0 - ALPHA).add_(master, alpha=ALPHA)  # TRL's arithmetic on fp32 tensors
        mixer.mix(reference, policy, ALPHA)
        assert_cast_of(reference, expected)


def test_a_policy_without_masters_is_mixed_as_it_is() -> None:
    policy, reference, _ = loaded()
    mixer = Fp32Reference(reference, policy, lambda parameter: None)
    expected = [p.detach().float() for p in reference.parameters()]
    policy.weight.data.add_(1.0)
    mixer.mix(reference, policy, ALPHA)
    expected[0].mul_(1.0 - ALPHA).add_(policy.weight.detach().float(), alpha=ALPHA)
    expected[1].mul_(1.0 - ALPHA).add_(policy.bias.detach().float(), alpha=ALPHA)
    assert_cast_of(reference, expected)


def test_weights_that_somebody_writes_to_either_model_are_what_is_mixed() -> None:
    policy, reference, masters = loaded()
    mixer = Fp32Reference(reference, policy, masters.get)
    reference.weight.data.fill_(3.0)
    policy.weight.data.fill_(5.0)
    mixer.mix(reference, policy, 0.5)
    assert reference.weight.eq(4.0).all()


def test_an_fp32_parameter_of_the_reference_needs_no_copy() -> None:
    policy, reference, masters = loaded()
    reference.bias.data = reference.bias.data.float()
    mixer = Fp32Reference(reference, policy, masters.get)
    assert mixer.nbytes == 4 * reference.weight.numel()
    expected = reference.bias.detach() * (1.0 - ALPHA)
    expected.add_(masters[policy.bias], alpha=ALPHA)
    mixer.mix(reference, policy, ALPHA)
    assert torch.equal(reference.bias.detach(), expected)


def test_fp32_parameters_get_the_values_back_that_a_bf16_load_has_rounded() -> None:
    policy, reference, masters = loaded()
    reference.bias.data = reference.bias.data.float()
    assert not torch.equal(reference.bias, masters[policy.bias])
    give_back_fp32_values(reference, policy, masters.get)
    assert torch.equal(reference.bias.detach(), masters[policy.bias])
    assert reference.weight.dtype == BF16


def test_fp32_values_that_are_not_the_masters_rounding_stay() -> None:
    policy, reference, masters = loaded()
    reference.bias.data = torch.arange(7.0) + 1e-4
    give_back_fp32_values(reference, policy, masters.get)
    assert torch.equal(reference.bias.detach(), torch.arange(7.0) + 1e-4)
