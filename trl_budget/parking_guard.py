"""What a module does whose weights are parked: it refuses to run, to be loaded and to be saved, in all its parts."""

from __future__ import annotations

from collections.abc import Set

from torch import nn
from torch.utils.hooks import RemovableHandle

from trl_budget.errors import ParkedError


class _Refusal:
    """A hook that raises, but for parts that are lent. Holds nothing else, so that it keeps nothing alive."""

    def __init__(self, name: str, use: str, lent: Set[nn.Module]) -> None:
        self._name = name
        self._use = use
        self._lent = lent

    def __call__(self, part: nn.Module, *_: object) -> None:
        if part in self._lent:
            return
        raise ParkedError(
            f"The {self._name} was {self._use} while its weights are parked in host memory. Their device memory has "
            "been given back, so there are no values to work on. "
            f"Call `unpark()` first, or do it inside `with residency.present({self._name!r})`."
        )


def refuse_use(module: nn.Module, name: str, lent: Set[nn.Module]) -> list[RemovableHandle]:
    """Makes `module` and all parts of it that are not in `lent` refuse to run, to be loaded and to be saved."""
    handles: list[RemovableHandle] = []
    for part in module.modules():
        handles.append(part.register_forward_pre_hook(_Refusal(name, "run", lent), prepend=True))
        handles.append(part.register_state_dict_pre_hook(_Refusal(name, "saved", lent)))
        handles.append(part.register_load_state_dict_pre_hook(_Refusal(name, "loaded", lent)))
    return handles
