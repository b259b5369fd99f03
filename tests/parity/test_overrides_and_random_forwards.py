"""What a config does not tell: forwards that are random in training mode, and subclasses with a loss of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from peft import BOFTConfig, LoHaConfig, LoKrConfig
from test_reuse import OursVllm, Separate, build
from test_token_budget import OursRecording, StockRecording, relative, train

SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32, "attention_dropout": 0.0, **SIZES}
ADAPTER = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_weights": False}


def opt(**dropout: float) -> Any:
    return transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, **dropout))


def bloom() -> Any:
    sizes = {"vocab_size": 258, "hidden_size": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_dropout=0.2, **sizes))


RANDOM = {
    "OPT dropout": (lambda: opt(dropout=0.1), None),
    "OPT layerdrop": (lambda: opt(dropout=0.0, layerdrop=0.5), None),
    "Bloom hidden_dropout": (bloom, None),
    "LoHa rank_dropout": (lambda: None, LoHaConfig(rank_dropout=0.5, **ADAPTER)),
    "LoKr module_dropout": (lambda: None, LoKrConfig(module_dropout=0.5, **ADAPTER)),
    "BOFT boft_dropout": (
        lambda: None,
        BOFTConfig(boft_block_size=4, target_modules=["q_proj"], boft_dropout=0.5, init_weights=False),
    ),
}


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension", "ignore:Setting boft_n_butterfly_factor")
@pytest.mark.parametrize("kind", RANDOM)
def test_no_random_forward_is_reused(tmp_path: Path, kind: str) -> None:
    model, adapter = RANDOM[kind]
    kwargs = {"peft_config": adapter} if adapter else None
    watch = Separate(build(OursVllm, tmp_path, model(), kwargs, max_steps=1))
    watch.trainer.train()
    assert not watch.is_skipped[0] or max(watch.differences[0]) == 0.0


class Doubled:
    """A loss that is twice TRL's."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 2


class KeepsUpperHalf:
    """An off-policy mask that compares the rows of a micro-batch."""

    @staticmethod
    def get_off_policy_mask(
        advantages: Any, per_token_logps: Any, sampling_per_token_logps: Any, mask: Any, off_policy_threshold: Any
    ) -> Any:
        mean = (per_token_logps.detach() * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return (mean >= mean.mean()).to(mask.dtype)


@pytest.mark.parametrize("mixin", [Doubled, KeepsUpperHalf])
def test_a_subclass_with_its_own_loss_gets_stocks_gradient(tmp_path: Path, mixin: type) -> None:
    settings = {"off_policy_mask_threshold": 0.5}
    budget = {"padding_free": "on", "max_tokens_per_microbatch": 50}
    stock = train(type("Stock", (mixin, StockRecording), {}), tmp_path, **settings)
    ours = train(type("Ours", (mixin, OursRecording), {}), tmp_path, **settings, **budget)
    assert relative(ours.gradients[0], stock.gradients[0]) <= 1e-6
