"""Masters captured from a loaded model: its fp32 values, kept to the last bit while the model itself becomes bf16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch_reference import assert_same_bits, fp32_twins, random_parameters, stock_adamw, train_pair

from trl_budget.host_adamw import HostAdamW
from trl_budget.master_weights import capture_master_weights, fp32_checkpoint_weights


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


def values_read(folder: Path) -> dict[str, float]:
    """The first element of what is read for each parameter of a model with two."""
    model = nn.Sequential(nn.Linear(2, 2))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: values.view(-1)[0].item()
        for parameter, values in fp32_checkpoint_weights(str(folder), model)
    }


def write(path: Path, value: float, *names: str) -> None:
    shapes = {"0.weight": (2, 2), "0.bias": (2,)}
    save_file({name: torch.full(shapes[name], value) for name in names}, path)


def test_a_checkpoint_is_its_own_file_and_no_other_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", 1.0, "0.weight", "0.bias")
    for other in (
        "ema.safetensors",
        "adapter_model.safetensors",
        "zzz.safetensors",
        "model-00001-of-00001.safetensors",
    ):
        write(tmp_path / other, 2.0, "0.weight", "0.bias")
    assert values_read(tmp_path) == {"0.weight": 1.0, "0.bias": 1.0}


def test_a_checkpoint_in_shards_is_what_its_index_names(tmp_path: Path) -> None:
    shards = {"0.weight": "model-00001-of-00002.safetensors", "0.bias": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name, file in shards.items():
        write(tmp_path / file, 1.0, name)
    write(tmp_path / "ema.safetensors", 2.0, "0.weight", "0.bias")
    assert values_read(tmp_path) == {"0.weight": 1.0, "0.bias": 1.0}


def test_a_folder_without_a_checkpoint_gives_nothing(tmp_path: Path) -> None:
    write(tmp_path / "ema.safetensors", 2.0, "0.weight", "0.bias")
    assert values_read(tmp_path) == {}
