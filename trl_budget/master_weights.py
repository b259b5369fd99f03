"""Captures fp32 master weights from a freshly loaded policy and leaves bf16 compute weights behind.

Runs before the policy moves to the GPU, so fp32 weights never reach the card, and releases each fp32 tensor as soon as
it has been copied. Bit-exact: masters are the loaded values, compute weights their cast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from trl_budget.pinned import ParameterSlabs, check_host_memory
from trl_budget.sharding import HostMemoryPlan
from trl_budget.team import OneRank
from trl_budget.upstream import kept_in_fp32


@torch.no_grad()
def capture_master_weights(model: nn.Module, *, pin: bool, team: OneRank | None = None) -> ParameterSlabs:
    """Moves the trainable weights' fp32 values to the host and casts the model's parameters to bf16 where they are.

    Buffers, and parameters that transformers keeps in fp32 for a bf16 model, keep their dtype. Tied weights are one
    parameter and stay tied.

    Args:
        model: the policy, on any device; its `Parameter` objects stay the same.
        pin: page-lock the masters.
        team: the ranks that train the model, this process alone when None. Collective where they are several; the
            masters they share are then those of each node's first rank, until `HostAdamW` makes them rank 0's.

    Returns:
        fp32 host tensors by parameter, for every trainable floating-point parameter.

    Raises:
        HostMemoryError: the machine refused the memory.
        SettingsError: ranks with different parameters.
    """
    team = team or OneRank()
    kept = kept_in_fp32(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    trainable = [p for p in names if p.requires_grad and p.is_floating_point()]
    released = sum(p.nbytes - 2 * p.numel() for p in trainable if p.device.type == "cpu") * team.num_local_ranks
    plan = HostMemoryPlan(sum(p.numel() for p in trainable), team.num_local_ranks, team.mode)
    with team.together("capture masters"):
        masters = team.master_slabs({p: names[p] for p in trainable}, pin=pin)
        # All that will be built beside the masters, before anything expensive is.
        check_host_memory(plan.node_bytes - released, "masters, moments and gradient accumulators")
        for parameter, view in masters.extend(trainable):
            if team.writes_masters:
                view.copy_(parameter.data)
            _cast(parameter, names[parameter], kept)
    for parameter, name in names.items():
        if not parameter.requires_grad:
            _cast(parameter, name, kept)
    return masters


def fp32_checkpoint_weights(folder: str, model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The weights that a checkpoint holds in fp32, read one at a time.

    Loading an fp32 checkpoint into a bf16 policy rounds it; its masters need not be rounded. The checkpoint is the
    file, or the shards of the index, that transformers loads the policy from; other files in the folder (an average,
    an export) are not read.

    Args:
        folder: a checkpoint folder with the policy in safetensors; others yield nothing.
        model: the policy that was loaded from it.

    Yields:
        A parameter of the model and its fp32 values, on the host.
    """
    parameters = dict(model.named_parameters())
    for path in _checkpoint_files(Path(folder)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                if name in parameters and file.get_slice(name).get_dtype() == "F32":
                    yield parameters[name], file.get_tensor(name)


def _checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model, as transformers looks for them."""
    whole, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if whole.exists():
        return [whole]
    if not index.exists():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _cast(parameter: nn.Parameter, name: str, kept: tuple[str, ...]) -> None:
    is_kept = any(re.search(rf"(^|\.){pattern}($|\.)", name) for pattern in kept)
    if parameter.dtype in (torch.float32, torch.float16) and not is_kept:
        parameter.data = parameter.data.to(torch.bfloat16)
