"""Models, rows and gradients for layers in tiles, and torch's own checkpointing as the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from packed_models import COMPLETIONS, FAMILIES, SIZES, labels_of, rows
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from trl.trainer.utils import add_fused_lm_head

from trl_budget.activation_store import ActivationStore, DeviceStore
from trl_budget.layer_checkpoint import tiled_layers
from trl_budget.layer_tiles import TileSettings
from trl_budget.micro_batch import RowsModel
from trl_budget.upstream_attention import enable_packed_attention

C = max(COMPLETIONS)
Gradients = dict[str, Tensor]
# Tokens, and bytes at the peak of two layers of Qwen3-4B's shape that score in tiles: on tensors without memory, and
# on an H200.
PEAKS_WITHOUT_GRADIENT = {32_768: 1_124_073_472, 98_304: 3_082_813_456}


def checkpointing_model(
    family: str = "Qwen3", *, use_reentrant: bool = False, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Any:
    """A random model in training mode with TRL's fused head and torch's checkpointing."""
    sizes = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, **overrides}
    config = AutoConfig.for_model(family.split()[0].lower(), **{**sizes, **FAMILIES.get(family, {})})
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    for name, parameter in model.named_parameters():  # norms of one scale differ from norms of none
        if "norm" in name:
            nn.init.normal_(parameter, 0.5, 0.3)
    return prepared(model, use_reentrant)


def prepared(model: Any, use_reentrant: bool = False) -> Any:
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    enable_packed_attention([model])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model.train()


def lora_model(family: str = "Qwen3", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Adapters in fp32 whose second factor is not zero, over a base in `dtype`."""
    model = checkpointing_model(family).to(dtype)
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
            nn.init.normal_(parameter, 0.0, 0.1)
    return adapted.train()


def tiles(model: Any, settings: TileSettings | None, store: ActivationStore | None = None) -> Any:
    """The context of a forward: torch's checkpointing when `settings` is None."""
    return contextlib.nullcontext() if settings is None else tiled_layers(model, settings, store or DeviceStore())


def loss_of(model: Any, *, is_packed: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A scalar that weighs every completion token differently, and the log-probs."""
    ids, mask = rows(seed=seed)
    outputs = RowsModel(model, C, is_packed=is_packed)(
        input_ids=ids, attention_mask=mask, labels=labels_of(ids, mask, C), fused_lm_head=True
    )
    log_probs = outputs.log_probs[:, -C:]
    weights = torch.linspace(-1.0, 2.0, log_probs.numel()).view_as(log_probs)
    return (log_probs * weights + 0.1 * outputs.entropy[:, -C:]).sum(), log_probs.detach()


@contextlib.contextmanager
def embedding_outputs(model: Any) -> Iterator[list[Tensor]]:
    """Outputs of the embedding, made to require grad as `enable_input_require_grads` does."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        output.retain_grad()
        seen.append(output)
        return output

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def gradients(
    model: Any,
    settings: TileSettings | None,
    *,
    is_packed: bool = True,
    autocast: bool = False,
    through_embedding: bool = True,
) -> tuple[Tensor, Gradients]:
    """Log-probs, and gradients of every trained parameter and of the embedding's output; the model is left without."""
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(embedding_outputs(model)) if through_embedding else []
        with tiles(model, settings), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, log_probs = loss_of(model, is_packed=is_packed)
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    model.zero_grad()
    for output in seen:
        found["embedding output"] = output.grad
    return log_probs, found


def relative_error(got: Gradients, expected: Gradients) -> float:
    """Norm of the difference over the norm: the worst of every tensor that is not zero in the reference."""
    assert got.keys() == expected.keys()
    errors = []
    for name, reference in expected.items():
        assert got[name].dtype == reference.dtype
        norm = reference.double().norm().item()
        difference = (got[name].double() - reference.double()).norm().item()
        errors.append(difference / norm if norm else difference)
    return max(errors)
