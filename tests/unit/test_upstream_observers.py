"""Whose hooks and callbacks are the user's."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_model
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from trl_budget.upstream_attention import asks_for_attention
from trl_budget.upstream_observers import gradient_hooks, micro_batch_callbacks, user_hooks


def mine(*_: Any, **__: Any) -> None:
    pass


class Callable_:
    def __call__(self, *_: Any) -> None:
        pass

    def method(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (mine, "mine"),
        (functools.partial(mine, 1), "mine"),
        (Callable_(), "Callable_"),
        (Callable_().method, "Callable_.method"),
    ],
)
@pytest.mark.parametrize(
    "kind",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_a_hook_of_the_user_is_found_by_name(hook: Any, name: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    getattr(model[0], kind)(hook)
    assert user_hooks(model) == (f"a hook of yours ({name})",)


def test_hooks_of_the_libraries_below_are_not_the_users() -> None:
    model = tiny_model()
    model.enable_input_require_grads()
    assert model.get_input_embeddings()._forward_hooks
    assert user_hooks(model) == ()


class Looks(TrainerCallback):
    def on_substep_end(self, *_: Any, **__: Any) -> None:
        pass


class DoesNot(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        pass


def test_a_hook_on_every_module_and_one_on_a_gradient_are_found() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    handle = nn.modules.module.register_module_forward_hook(mine)
    assert user_hooks(model) == ("a hook of yours (mine)",)
    handle.remove()
    assert user_hooks(model) == gradient_hooks(model) == ()
    model[0].weight.register_hook(mine)
    assert gradient_hooks(model) == ("a gradient hook of yours (mine)",)
    model[0].bias.register_post_accumulate_grad_hook(Callable_())
    assert gradient_hooks(model) == ("a gradient hook of yours (mine)", "a gradient hook of yours (Callable_)")


def test_the_recipe_that_scripts_copy_is_known() -> None:
    def make_inputs_require_grad(module: Any, inputs: Any, output: Any) -> None:
        output.requires_grad_(True)

    model = tiny_model()
    model.get_input_embeddings().register_forward_hook(make_inputs_require_grad)
    assert user_hooks(model) == ()


def test_callbacks_between_micro_batches_are_found() -> None:
    given = DoesNot()
    given.on_substep_end = mine  # type: ignore[method-assign]
    handler = CallbackHandler([DefaultFlowCallback(), DoesNot(), Looks(), Looks(), given], None, None, None, None)
    assert micro_batch_callbacks(SimpleNamespace(callback_handler=handler)) == (
        "Looks.on_substep_end",
        "DoesNot.on_substep_end",
    )


def test_code_that_asks_for_the_name_of_its_attention_is_found() -> None:
    import transformers

    assert not asks_for_attention(tiny_model())
    sizes = {
        "vocab_size": 9,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
    }
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, attn_implementation="sdpa"))
    assert asks_for_attention(falcon)
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, attn_implementation="eager"))
    assert not asks_for_attention(falcon)
