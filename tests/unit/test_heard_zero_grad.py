"""`module.zero_grad()` is heard, and the module stays a plain module: to copy, to pickle, to save and to free."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from torch import nn

from trl_budget.errors import SettingsError
from trl_budget.heard_zero_grad import hear_zero_grad


class Ear:
    def __init__(self) -> None:
        self.heard: list[bool] = []

    def listen(self, set_to_none: bool) -> None:
        self.heard.append(set_to_none)


def with_gradient() -> nn.Linear:
    module = nn.Linear(2, 2)
    module.weight.grad = torch.ones(2, 2)
    return module


@pytest.mark.parametrize("set_to_none", [True, False])
def test_it_zeroes_as_torch_and_tells(set_to_none: bool) -> None:
    module, ear = with_gradient(), Ear()
    hear_zero_grad(module, ear.listen)
    module.zero_grad(set_to_none=set_to_none)
    assert ear.heard == [set_to_none]
    assert (module.weight.grad is None) == set_to_none
    assert set_to_none or module.weight.grad.eq(0).all()
    assert module.bias.grad is None


def test_a_class_with_a_method_of_its_own_keeps_it() -> None:
    class Counting(nn.Linear):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1
            super().zero_grad(set_to_none)

    module, ear = Counting(2, 2), Ear()
    hear_zero_grad(module, ear.listen)
    module.zero_grad()
    assert (module.calls, ear.heard) == (1, [True])


def test_what_somebody_had_assigned_is_called_and_comes_back() -> None:
    module, ear, calls = nn.Linear(2, 2), Ear(), []
    module.zero_grad = calls.append
    hear_zero_grad(module, ear.listen)
    module.zero_grad()
    assert (calls, ear.heard) == ([True], [True])
    del ear
    gc.collect()
    assert module.zero_grad == calls.append


def test_the_attribute_goes_with_the_last_listener() -> None:
    module, first, second = nn.Linear(2, 2), Ear(), Ear()
    hear_zero_grad(module, first.listen)
    hear_zero_grad(module, second.listen)
    module.zero_grad()
    assert first.heard == second.heard == [True]
    del first
    gc.collect()
    module.zero_grad()
    assert second.heard == [True, True]
    del second
    gc.collect()
    assert "zero_grad" not in vars(module)


def test_neither_module_nor_listener_is_kept_alive() -> None:
    module, ear = nn.Linear(2, 2), Ear()
    hear_zero_grad(module, ear.listen)
    copied = copy.deepcopy(module)
    references = [weakref.ref(module), weakref.ref(ear), weakref.ref(copied)]
    gc.disable()
    try:
        del module, ear, copied
        assert [reference() for reference in references] == [None, None, None]
    finally:
        gc.enable()


def unpickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def through_torch(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = (copy.deepcopy, unpickled, through_torch, lambda module: copy.deepcopy(copy.deepcopy(module)))


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle", "torch.save", "copy of a copy"])
def test_a_copy_zeroes_itself_and_tells_nobody(make_copy: object) -> None:
    outer, ear = nn.Sequential(with_gradient()), Ear()
    hear_zero_grad(outer, ear.listen)
    copied = make_copy(outer)
    copied[0].weight.grad = torch.ones(2, 2)
    copied.zero_grad()
    assert copied[0].weight.grad is None
    assert outer[0].weight.grad is not None
    assert ear.heard == []
    other = Ear()
    hear_zero_grad(copied, other.listen)
    copied.zero_grad()
    assert (ear.heard, other.heard) == ([], [True])


def test_a_pickled_module_is_read_without_this_library(tmp_path: Path) -> None:
    module, ear = with_gradient(), Ear()
    hear_zero_grad(module, ear.listen)
    torch.save(module, tmp_path / "module.pt")
    script = (
        "import sys, torch; sys.modules['trl_budget'] = None; "
        f"torch.load({str(tmp_path / 'module.pt')!r}, weights_only=False).zero_grad()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_model_is_saved_as_ever(tmp_path: Path) -> None:
    model, ear = tiny_model(), Ear()
    hear_zero_grad(model, ear.listen)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_shallow_copy_of_a_module_that_is_gone_says_what_to_do() -> None:
    module, ear = with_gradient(), Ear()
    hear_zero_grad(module, ear.listen)
    shallow = copy.copy(module)
    del module
    gc.collect()
    for call in (shallow.zero_grad, lambda: copy.deepcopy(shallow), lambda: pickle.dumps(shallow)):
        with pytest.raises(SettingsError, match=r"del vars\(copy\)\['zero_grad'\]"):
            call()
    del vars(shallow)["zero_grad"]
    shallow.zero_grad()
