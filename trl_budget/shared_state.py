"""Host state of parameters that several ranks of a node train together.

Masters and moments are in memory that every rank maps, each parameter stepped by one rank; or, `replicated`, private
to every rank. Every rank's gradient accumulators are mapped by all. Whatever the ranks' weights were, the masters are
rank 0's, in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from trl_budget.errors import SettingsError
from trl_budget.node_memory import NodeMemory
from trl_budget.parameter_slots import HostState, ParameterSlot, check_given_masters
from trl_budget.pinned import ParameterSlabs, check_host_memory
from trl_budget.ranks import Ranks
from trl_budget.sharding import HostMemoryPlan, assign_owners


@dataclass(eq=False)
class SharedSlot(ParameterSlot):
    """Host state of one parameter on one of several ranks. No such parameter is stepped in place.

    Attributes:
        peers: the accumulators of this node's ranks, own one included; fp32, shared, the parameter's shape.
        reducer: local rank that sums the gradients, into its own accumulator.
        is_stepped_here: whether this rank runs AdamW on the parameter.
        stepper: local rank that does, where it is not this one.
        progress: int64 scalar, shared: the number of the last step whose result is in the masters; negative where its
            stepper failed in that step.
        reduced: the mean gradient over all ranks, from the reduction to the end of the step; fp32, shared.
    """

    peers: tuple[Tensor, ...] = ()
    reducer: int = 0
    is_stepped_here: bool = True
    stepper: int = 0
    progress: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    reduced: Tensor | None = None
    is_reduced: bool = False

    @property
    def gradient(self) -> Tensor | None:
        """This rank's own sum; from the reduction to the end of the step, the mean over all ranks."""
        return self.reduced if self.is_reduced else super().gradient

    def forget_gradient(self) -> None:
        """Marks the accumulator empty."""
        super().forget_gradient()
        self.reduced, self.is_reduced = None, False


class SharedSlabs(ParameterSlabs):
    """Views in memory that every rank of the node maps; `extend` is collective."""

    def __init__(self, purpose: str, *, pin: bool, memory: NodeMemory, creator: int = 0) -> None:
        super().__init__(purpose, pin=pin, allocate=functools.partial(memory.slab, creator=creator))


