"""Which models carry a state along the sequence, where transformers says so by class and where it does not."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_model
from transformers import (
    AutoModelForCausalLM,
    FalconMambaConfig,
    MambaConfig,
    MiniMaxConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    RwkvConfig,
    xLSTMConfig,
)
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from trl_budget.upstream import carries_state

STATEFUL: dict[str, Any] = {
    "mamba": lambda: MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4),
    "falcon_mamba": lambda: FalconMambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4),
    "rwkv": lambda: RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16),
    "xlstm": lambda: xLSTMConfig(vocab_size=32, hidden_size=64, num_hidden_layers=2, num_heads=2),
}
LAYERS = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(params=[False, True], ids=["as installed", "without _is_stateful"])
def _declared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.25 has dropped the attribute from every class."""
    if request.param:
        hide_declarations(monkeypatch)


def hide_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = [PreTrainedModel]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if "_is_stateful" in vars(cls):
            monkeypatch.delattr(cls, "_is_stateful")


@pytest.mark.usefixtures("_declared")
@pytest.mark.parametrize("family", STATEFUL)
def test_a_recurrent_model_carries_a_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(STATEFUL[family]())
    if not hasattr(PreTrainedModel, "_is_stateful"):
        hide_declarations(monkeypatch)  # classes are imported when first asked for
    assert carries_state(model)


class _Undeclared:
    """A model of transformers 5.25, which has no `_is_stateful`."""

    def __init__(self, config: Any) -> None:
        self.config = config


@pytest.mark.usefixtures("_declared")
def test_a_transformer_carries_none() -> None:
    assert not carries_state(tiny_model())


@pytest.mark.parametrize("config", [Qwen3NextConfig, MiniMaxConfig])
def test_layers_whose_cache_holds_a_state_tell(config: Any) -> None:
    made = config(**LAYERS)
    kinds = [type(layer) for layer in DynamicCache(config=made).layers]
    assert any(issubclass(kind, LinearAttentionLayer) for kind in kinds)
    assert carries_state(_Undeclared(made))
