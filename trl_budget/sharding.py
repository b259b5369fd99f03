"""Which local rank steps and which one reduces each parameter, and what host memory that takes: numbers only.

Whole parameters have one owner on each node; the ranks with the same position on every node own the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trl_budget.errors import SettingsError

OPTIMIZER_SHARDINGS = ("auto", "replicated", "rank0", "sharded")
FP32_BYTES = 4


def check_optimizer_sharding(requested: str) -> None:
    """Refuses anything but the four values.

    Raises:
        SettingsError: names the value and the four.
    """
    if requested not in OPTIMIZER_SHARDINGS:
        raise SettingsError(
            f"optimizer_sharding={requested!r} is not known. It says which ranks of a node keep and step the "
            f"optimizer. Set optimizer_sharding to one of {', '.join(OPTIMIZER_SHARDINGS)}."
        )


def resolve_optimizer_sharding(requested: str, num_ranks: int) -> str:
    """What the field stands for on a node with `num_ranks` ranks; one rank owns everything, whatever was asked."""
    check_optimizer_sharding(requested)
    return "sharded" if requested == "auto" or num_ranks == 1 else requested


def assign_owners(num_elements: Sequence[int], num_ranks: int) -> list[int]:
    """Gives each parameter to a local rank: the largest first, each to the rank that has least so far.

    Args:
        num_elements: of each parameter.
        num_ranks: ranks of the node.

    Returns:
        The owner of each parameter. No rank owns more than the mean plus the largest parameter.
    """
    load = [0] * num_ranks
    owners = [0] * len(num_elements)
    for index in sorted(range(len(num_elements)), key=lambda i: (-num_elements[i], i)):
        owner = load.index(min(load))
        owners[index] = owner
        load[owner] += num_elements[index]
    return owners


@dataclass(frozen=True)
class HostMemoryPlan:
    """Host memory of one node, in bytes, slab padding (at most 252 bytes a parameter) left out.

    Attributes:
        num_elements: trainable elements of the policy.
        num_ranks: ranks of the node.
        sharding: "sharded", "rank0" or "replicated".
        num_in_place: elements that are fp32 on the CPU and their own master, with one rank only.
        staging_bytes: gradient staging of each rank: where bf16 gradients leave during backward, 2 per parameter, at
            most 512 MiB; where a GPU's leave at its end, 192 MiB.
    """

    num_elements: int
    num_ranks: int = 1
    sharding: str = "sharded"
    num_in_place: int = 0
    staging_bytes: int = 0

    @property
    def copies(self) -> int:
        """How often the node holds masters and moments."""
        return self.num_ranks if self.sharding == "replicated" else 1

    @property
    def rows(self) -> dict[str, int]:
        """Bytes of the node by what they hold."""
        separate = self.num_elements - self.num_in_place
        return {
            "master weights": FP32_BYTES * separate * self.copies,
            "exp_avg": FP32_BYTES * self.num_elements * self.copies,
            "exp_avg_sq": FP32_BYTES * self.num_elements * self.copies,
            "gradient accumulators": FP32_BYTES * separate * self.num_ranks,
            **({"gradient staging": self.staging_bytes * self.num_ranks} if self.staging_bytes else {}),
        }

    @property
    def node_bytes(self) -> int:
        """12 bytes per element for masters and moments, 4 and staging for every rank's gradients."""
        return sum(self.rows.values())

    def owned_bytes(self, local_rank: int) -> int:
        """Masters and moments that a rank steps, if parameters divide evenly."""
        state = sum(self.rows[name] for name in ("master weights", "exp_avg", "exp_avg_sq"))
        if self.sharding == "rank0":
            return state if local_rank == 0 else 0
        return state // self.num_ranks

    def table(self) -> str:
        """The plan as text, in GiB: what the node holds and the sum of it, then each rank's share of that."""
        title = f"host memory of a node, {self.num_ranks} ranks, {self.sharding}"
        lines = [f"{title:<50}{'GiB':>9}"]
        lines += [f"  {name:<48}{nbytes / 2**30:>9.2f}" for name, nbytes in self.rows.items()]
        per_element = self.node_bytes / max(self.num_elements, 1)
        lines.append(f"  {f'sum, {per_element:.0f} bytes per parameter':<48}{self.node_bytes / 2**30:>9.2f}")
        lines += [
            f"    {f'of it masters and moments of rank {rank}':<46}{self.owned_bytes(rank) / 2**30:>9.2f}"
            for rank in range(self.num_ranks)
        ]
        return "\n".join(lines)
