"""AdamW on the host over fp32 master weights, for parameters of any device.

Bit-exact against `torch.optim.AdamW` of the same implementation stepping the same fp32 tensors: torch's own functional
AdamW is called, on blocks of each parameter whose length is a multiple of 16 elements (the bits are the same however
such blocks are cut). Gradients of several backwards are summed in fp32. Does not serve amsgrad, maximize, sparse
gradients. With several processes, one optimizer is stepped by all of them (`team.py`).
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from trl_budget.compute_weights import ComputeWeights
from trl_budget.errors import NonFiniteGradientError, SettingsError
from trl_budget.grad_offload import BackwardHooks, GradientAccumulator, GradientCollector
from trl_budget.gradient_stream import GradientStream
from trl_budget.host_threads import background_thread, step_threads
from trl_budget.lent_masters import masters_of_present_weights
from trl_budget.optimizer_state import (
    check_arguments,
    check_group,
    check_loadable,
    load_slot,
    step_settings,
    torch_defaults,
)
from trl_budget.parameter_slots import ParameterSlot, check_parameter, steps_in_place
from trl_budget.pinned import ParameterSlabs
from trl_budget.placement import check_gradient_placement
from trl_budget.state_edits import follow_edits, follow_storage, publish, saved_entry
from trl_budget.streams import CopyEngines
from trl_budget.team import Arrivals, broadcast_untrained, join_team
from trl_budget.unfinished_steps import UnfinishedSteps

logger = logging.getLogger(__name__)

BLOCK_ELEMENTS = 2**22  # a multiple of 16; shorter blocks pay more for calls than they win by staying in cache
MAX_CONSECUTIVE_SKIPPED_STEPS = 10

_owners: weakref.WeakValueDictionary[int, HostAdamW] = weakref.WeakValueDictionary()


class HostAdamW(torch.optim.Optimizer):
    """AdamW whose state and arithmetic live in host memory; the device keeps the compute weights only.

    `loss.backward(); optimizer.step()` is the whole protocol. To clip in between, call `optimizer.clip_grad_norm_`:
    torch's `clip_grad_norm_` reads `parameter.grad`, which has left; `editable_gradients()` brings it back for a
    while. `optimizer.zero_grad()` drops what has left, a module's own `zero_grad()` does not reach it. When a backward
    ends, the gradients move to fp32 accumulators on the host and `parameter.grad` becomes None; `step()` runs AdamW on
    the fp32 masters and writes `master_weights.to(parameter.dtype)` back, before it returns. A parameter that is fp32
    and on the CPU is stepped in place: no second copy, and its gradient stays in `parameter.grad`, as with torch's
    optimizer.

    `state[p]` holds `step` (fp32 scalar), `exp_avg`, `exp_avg_sq` and `master_weights` (fp32, host, `p`'s shape;
    page-locked when `p` is on CUDA). Entries may be deleted and tensors replaced, as with torch's optimizer: before
    the next step a missing entry starts anew and a replaced tensor's values are copied. A step with an infinite or NaN
    gradient is skipped and reported; the tenth in a row raises. After an error or an interrupt inside a step, `step`,
    `clip_grad_norm_` and `state_dict` refuse until a whole state has been loaded, see `check_whole`.

    In a process group of several ranks, the ranks share the optimizer: `step()` and `clip_grad_norm_`, whichever comes
    first, make the mean gradient over all ranks, as DDP does, and no parameter is stepped in place. Construction and
    every method that changes state are collective; all ranks start from rank 0's weights, and edits of `state` must be
    made on every rank alike.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer. fp32 or bf16, contiguous,
            on the CPU or CUDA. Frozen ones get no state until they require gradients.
        lr: learning rate; a tensor of one element as well, unless the implementation is "foreach" (as torch).
        betas: coefficients of the running averages.
        eps: term added to the denominator.
        weight_decay: decoupled weight decay.
        implementation: which of torch's AdamW implementations runs: "fused" (fastest), "foreach" or "loop" (these two
            give the same bits).
        master_weights: fp32 host tensors to keep as masters, of parameters that have been cast already; each such
            parameter is overwritten with their cast. Parameters that are missing get `p.float()`.
        parameter_names: names used in errors and warnings; `param_names` of the groups are used otherwise.
        pin_memory: page-lock the state of CUDA parameters and the staging of their gradients. False costs transfer
            speed, for machines that page-lock little memory (WSL2, some containers). Kept as `pin_memory`.
        sharding: with several ranks, which ranks of a node keep and step the optimizer, see `BudgetGRPOConfig`.
        gradient_placement: "device": gradients stay in `parameter.grad` until their backward ends, then move. "host":
            each leaves as soon as backward has made it, and is summed while backward goes on. "auto": host if a
            parameter is on CUDA. The sums are the same. `gradient_placement` then holds which of the two it is.

    Raises:
        SettingsError: an argument out of range, a parameter that cannot be served or that a live HostAdamW serves, or
            ranks that differ.
        HostMemoryError: the machine refused the memory.
        RankError: another rank failed or is gone.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        implementation: str = "fused",
        *,
        master_weights: ParameterSlabs | None = None,
        parameter_names: Mapping[Parameter, str] | None = None,
        pin_memory: bool = True,
        sharding: str = "auto",
        gradient_placement: str = "auto",
    ) -> None:
        check_arguments(implementation)
        check_gradient_placement(gradient_placement)
        self.implementation = implementation
        self.pin_memory = pin_memory
        self.num_consecutive_skipped_steps = 0
        self._given_masters = master_weights
        self._names = dict(parameter_names or {})
        self._slots: dict[Parameter, ParameterSlot] = {}
        self._unfinished = UnfinishedSteps()
        self._team = join_team(sharding)
        self._host_state = self._team.host_state(pin_memory=pin_memory)
        self._engines = CopyEngines(pin=pin_memory)
        self._threads = step_threads()
        self._background = background_thread()
        self._compute_weights = ComputeWeights(self._engines)
        self._hooks = BackwardHooks(weakref.WeakMethod(self._on_gradient), weakref.WeakMethod(self._on_backward_end))
        weakref.finalize(self, self._hooks.detach).atexit = False
        self._is_built = False
        super().__init__(
            params, torch_defaults(implementation, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        )
        self._is_built = True
        if gradient_placement == "auto":
            gradient_placement = "host" if any(p.is_cuda for p in self._parameters()) else "device"
        self.gradient_placement = gradient_placement
        self._gradients = self._team.gradients(self._slots, self._gradient_collector(pin_memory), self._threads)
        self._build_slots()

    def _gradient_collector(self, pin_memory: bool) -> GradientCollector:
        if self.gradient_placement == "host":
            return GradientStream(self._engines, self._background, pin=pin_memory)
        return GradientAccumulator(self._engines, self._threads)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, with host state of its own.

        Raises:
            SettingsError: a hyperparameter or parameter that cannot be served; the group has not been added then.
        """
        self._follow_edits()
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1], self.implementation)
            if self._is_built:
                self._build_slots()
        except Exception:
            self.param_groups.pop()
            raise

    def regroup(self, params: Any, *, implementation: str, **defaults: Any) -> None:
        """Replaces the parameter groups and hyperparameters; parameters that stay keep their state.

        A parameter that changed its shape (`resize_token_embeddings`) starts anew from its present weights.

        Args:
            params: parameters or parameter groups, as at construction.
            implementation: as at construction.
            defaults: `lr`, `betas`, `eps`, `weight_decay` of groups that do not set them.
        """
        check_arguments(implementation)
        with self._team.reporting("regroup parameters"):
            self._gradients.wait()
        self._follow_edits()
        self.implementation = implementation
        self.defaults.update(torch_defaults(implementation, **defaults))
        self.param_groups.clear()
        self._drop_slots([p for p, slot in self._slots.items() if p.shape != slot.exp_avg.shape])
        groups = list(params)
        for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
            self.add_param_group(group)
        self._drop_slots(set(self._slots).difference(self._parameters()))

    def _drop_slots(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            self._unfinished.forget(self._slots.pop(parameter))
            self.state.pop(parameter, None)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for masters, moments and accumulators: all that this process maps, others' included."""
        return self._host_state.nbytes + (self._given_masters.nbytes if self._given_masters is not None else 0)

    @property
    def owned_bytes(self) -> int:
        """Bytes of masters and moments that this rank steps; a parameter stepped in place counts its moments."""
        owned = [slot for slot in self._slots.values() if slot.is_stepped_here]
        return sum(slot.exp_avg.nbytes * (2 if slot.is_in_place else 3) for slot in owned)

    @property
    def world_size(self) -> int:
        """Number of processes that share this optimizer."""
        return self._team.world_size

    @property
    def sharding(self) -> str:
        """How the ranks of a node share it: "sharded", "rank0" or "replicated"."""
        return self._team.mode

    # Gradients

    @property
    def gradients_leave(self) -> bool:
        """Whether `parameter.grad` of any trained parameter is None after a backward."""
        return bool(self._separate_slots())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the running step, or sets them to zero, on the device and in the accumulators.

        Zeros are gradients: as with torch's optimizer, a parameter that had a gradient since they were last dropped,
        a step that has used it up included, is stepped with them (momentum, weight decay).

        Raises:
            HostThreadError: summing them had failed and nobody has been told; they are dropped.
        """
        super().zero_grad(set_to_none)
        with self._team.reporting("zero gradients"):
            self._gradients.zero(set_to_none)

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """The fp32 host gradient summed so far, clipping included, or None. Valid until the next backward or step.

        With several ranks, this rank's own sum; once clipped or measured, the mean over all ranks.
        """
        self._collect_gradients()
        return self._gradients.of(self._slots[parameter])

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | Tensor | None = None) -> Tensor:
        """Clips a gradient norm as `torch.nn.utils.clip_grad_norm_` does and returns the norm before.

        Gradients that are not finite are not scaled: the step that follows is skipped. Where they are finite and only
        their norm overflows fp32, the factor is 0, as torch's: the step follows momentum and weight decay alone.

        Args:
            max_norm: upper bound of the norm; `inf` only measures.
            parameters: whose gradients are measured and scaled, all of this optimizer when None. Their order is the
                order in which the norms of the parameters are summed, which decides the last bit: stock's is
                `model.parameters()`. Parameters that are not this optimizer's are clipped in `parameter.grad`.

        Returns:
            fp32 scalar on the host: the norm before clipping.

        Raises:
            HalfSteppedError: an earlier step ended midway.
        """
        chosen = self._parameters() if parameters is None else parameters
        with self._team.reporting("clip gradients"):
            self._unfinished.check()
            self._collect_gradients()
            return self._gradients.clip(max_norm, [chosen] if isinstance(chosen, Tensor) else chosen)

    @contextmanager
    def editable_gradients(self) -> Iterator[None]:
        """Inside, `parameter.grad` of every trained parameter is its gradient so far, clipping included.

        In the parameter's dtype and on its device, or None where it has none. In-place edits, other tensors, None
        (the parameter is not stepped) and gradients of parameters that had none are taken over when the block ends
        without an error, and `parameter.grad` is None again. Elements that were not edited keep every fp32 bit. A
        norm that was measured before is measured again; what was edited is not clipped again. Parameters that are
        stepped in place have their gradient in `parameter.grad` anyway.

        With several ranks, `parameter.grad` is this rank's own sum before clipping or measuring, and the mean over
        all ranks from then on, as under DDP; the block is collective then, and all ranks must make the same edits.

        Takes device memory for all gradients: the bytes of the trained weights (2 for each of a bf16 policy, 7.5 GiB
        for 4 billion), and two copies of them over the bus.

        Raises:
            SettingsError: a backward, a clip or a step inside; gradients that differ between ranks at the end.
        """
        with self._team.reporting("lend gradients"):
            self._collect_gradients()
            with self._team.loan(self._separate_slots(), self._gradients).lent():
                yield

    def _collect_gradients(self) -> None:
        self._build_slots()
        self._gradients.drain()

    def _on_gradient(self, parameter: Tensor) -> None:
        self._gradients.on_gradient(parameter)

    def _on_backward_end(self) -> None:
        self._gradients.on_backward_end(self._build_slots())

    # Stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adopts foreign writes, runs AdamW on every parameter with a gradient, and refreshes the compute weights.

        The new weights are in place, for every stream, when this returns. Gradients on the host are dropped; `p.grad`
        of parameters stepped in place stays, as with torch's optimizer.

        Raises:
            HalfSteppedError: an earlier step ended midway.
            NonFiniteGradientError: this is the tenth step in a row that was skipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._team.reporting("collect gradients"):
            self._unfinished.check()
            settings = [step_settings(group, self.implementation) for group in self.param_groups]
            self._collect_gradients()
            norm = self._gradients.norm().item()
            is_finite = self._gradients.are_finite(norm)
        if not is_finite:
            self._skip_step(norm)
            return loss
        self.num_consecutive_skipped_steps = 0
        self.adopt_external_writes()
        groups = [self._slots_with_gradient(group) for group in self.param_groups]
        stepped = [slot for slots in groups for slot in slots]
        with self._unfinished.during("An optimizer step", stepped), self._team.stepping(stepped) as arrivals:
            self._begin_upload()
            for values, slots in zip(settings, groups, strict=True):
                self._step_group(values, [slot for slot in slots if slot.is_stepped_here], arrivals)
            self._receive(arrivals.all())
            self._finish_upload(stepped)
        self._gradients.forget()
        return loss

    def _slots_with_gradient(self, group: dict[str, Any]) -> list[ParameterSlot]:
        return [slot for p in group["params"] if (slot := self._slots.get(p)) and slot.gradient is not None]

    def _step_group(self, settings: dict[str, Any], slots: Sequence[ParameterSlot], arrivals: Arrivals) -> None:
        flat = [(slot, cast(Tensor, slot.gradient).reshape(-1)) for slot in slots]
        blocks = [(*pair, start) for pair in flat for start in range(0, pair[1].numel(), BLOCK_ELEMENTS)]
        num_open = Counter(slot for slot, *_ in blocks)
        stepped: deque[ParameterSlot] = deque()  # once for each block; appended to by the host threads
        unpublished = deque(slots)

        def step_block(block: tuple[ParameterSlot, Tensor, int]) -> None:
            self._step_block(*block, settings)
            stepped.append(block[0])

        def exchange() -> None:
            """Tells the other ranks what is complete here, in order, and takes what is complete there."""
            while stepped:
                num_open[stepped.popleft()] -= 1
            while unpublished and num_open[unpublished[0]] == 0:
                slot = unpublished.popleft()
                slot.step += 1
                self._team.publish(slot)
            self._receive(arrivals.ready())

        self._threads.run(step_block, blocks, meanwhile=exchange)
        exchange()

    def _receive(self, slots: Iterable[ParameterSlot]) -> None:
        """Refreshes the compute weights of parameters that other ranks have stepped."""
        for slot in slots:
            self._write_all(slot)
            slot.step += 1

    @torch.no_grad()
    def _step_block(self, slot: ParameterSlot, flat_gradient: Tensor, start: int, settings: dict[str, Any]) -> None:
        """Clips, steps and uploads one block; in a pool of several host threads, on one of them."""
        block = slice(start, start + BLOCK_ELEMENTS)
        state = [tensor.view(-1)[block] for tensor in (slot.master_weights, slot.exp_avg, slot.exp_avg_sq)]
        master, exp_avg, exp_avg_sq = state
        gradient = self._gradients.clipped(slot, flat_gradient[block])
        # A copy of the step, which torch's function advances once for each call, hence for each block.
        adamw([master], [gradient], [exp_avg], [exp_avg_sq], [], [slot.step.clone()], **settings)
        if not slot.is_in_place:
            self._compute_weights.write(slot, start, start + master.numel())

    def _skip_step(self, norm: float) -> None:
        self.num_consecutive_skipped_steps += 1
        with self._team.together("skip a step"):
            self._report_skipped_step(norm)
        self._gradients.forget()
        if self.num_consecutive_skipped_steps >= MAX_CONSECUTIVE_SKIPPED_STEPS:
            raise NonFiniteGradientError(
                f"{self.num_consecutive_skipped_steps} optimizer steps in a row had a gradient norm of {norm}. The "
                "run no longer learns: the weights are those of the last finite step. Resume from a checkpoint with a "
                "lower learning_rate, or find the loss term that is not finite."
            )

    def _report_skipped_step(self, norm: float) -> None:
        gradients = {slot.name: slot.gradient for slot in self._slots.values() if slot.gradient is not None}
        bad = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
        logger.warning(
            "The gradient norm is %s, so this optimizer step was skipped: masters and moments are unchanged. "
            "%d of %d gradients hold infinite or NaN values%s. %d steps in a row have been skipped.",
            norm,
            len(bad),
            len(gradients),
            f", the first is {bad[0]}" if bad else "",
            self.num_consecutive_skipped_steps,
        )

    def release_gradients(self) -> None:
        """Takes no more gradients: they stay in `parameter.grad`, for another optimizer."""
        self._hooks.detach()

    def check_whole(self) -> None:
        """Refuses weights of which some were stepped and others not; to be asked before the model alone is saved.

        Loading a whole state (`load_state_dict`, with masters) mends it; where a parameter is its own master, the
        model's weights have to be loaded as well. Not collective.

        Raises:
            HalfSteppedError: names the operation that ended midway and what to load.
        """
        self._unfinished.check()

    # Compute weights

    @torch.no_grad()
    def adopt_external_writes(self, *, is_expected: bool = False) -> list[str]:
        """Takes over into the masters what others have written to the parameters since the last refresh.

        Called by `step()` and before a state is loaded. With several ranks, the same must have been written on every
        rank, as under DDP; each parameter is adopted by the rank that steps it.

        Args:
            is_expected: log the adoption as information instead of as a warning.

        Returns:
            The names of the parameters that were adopted.
        """
        separate = self._separate_slots()
        with self._team.reporting("adopt foreign writes"):
            self.follow_parameters()
            changed = self._team.agree_on_writes(self._compute_weights.changed(separate), separate)
            adopted = [slot.name for slot in changed if slot.is_stepped_here and self._compute_weights.adopt(slot)]
            adopted = self._team.union(adopted) if changed else adopted
        if adopted:
            logger.log(
                logging.INFO if is_expected else logging.WARNING,
                "%d parameters were written since the last optimizer step; their new values are now the master "
                "weights: %s%s",
                len(adopted),
                ", ".join(adopted[:3]),
                ", ..." if len(adopted) > 3 else "",
            )
        self._refresh(changed)  # an element may have been widened by `model.float()`
        return adopted

    def master_weights(self, parameter: Parameter) -> Tensor | None:
        """The fp32 master of a parameter, host, to be read; None where it has no host state yet."""
        slot = self._slots.get(parameter)
        return slot.master_weights if slot is not None else None

    @contextmanager
    def masters_of_present_weights(self) -> Iterator[None]:
        """As `adopt_external_writes`, for the length of the block: for a file written beside the weights as they are.

        The masters are their own again afterwards, bit for bit, so weights that are put back are not adopted.
        """
        with self._team.reporting("lend masters"):
            self.follow_parameters()
        with masters_of_present_weights(self._separate_slots(), self._compute_weights, self._team):
            yield

    @torch.no_grad()
    def set_master_weights(self, weights: Iterable[tuple[Parameter, Tensor]]) -> None:
        """Copies values into masters and refreshes the compute weights; moments and steps stay.

        Args:
            weights: parameters and their new values, any floating dtype, the parameter's shape. Parameters without
                host state are left out.
        """
        self._follow_edits()
        written = []
        with self._team.together("set master weights"):
            for parameter, values in weights:
                if (slot := self._slots.get(parameter)) is not None:
                    if slot.is_stepped_here:
                        slot.master_weights.copy_(values)
                    written.append(slot)
        self._refresh([slot for slot in written if not slot.is_in_place])

    def broadcast_untrained(self, model: torch.nn.Module) -> None:
        """Gives every rank rank 0's frozen parameters and buffers, as DDP's constructor does. Collective."""
        broadcast_untrained(self._team, model)

    def follow_parameters(self) -> None:
        """Follows parameters stepped in place whose storage was replaced (`parameter.data = ...`), and edited state.

        Raises:
            SettingsError: such a parameter left the CPU or fp32, and took its master weights with it; or an entry of
                `state` holds something that AdamW cannot step.
        """
        for slot in self._slots.values():
            follow_storage(self.state, slot)
        self._follow_edits()

    def _follow_edits(self) -> None:
        """Takes edits of `state` over; masters that the user has replaced become the weights."""
        if written := follow_edits(self.state, self._slots, self._team):
            self._refresh([slot for slot in written if not slot.is_in_place])

    @torch.no_grad()
    def _refresh(self, slots: Sequence[ParameterSlot]) -> None:
        self._begin_upload()
        for slot in slots:
            self._write_all(slot)
        self._finish_upload(slots)

    def _write_all(self, slot: ParameterSlot) -> None:
        for start in range(0, slot.master_weights.numel(), BLOCK_ELEMENTS):
            self._compute_weights.write(slot, start, min(start + BLOCK_ELEMENTS, slot.master_weights.numel()))

    def _begin_upload(self) -> None:
        for device in {slot.parameter.device for slot in self._separate_slots()}:
            if device.type == "cuda":
                self._engines[device].begin_upload()

    def _finish_upload(self, slots: Sequence[ParameterSlot]) -> None:
        for engine in self._engines.values():
            engine.finish_upload()
        self._compute_weights.record([slot for slot in slots if not slot.is_in_place])

    # Building

    def _build_slots(self) -> list[ParameterSlot]:
        """Makes host state for parameters that require gradients and have none: new groups, unfrozen layers."""
        new = [p for p in self._parameters() if p.requires_grad and p not in self._slots]
        if not new:
            return []
        names = self._names_of(new)
        with self._team.reporting("build host state"):
            for parameter in new:
                check_parameter(parameter, names[parameter])
            _claim(names, self)
            given = self._given_masters if self._given_masters is not None and not self._slots else {}
            separate = [p for p in new if self.world_size > 1 or not steps_in_place(p)]
            built = self._host_state.build(names, given, self._gradients.collector.staging_bytes(separate))
        self._slots.update(built)
        for slot in built.values():
            if not self.state.get(slot.parameter):  # what the user has put there is followed before the step
                publish(self.state, slot)
            self._hooks.attach(slot.parameter)
        self._gradients.collector.prepare(built.values())
        self._refresh([slot for slot in built.values() if not slot.is_in_place])
        return list(built.values())

    def _names_of(self, parameters: Iterable[Parameter]) -> dict[Parameter, str]:
        names = {p: f"parameter {index} of shape {tuple(p.shape)}" for index, p in enumerate(self._parameters())}
        for group in self.param_groups:
            names.update(zip(group["params"], group.get("param_names", ()), strict=False))
        names.update(self._names)
        return {p: names[p] for p in parameters}

    def _parameters(self) -> list[Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _separate_slots(self) -> list[ParameterSlot]:
        return [slot for slot in self._slots.values() if not slot.is_in_place]

    # State

    def state_dict(self) -> dict[str, Any]:
        """Torch's format, with `master_weights` beside the moments where the parameter is not its own master.

        The tensors are views of the live slabs: save or copy them before the next step. Complete on every rank, the
        ranks' own included that other ranks step. Edits of `state` are shown as they stand; an entry that was deleted
        has zeros, and the masters that it keeps. Not collective.

        Raises:
            HalfSteppedError: a step ended midway.
            SettingsError: an entry of `state` holds something that AdamW cannot step.
        """
        self._unfinished.check()
        state_dict = super().state_dict()
        entries = state_dict["state"]
        for index, parameter in enumerate(self._parameters()):
            if (slot := self._slots.get(parameter)) is not None:
                entries[index] = saved_entry(entries.get(index), slot)
        return state_dict

    def __getstate__(self) -> NoReturn:
        """Refuses `copy` and `pickle`, which torch's optimizers allow.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            f"A HostAdamW of {len(self._slots)} parameters was to be copied or pickled. Its slabs, hooks and threads "
            "serve those very parameters, and a copy would step them with masters of its own. Keep "
            "copy.deepcopy(optimizer.state_dict()), and load it with load_state_dict into a HostAdamW that is built "
            "for the copied model."
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a state into the slabs, keeping their dtype, device and page-locking.

        torch's loader would cast the fp32 host state to each parameter's dtype and device. A state of
        `torch.optim.AdamW` is accepted as well: it has no masters, so the present weights stay the masters.

        Raises:
            SettingsError: shapes or flags that do not fit this optimizer; nothing has been changed then.
        """
        loaded = state_dict["state"]
        with self._team.reporting("load a state"):
            self._build_slots()
            check_loadable(state_dict, [self._slots.get(p) for p in self._parameters()], self.implementation)
        self._follow_edits()
        state = self.state
        try:
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        finally:  # after an interrupt too: entries that are gone start anew
            self.state = state
        self.adopt_external_writes(is_expected=True)
        entries = {self._slots[p]: loaded.get(i) for i, p in enumerate(self._parameters()) if p in self._slots}
        with self._unfinished.during("Loading a state", entries):
            with self._team.together("load a state"):
                for slot, entry in entries.items():
                    load_slot(slot, entry)
            self._refresh(self._separate_slots())
        for slot, entry in entries.items():
            self._unfinished.loaded(slot, with_masters=entry is not None and "master_weights" in entry)
        self._gradients.forget()


def _claim(names: Mapping[Parameter, str], owner: HostAdamW) -> None:
    """Makes `owner` the one HostAdamW of these parameters: two would overwrite each other's weights."""

    def taken() -> list[str]:
        return [
            name
            for p, name in names.items()
            if (other := _owners.get(id(p))) and other is not owner and p in other._slots
        ]

    if taken():
        gc.collect()  # a trainer that went out of scope lives on in reference cycles
    if first := taken()[:1]:
        raise SettingsError(
            f"{first[0]} is stepped by another HostAdamW that is still alive. Two sets of fp32 masters for the same "
            "weights would overwrite each other's updates. Delete the first trainer or optimizer (`del trainer`) "
            "before you build the next one on the same model."
        )
    _owners.update({id(p): owner for p in names})