def check_same_parameters(ranks: Ranks, names: Mapping[Parameter, str]) -> None:
    """Refuses ranks whose parameters differ, before they map memory of different sizes. Collective.

    Raises:
        SettingsError: on every rank, the first difference.
    """
    own = [(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for p, name in names.items()]
    everyone = ranks.exchange("compare parameters", own)
    for rank, other in enumerate(everyone):
        if other == everyone[0]:
            continue
        pairs = zip([*everyone[0], *[None] * len(other)], [*other, *[None] * len(everyone[0])], strict=True)
        first, different = next((a, b) for a, b in pairs if a != b)
        raise SettingsError(
            f"Rank 0 trains {_described(first)} where rank {rank} has {_described(different)}. The ranks of a job "
            "step one optimizer together, so their trained parameters must agree in number, order, shape and dtype. "
            "Build the same model, with the same layers frozen, on every rank."
        )


def _described(parameter: tuple[str, tuple[int, ...], str] | None) -> str:
    return "nothing" if parameter is None else f"{parameter[0]} of shape {parameter[1]} as {parameter[2]}"


class SharedHostState(HostState):
    """Allocates the host memory of shared slots. `build` is collective.

    Args:
        pin_memory: page-lock the masters of CUDA parameters: nothing else of the state crosses the bus.
        ranks: the processes of the job.
        memory: makes slabs that the ranks of this node share.
        sharding: "sharded", "rank0" or "replicated".
    """

    def __init__(self, *, pin_memory: bool, ranks: Ranks, memory: NodeMemory, sharding: str) -> None:
        super().__init__(pin_memory=pin_memory)
        self._ranks = ranks
        self._memory = memory
        self._sharding = sharding

    def build(
        self, names: Mapping[Parameter, str], given_masters: Mapping[Parameter, Tensor], staging_bytes: int = 0
    ) -> dict[Parameter, ParameterSlot]:
        """Makes a slot for every key of `names`; the masters of all ranks are rank 0's.

        Args:
            names: parameter -> what errors call it; the same on every rank.
            given_masters: fp32 host tensors to keep as masters; those of rank 0 count.
            staging_bytes: what gradient staging is about to take beside the state, on each rank.
        """
        parameters = list(names)
        check_given_masters(given_masters)
        check_same_parameters(self._ranks, names)
        self._check_memory(parameters, given_masters, staging_bytes)
        masters = self._masters(parameters, given_masters)
        exp_avgs = self._views("exp_avg", parameters)
        exp_avg_sqs = self._views("exp_avg_sq", parameters)
        accumulators = [
            self._slabs_of("gradient accumulators", parameters, pin=False, creator=rank)
            for rank in range(self._ranks.local_world_size)
        ]
        progress = self._memory.slab(8 * len(parameters), pin=False, purpose="step counters").view(torch.int64)
        self._share_masters(parameters, masters, accumulators[0])
        owners = assign_owners([p.numel() for p in parameters], self._ranks.local_world_size)
        return {
            p: SharedSlot(
                parameter=p,
                name=names[p],
                master_weights=masters[p],
                exp_avg=exp_avgs[p],
                exp_avg_sq=exp_avg_sqs[p],
                step=torch.zeros((), dtype=torch.float32),
                accumulator=accumulators[self._ranks.local_rank][p],
                peers=tuple(slabs[p] for slabs in accumulators),
                reducer=owner,
                is_stepped_here=self._steps(owner),
                stepper=0 if self._sharding == "rank0" else owner,
                progress=counter,
            )
            for p, owner, counter in zip(parameters, owners, progress[: len(parameters)].unbind(), strict=True)
        }

    def _steps(self, owner: int) -> bool:
        if self._sharding == "replicated":
            return True
        return self._ranks.local_rank == (0 if self._sharding == "rank0" else owner)

    def _check_memory(
        self, parameters: Sequence[Parameter], given: Mapping[Parameter, Tensor], staging_bytes: int
    ) -> None:
        plan = HostMemoryPlan(
            sum(p.numel() for p in parameters),
            self._ranks.local_world_size,
            self._sharding,
            staging_bytes=staging_bytes,
        )
        held = sum(4 * given[p].numel() for p in parameters if p in given) * plan.copies
        with self._ranks.together("check host memory"):
            check_host_memory(
                plan.node_bytes - held, f"the optimizer state of {self._ranks.local_world_size} ranks on one node"
            )

    def _masters(self, parameters: Sequence[Parameter], given: Mapping[Parameter, Tensor]) -> dict[Parameter, Tensor]:
        keeps_given = self._sharding == "replicated" or isinstance(given, SharedSlabs)
        masters = {p: given[p] for p in parameters if p in given and keeps_given}
        made = self._views("master weights", [p for p in parameters if p not in masters], pin=self._pin_memory)
        if self._ranks.local_rank == 0:
            for parameter, view in made.items():
                view.copy_(given[parameter] if parameter in given else parameter.detach())
        return {**masters, **made}

    def _share_masters(
        self,
        parameters: Sequence[Parameter],
        masters: Mapping[Parameter, Tensor],
        mailbox: Mapping[Parameter, Tensor],
    ) -> None:
        """Brings rank 0's masters to every node and, where they are private, through a mailbox to every rank."""
        is_first = self._ranks.local_rank == 0
        with self._ranks.together("broadcast masters"):
            for parameter in parameters:
                if is_first:
                    self._ranks.broadcast_over_nodes(masters[parameter])
                if is_first and self._sharding == "replicated":
                    mailbox[parameter].copy_(masters[parameter])
        if self._sharding == "replicated":
            with self._ranks.together("receive masters"):
                for parameter in parameters:
                    masters[parameter].copy_(mailbox[parameter])

    def _views(self, purpose: str, parameters: Sequence[Parameter], *, pin: bool = False) -> dict[Parameter, Tensor]:
        if self._sharding == "replicated":
            return dict(self._allocate(purpose, parameters, pin=pin))
        return dict(self._slabs_of(purpose, parameters, pin=pin, creator=0))

    def _slabs_of(
        self, purpose: str, parameters: Sequence[Parameter], *, pin: bool, creator: int
    ) -> Mapping[Parameter, Tensor]:
        pins = pin and any(p.device.type == "cuda" for p in parameters)
        slabs = SharedSlabs(purpose, pin=pins, memory=self._memory, creator=creator)
        self._slabs.append(slabs)
        for _ in slabs.extend(parameters):
            pass
        return slabs
