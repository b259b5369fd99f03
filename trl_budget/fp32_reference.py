"""What a reference model computes in bf16 has fp32 values on the host, where it needs them, as stock's reference has.

`sync_ref_model` mixes a share of the policy into the reference every few steps; bf16 rounds a small share away. Here
fp32 copies of the reference's weights are mixed with the policy's fp32 masters, in stock's arithmetic, and cast. A
parameter that TRL has made fp32 (`cast_lm_head_to_fp32`) gets the fp32 values back that its bf16 load has rounded.
The masters stand in for the file: where one casts to what was loaded, its value is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from trl_budget.pinned import check_host_memory
from trl_budget.ranks import current_ranks

Masters = Callable[[Parameter], Tensor | None]  # fp32, host, of the parameter's shape; None where it has none
BLOCK_ELEMENTS = 2**22  # so that no temporary is as large as an embedding


def exact_values(written: Tensor, fp32: Tensor | None) -> Tensor:
    """`fp32` wherever it casts to what is written, else that.

    Args:
        written: any floating dtype and device; read.
        fp32: of the same shape, on the host; read. None where there is none.

    Returns:
        fp32, host; `written` itself where it is just that and there is no `fp32`.
    """
    present = written.detach().to("cpu")
    if fp32 is None:
        return present.float()
    return torch.where(present == fp32.to(present.dtype), fp32, present.float())


@torch.no_grad()
def give_back_fp32_values(reference: nn.Module, policy: nn.Module, masters: Masters) -> None:
    """Gives fp32 parameters of a reference that was loaded in bf16 the bits of the policy's masters.

    Args:
        reference: written where it is fp32 and its value is the bf16 rounding of the master.
        policy: whose parameters are matched by name and shape.
        masters: its masters, as they were loaded.
    """
    named = dict(policy.named_parameters())
    for name, parameter in reference.named_parameters():
        twin = named.get(name)
        master = masters(twin) if twin is not None else None
        if parameter.dtype != torch.float32 or master is None or master.shape != parameter.shape:
            continue
        for values, fp32 in zip(_blocks(parameter), _blocks(master), strict=True):
            rounded = values.to("cpu").to(torch.bfloat16)
            is_rounded = rounded.float() == values.to("cpu")
            values.copy_(torch.where(is_rounded, exact_values(rounded, fp32), values.to("cpu")))


class Fp32Reference:
    """A reference model and, on the host, fp32 values of every weight that it holds in fewer bits.

    Args:
        reference: as it was loaded; kept.
        policy: as it was loaded, parameter for parameter.
        masters: the policy's.

    Raises:
        HostMemoryError: the machine has no room for the copies, 4 bytes a weight and process.
    """

    def __init__(self, reference: nn.Module, policy: nn.Module, masters: Masters) -> None:
        self._masters = masters
        pairs = list(zip(reference.parameters(), policy.parameters(), strict=True))
        rounded = [(parameter, twin) for parameter, twin in pairs if parameter.dtype != torch.float32]
        ranks = current_ranks()
        num_copies = 1 if ranks is None else ranks.local_world_size
        num_weights = sum(parameter.numel() for parameter, _ in rounded)
        check_host_memory(4 * num_weights * num_copies, "fp32 values of the reference model")
        self._values: dict[Parameter, Tensor] = {}
        for parameter, twin in rounded:
            self._values[parameter] = torch.empty(parameter.shape, dtype=torch.float32)
            master = masters(twin)
            fp32_blocks = _blocks(master) if master is not None else (None for _ in _blocks(parameter))
            blocks = zip(_blocks(self._values[parameter]), _blocks(parameter), fp32_blocks, strict=True)
            for values, loaded, fp32 in blocks:
                values.copy_(exact_values(loaded, fp32))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(values.nbytes for values in self._values.values())

    @torch.no_grad()
    def mix(self, reference: nn.Module, policy: nn.Module, alpha: float) -> None:
        """As TRL 1.16's `SyncRefModelCallback`, in fp32. What others have written to either model is followed.

        Args:
            reference: on its device; written.
            policy: read; its masters where they cast to its weights.
            alpha: share of the policy.
        """
        for parameter, twin in zip(reference.parameters(), policy.parameters(), strict=True):
            master = self._masters(twin)
            fp32_blocks = _blocks(master) if master is not None else (None for _ in _blocks(twin))
            own = self._values.get(parameter)
            own_blocks = _blocks(own) if own is not None else (None for _ in _blocks(parameter))
            for target, weights, fp32, values in zip(
                _blocks(parameter), _blocks(twin), fp32_blocks, own_blocks, strict=True
            ):
                mixed = exact_values(target, values).mul_(1.0 - alpha)
                mixed.add_(exact_values(weights, fp32), alpha=alpha)
                if values is not None:
                    values.copy_(mixed)
                target.copy_(mixed)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Flat views, in order."""
    return iter(tensor.detach().view(-1).split(BLOCK_ELEMENTS))
