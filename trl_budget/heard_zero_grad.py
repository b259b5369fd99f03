"""`model.zero_grad()` is heard by those who keep its gradients elsewhere.

torch offers no hook for it and transformers calls it after every step. No class is patched: the one module gets an
attribute `zero_grad` of its own, a callable that runs the class's method and then tells the listeners. Both ends are
held weakly. A copy of the module, deep or pickled, has a `zero_grad` that is its own and tells nobody. Parts of the
module (`model.lm_head.zero_grad()`) and `parameter.grad = None` are not heard.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from trl_budget.errors import SettingsError

ATTRIBUTE = "zero_grad"


class HeardZeroGrad:
    """Stands where `module.zero_grad` is looked up.

    Args:
        module: what is zeroed; held weakly.
        own: what somebody else had assigned to the attribute; the class's method where None.
    """

    def __init__(self, module: nn.Module, own: Callable[[bool], None] | None = None) -> None:
        self._module = weakref.ref(module)
        self.own = own
        self.listeners: list[weakref.WeakMethod[Any]] = []

    def __call__(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`, then tells the listeners."""
        module = self._owner()
        zero = self.own or _method(module)
        zero(set_to_none)
        for listener in self.listeners:
            if (heard := listener()) is not None:
                heard(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeardZeroGrad:
        """For the copy of the module, which is being made."""
        module = self._owner()
        return HeardZeroGrad(copy.deepcopy(module, memo), copy.deepcopy(self.own, memo))

    def __reduce__(self) -> Any:
        """Pickled as the module's plain method, which needs nothing of this library to be read."""
        return _method(self._owner()).__reduce__()

    def _owner(self) -> nn.Module:
        """The module; what a shallow copy of it took along finds none once the module is gone."""
        if (module := self._module()) is not None:
            return module
        raise SettingsError(
            "zero_grad() was called on a shallow copy of a policy that is gone. The copy holds what the trainer had "
            f"given to the original, which would clear nothing. Delete it (`del vars(copy)['{ATTRIBUTE}']`), or make "
            "the copy with copy.deepcopy()."
        )


def hear_zero_grad(module: nn.Module, listener: Callable[[bool], None]) -> None:
    """Calls `listener(set_to_none)` after every `module.zero_grad()`, until the listener's object is gone.

    Args:
        module: gets the attribute; the last listener takes it along.
        listener: a bound method, held weakly.
    """
    standing = vars(module).get(ATTRIBUTE)
    if not isinstance(standing, HeardZeroGrad):
        standing = HeardZeroGrad(module, None if standing == _method(module) else standing)
        vars(module)[ATTRIBUTE] = standing
    standing.listeners.append(weakref.WeakMethod(listener))
    owner = standing.listeners[-1]()
    assert owner is not None
    weakref.finalize(owner.__self__, _forget_gone, weakref.ref(module)).atexit = False


def _forget_gone(reference: weakref.ref[nn.Module]) -> None:
    module = reference()
    standing = vars(module).get(ATTRIBUTE) if module is not None else None
    if module is None or not isinstance(standing, HeardZeroGrad):
        return
    standing.listeners = [listener for listener in standing.listeners if listener() is not None]
    if standing.listeners:
        return
    del vars(module)[ATTRIBUTE]
    if standing.own is not None:
        vars(module)[ATTRIBUTE] = standing.own


def _method(module: nn.Module) -> types.MethodType:
    return types.MethodType(type(module).zero_grad, module)
