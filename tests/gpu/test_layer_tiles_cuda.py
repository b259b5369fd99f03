"""Layers in tiles on a GPU: varlen attention over groups of heads in bf16, and what a long row costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from trl_budget.activation_store import DeviceStore
from trl_budget.attention import packed_rows
from trl_budget.layer_checkpoint import tiled_layers, tiled_layers_without_gradient
from trl_budget.layer_tiles import TileSettings
from trl_budget.upstream_attention import enable_packed_attention

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from tiled_models import PEAKS_WITHOUT_GRADIENT, relative_error, tiles

pytestmark = pytest.mark.gpu
ROWS = (700, 1, 513, 2000)


def layers(dtype: torch.dtype, family: str = "qwen3", **overrides: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 100,
        "max_position_embeddings": 2**17,
    }
    config = AutoConfig.for_model(family, **{**sizes, **overrides})
    set_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    enable_packed_attention([model])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def packed_keywords(rows: tuple[int, ...]) -> dict[str, Any]:
    bounds = torch.tensor([0, *rows], device="cuda").cumsum(0).to(torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(rows), "max_length_k": max(rows)}
    return {"position_ids": torch.cat([torch.arange(n, device="cuda") for n in rows])[None], **lengths}


def gradients(model: Any, settings: TileSettings | None) -> dict[str, torch.Tensor]:
    dtype = next(model.parameters()).dtype
    torch.manual_seed(1)
    embeddings = torch.randn(1, sum(ROWS), 256, device="cuda").to(dtype).requires_grad_()
    with tiles(model, settings):
        output = model.model(inputs_embeds=embeddings, **packed_keywords(ROWS)).last_hidden_state
    weights = torch.randn(output.shape, device="cuda").to(dtype)
    (output * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {**found, "embedding output": embeddings.grad}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "olmo2"])
def test_bf16_tiles_are_as_close_to_fp32_as_untiled_bf16(family: str) -> None:
    model = layers(torch.bfloat16, family)
    wide = layers(torch.float32, family)
    wide.load_state_dict(model.state_dict())
    reference = gradients(wide, None)

    def error(settings: TileSettings | None) -> float:
        got = gradients(model, settings)
        assert got.keys() == reference.keys()
        difference = sum((got[name].float() - reference[name]).square().sum() for name in got)
        return (difference / sum(g.square().sum() for g in reference.values())).sqrt().item()

    untiled = error(None)
    for settings in (TileSettings(), TileSettings(1000, 2), TileSettings(257, 4), TileSettings(None, 4)):
        assert error(settings) <= 1.5 * untiled, settings


def test_fp32_tiles_give_the_gradients_of_torch_checkpointing() -> None:
    model = layers(torch.float32)
    expected = gradients(model, None)
    got = gradients(model, TileSettings(257, 2))
    difference = torch.stack([(got[name].double() - expected[name].double()).norm() for name in expected]).norm()
    assert difference / torch.stack([gradient.double().norm() for gradient in expected.values()]).norm() <= 1e-6
    assert relative_error(got, expected) <= 1e-5  # of a single tensor, whose sums may cancel


def test_a_long_row_costs_what_the_formula_says() -> None:
    hidden, query, key, groups = 2560, 32 * 128, 8 * 128, 8
    shape = {"hidden_size": hidden, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = layers(torch.bfloat16, num_hidden_layers=1, head_dim=128, **shape)

    def peak(num_tokens: int) -> int:
        hidden_states = torch.randn(1, num_tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        keywords = packed_keywords((num_tokens,))
        keywords["position_embeddings"] = model.model.rotary_emb(hidden_states, keywords["position_ids"])
        with tiled_layers(model, TileSettings(4096, groups), DeviceStore()):
            output = model.model.layers[0](hidden_states, **keywords)
        gradient = torch.randn_like(output)
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output.backward(gradient)
        model.zero_grad()
        return torch.cuda.max_memory_allocated() - start

    peak(8192)
    slope = (peak(98304) - peak(32768)) / 65536
    # input gradient, heads, attention output and its gradient, one group's gradients: bf16. The kernel's own fp32
    # accumulators of one group come on top.
    formula = 2 * (hidden + (query + 2 * key) * (1 + 1 / groups) + 2 * query)
    assert slope <= formula + 4 * (query + 2 * query) / groups


def test_a_long_row_without_gradient_costs_what_tensors_without_memory_said() -> None:
    """Counted in `tests/parity/test_tiled_scoring.py`, where the slope of longer rows is derived."""
    shape = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = layers(torch.bfloat16, num_hidden_layers=2, head_dim=128, **shape).eval()

    @torch.no_grad()
    def peak(num_tokens: int) -> int:
        ids, keywords = torch.ones(1, num_tokens, dtype=torch.int64, device="cuda"), packed_keywords((num_tokens,))
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with packed_rows(), tiled_layers_without_gradient(model, TileSettings(4096, 8)):
            model.model(input_ids=ids, use_cache=False, **keywords)
        return torch.cuda.max_memory_allocated() - start

    peak(8192)
    for num_tokens, counted in PEAKS_WITHOUT_GRADIENT.items():
        assert peak(num_tokens) == pytest.approx(counted, abs=2**20)
