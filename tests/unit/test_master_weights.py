"""Masters captured from a loaded model: its fp32 values, kept to the last bit while the model itself becomes bf16."""

from __future__ import annotations

import torch
from torch import nn
from torch_reference import assert_same_bits, fp32_twins, random_parameters, stock_adamw, train_pair

from trl_budget.host_adamw import HostAdamW
from trl_budget.master_weights import capture_master_weights


def fp32_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 11, bias=False))
    model[3].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    return model


def test_training_on_captured_masters_has_the_bits_of_fp32_masters() -> None:
    model = fp32_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    twins = fp32_twins(parameters)
    optimizer = HostAdamW(parameters, lr=1e-4, master_weights=capture_master_weights(model, pin=False))
    stock = stock_adamw(twins, "fused", lr=1e-4)
    assert parameters[0].dtype == torch.bfloat16
    assert not torch.equal(parameters[0].detach().float(), twins[0].detach()), "masters need low bits to lose"
    train_pair(optimizer, parameters, stock, twins)
    assert_same_bits(optimizer, parameters, stock, twins)


def test_captured_masters_are_kept_and_not_copied() -> None:
    model = fp32_model()
    masters = capture_master_weights(model, pin=False)
    optimizer = HostAdamW(model.parameters(), master_weights=masters)
    assert {p: optimizer.state[p]["master_weights"].data_ptr() for p in masters} == {
        p: masters[p].data_ptr() for p in masters
    }


def test_capturing_casts_every_parameter_and_keeps_objects_buffers_and_ties() -> None:
    model = fp32_model()
    before = list(model.parameters())
    masters = capture_master_weights(model, pin=False)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float32}
    assert model[3].weight is model[0].weight
    assert set(masters) == {p for p in before if p.requires_grad}


def test_a_bf16_parameter_needs_sixteen_bytes_of_host_memory_per_element() -> None:
    parameters = random_parameters([(64,), (4, 64)], torch.bfloat16)  # multiples of the slab alignment
    assert HostAdamW(parameters).host_bytes == 16 * (64 + 4 * 64)


def test_captured_masters_count_as_host_memory_once() -> None:
    model = nn.Linear(64, 64, bias=False)
    masters = capture_master_weights(model, pin=False)
    assert HostAdamW(model.parameters(), master_weights=masters).host_bytes == 16 * 64 * 64


class _KeepsSome(torch.nn.Module):
    """Names as transformers' `_keep_in_fp32_modules_strict` has them: a part, a dotted pair, a pattern."""

    _keep_in_fp32_modules_strict = ("router", "mlp.gate.weight", "norm*")

    def __init__(self) -> None:
        super().__init__()
        for name in ("router", "gate", "norm1", "norouter"):
            self.add_module(name, torch.nn.Linear(2, 2, bias=False))
        self.mlp = torch.nn.Module()
        self.mlp.gate = torch.nn.Linear(2, 2, bias=False)
        self.mlp.gate_proj = torch.nn.Linear(2, 2, bias=False)


def test_parameters_that_transformers_keeps_in_fp32_stay_fp32() -> None:
    model = _KeepsSome()
    capture_master_weights(model, pin=False)
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"router.weight", "norm1.weight", "mlp.gate.weight"}
