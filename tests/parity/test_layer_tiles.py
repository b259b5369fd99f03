"""Layers in tiles against torch's own checkpointing: forward, gradients, hooks, lifetimes."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from tiled_models import Gradients, checkpointing_model, gradients, lora_model, loss_of, relative_error, tiles
from torch import nn

from trl_budget.activation_store import DeviceStore
from trl_budget.attention import interceptor_in_use
from trl_budget.errors import SettingsError
from trl_budget.layer_tiles import TileSettings

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("Llama", "Qwen3", "Gemma", "Olmo2")
WHOLE = TileSettings()
# 57 packed tokens: a tile of one, tiles that divide and that do not, one tile for all, more than there are
SETTINGS = [
    *(TileSettings(tile_tokens, 2) for tile_tokens in (1, 8, 19, 56, 57, 1000)),
    *(TileSettings(13, groups) for groups in (None, 1, 4)),
    *(TileSettings(None, groups) for groups in (2, 4)),
]


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_give_the_gradients_of_torch_checkpointing(family: str, is_packed: bool) -> None:
    model = checkpointing_model(family)
    expected_log_probs, expected = gradients(model, None, is_packed=is_packed)
    assert len(expected) > 20
    for settings in SETTINGS:
        log_probs, got = gradients(model, settings, is_packed=is_packed)
        assert (log_probs - expected_log_probs).abs().max().item() < 1e-5, settings
        total = torch.cat([g.flatten() for g in got.values()])
        reference = torch.cat([g.flatten() for g in expected.values()])
        assert ((total - reference).norm() / reference.norm()).item() <= 1e-6, settings
        assert relative_error(got, expected) <= (1e-6 if settings.tile_tokens != 1 else 2e-6), settings


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Cohere", {}),  # one norm feeds attention and MLP: a parameter with a gradient from both parts
        ("Qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("Mistral with a window of 5", {}),
        ("Gemma3_text", {"sliding_window": 5}),  # its layers have positions and masks of two kinds
    ],
)
def test_tiles_give_the_gradients_of_other_kinds_of_layers(family: str, overrides: dict[str, object]) -> None:
    model = checkpointing_model(family, **overrides)
    for is_packed in (True, False):
        _, expected = gradients(model, None, is_packed=is_packed)
        _, got = gradients(model, TileSettings(8, 2), is_packed=is_packed)
        assert relative_error(got, expected) <= 1e-6


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_untiled_layer_equals_torch_checkpointing_to_a_bit(family: str, use_reentrant: bool) -> None:
    model = checkpointing_model(family, use_reentrant=use_reentrant)
    for is_packed in (True, False):
        expected_log_probs, expected = gradients(model, None, is_packed=is_packed)
        log_probs, got = gradients(model, WHOLE, is_packed=is_packed)
        assert torch.equal(log_probs, expected_log_probs)
        assert relative_error(got, expected) == 0.0


def test_a_row_no_longer_than_a_tile_equals_torch_checkpointing_to_a_bit() -> None:
    model = checkpointing_model()
    _, expected = gradients(model, None)
    _, got = gradients(model, TileSettings(57, 1))
    assert relative_error(got, expected) == 0.0


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_untiled_layer_with_adapters_equals_torch_checkpointing_to_a_bit(family: str, autocast: bool) -> None:
    model = lora_model(family, torch.bfloat16 if autocast else torch.float32)
    _, expected = gradients(model, None, autocast=autocast)
    _, got = gradients(model, WHOLE, autocast=autocast)
    assert relative_error(got, expected) == 0.0


def test_dropout_of_an_untiled_layer_is_that_of_torch_checkpointing() -> None:
    model = lora_model(lora_dropout=0.3)
    torch.manual_seed(5)
    _, expected = gradients(model, None)
    torch.manual_seed(5)
    _, got = gradients(model, WHOLE)
    assert relative_error(got, expected) == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_give_the_gradients_of_adapters(family: str) -> None:
    model = lora_model(family)
    for is_packed in (True, False):
        _, expected = gradients(model, None, is_packed=is_packed)
        for settings in (TileSettings(8, 2), TileSettings(57, 4)):
            _, got = gradients(model, settings, is_packed=is_packed)
            assert relative_error(got, expected) <= 2e-6


@pytest.mark.parametrize("target", [["q_proj"], ["down_proj"], ["k_proj", "o_proj"]])
def test_a_first_layer_whose_input_needs_no_gradient_trains_its_adapters(target: list[str]) -> None:
    model = lora_model(target_modules=target)
    model.get_input_embeddings()._forward_hooks.clear()  # PEFT makes the embedding's output require grad
    assert not model.get_input_embeddings()(torch.tensor([3])).requires_grad
    _, expected = gradients(model, None, through_embedding=False)
    assert len(expected) == 4 * len(target)
    for settings in (WHOLE, TileSettings(8, 2)):
        _, got = gradients(model, settings, through_embedding=False)
        assert relative_error(got, expected) <= 1e-6


def error_against_fp32(
    model: nn.Module, reference: Gradients, settings: TileSettings | None, *, autocast: bool, is_packed: bool = True
) -> float:
    _, got = gradients(model, settings, autocast=autocast, is_packed=is_packed)
    total = torch.cat([g.double().flatten() for g in got.values()])
    expected = torch.cat([reference[name].double().flatten() for name in got])
    return ((total - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("settings", [TileSettings(3, 4), TileSettings(20, 2), TileSettings(57, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_tiles_are_as_close_to_fp32_as_untiled_bf16(family: str, settings: TileSettings) -> None:
    model = checkpointing_model(family)
    rounded = checkpointing_model(family).to(torch.bfloat16)
    model.load_state_dict(rounded.state_dict())
    _, reference = gradients(model, None)
    untiled = error_against_fp32(rounded, reference, None, autocast=False)
    assert error_against_fp32(rounded, reference, settings, autocast=False) <= 1.5 * untiled


def test_bf16_gradients_of_many_tiles_are_not_summed_in_bf16() -> None:
    model = checkpointing_model(num_hidden_layers=1).to(torch.bfloat16)
    torch.manual_seed(2)
    hidden_states = torch.randn(1, 400, 64, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(400)[None]
    embeddings = model.model.rotary_emb(hidden_states, positions)

    def weight_gradients(settings: TileSettings | None) -> Gradients:
        with tiles(model, settings):
            output = model.model.layers[0](hidden_states, position_embeddings=embeddings, position_ids=positions)
        output.backward(torch.ones_like(output))
        found = {name: p.grad for name, p in model.model.layers[0].named_parameters() if "norm" not in name}
        model.zero_grad()
        return found

    # one rounding of either sum; 200 additions in bf16 are off by several percent
    assert relative_error(weight_gradients(TileSettings(2, 1)), weight_gradients(None)) < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_under_autocast_are_as_close_to_fp32_as_untiled_ones(family: str) -> None:
    model = lora_model(family, torch.bfloat16)
    wide = lora_model(family)
    wide.load_state_dict(model.state_dict())
    _, reference = gradients(wide, None)
    untiled = error_against_fp32(model, reference, None, autocast=True)
    assert 0 < untiled < 0.1
    assert error_against_fp32(model, reference, TileSettings(8, 2), autocast=True) <= 1.5 * untiled


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_weights_under_autocast_are_as_close_to_fp32_as_untiled_ones(family: str, is_packed: bool) -> None:
    model = checkpointing_model(family)
    _, reference = gradients(model, None, is_packed=is_packed)
    untiled = error_against_fp32(model, reference, None, autocast=True, is_packed=is_packed)
    assert 0 < untiled < 0.1
    tiled = error_against_fp32(model, reference, TileSettings(8, 2), autocast=True, is_packed=is_packed)
    assert 0 < tiled <= 1.5 * untiled


@pytest.mark.parametrize("settings", [WHOLE, TileSettings(8, 2)])
def test_fp32_weights_get_their_gradient_when_backward_runs_inside_autocast(settings: TileSettings) -> None:
    model = lora_model(dtype=torch.bfloat16)
    _, expected = gradients(model, settings, autocast=True)
    with torch.autocast("cpu", torch.bfloat16), tiles(model, settings):
        loss_of(model, is_packed=True)[0].backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected.pop("embedding output")
    assert relative_error(got, expected) < 0.02


@pytest.mark.parametrize("settings", [WHOLE, TileSettings(8, 2), TileSettings(8, None)])
def test_a_parameter_is_accumulated_once_per_backward(settings: TileSettings) -> None:
    model = checkpointing_model(tie_word_embeddings=True)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        counts[name] = 0

        def count(_: torch.Tensor, name: str = name) -> None:
            counts[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    for expected in (1, 2):
        gradients(model, settings)
        assert set(counts.values()) == {expected}


@pytest.mark.parametrize("settings", [WHOLE, TileSettings(8, 2)])
def test_a_hook_that_takes_the_gradient_away_sees_all_of_it(settings: TileSettings) -> None:
    model = checkpointing_model()
    _, expected = gradients(model, settings)
    taken: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():

        def take(p: torch.Tensor, name: str = name) -> None:
            taken[name], p.grad = p.grad, None

        parameter.register_post_accumulate_grad_hook(take)
    gradients(model, settings)
    expected.pop("embedding output")
    assert relative_error(taken, expected) == 0.0


@pytest.mark.parametrize("settings", [WHOLE, TileSettings(8, 2)])
def test_tied_embeddings_get_the_gradient_of_both_uses(settings: TileSettings) -> None:
    model = checkpointing_model(tie_word_embeddings=True)
    _, expected = gradients(model, None)
    _, got = gradients(model, settings)
    assert relative_error(got, expected) <= 2e-6


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)])
def test_frozen_layers_pass_gradients_on(frozen: tuple[int, ...]) -> None:
    model = checkpointing_model()
    for index in frozen:
        model.model.layers[index].requires_grad_(False)
    _, expected = gradients(model, None)
    for settings in (WHOLE, TileSettings(8, 2)):
        _, got = gradients(model, settings)
        assert relative_error(got, expected) <= 2e-6


@pytest.mark.parametrize("settings", [WHOLE, TileSettings(8, 2)])
def test_two_forwards_before_their_backwards_keep_apart(settings: TileSettings) -> None:
    model = checkpointing_model()
    for seed in (0, 1):
        loss_of(model, is_packed=True, seed=seed)[0].backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with tiles(model, settings):
        losses = [loss_of(model, is_packed=True, seed=seed)[0] for seed in (0, 1)]
    for loss in losses:
        loss.backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    assert relative_error(got, expected) <= 2e-6


def test_gradients_of_two_backwards_add_up_in_place() -> None:
    model = checkpointing_model()
    _, once = gradients(model, TileSettings(8, 2))
    once.pop("embedding output")
    for _ in range(2):
        with tiles(model, TileSettings(8, 2)):
            loss = loss_of(model, is_packed=True)[0]
        loss.backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    assert relative_error(got, {name: 2 * gradient for name, gradient in once.items()}) < 1e-7


@pytest.mark.parametrize("settings", [WHOLE, TileSettings(8, 2)])
def test_a_forward_without_grad_keeps_nothing(settings: TileSettings) -> None:
    class NoStore(DeviceStore):
        def keep(self, hidden_states: torch.Tensor) -> None:
            raise AssertionError("kept without grad")

    model = checkpointing_model()
    _, expected = loss_of(model, is_packed=True)
    with torch.no_grad(), tiles(model, settings, NoStore()):
        _, got = loss_of(model, is_packed=True)
    assert (got - expected).abs().max().item() < 1e-5


@pytest.mark.parametrize("settings", [WHOLE, TileSettings(8, 2)])
def test_backward_in_another_thread_needs_nothing_of_the_forwards_context(settings: TileSettings) -> None:
    model = checkpointing_model()
    _, expected = gradients(model, settings)
    expected.pop("embedding output")
    with tiles(model, settings):
        loss, _ = loss_of(model, is_packed=True)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert relative_error({name: p.grad for name, p in model.named_parameters()}, expected) == 0.0


@pytest.mark.parametrize("settings", [WHOLE, TileSettings(8, 2)])
def test_ddp_reduces_every_adapter_once_per_backward(settings: TileSettings) -> None:
    model = lora_model()
    _, expected = gradients(model, None, through_embedding=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        reduced: list[int] = []

        def halve(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and knows no strings
            reduced.append(bucket.buffer().numel())
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() / 2)
            return future

        wrapped.register_comm_hook(None, halve)
        for _ in range(2):
            model.zero_grad()
            with tiles(wrapped, settings):
                loss, _ = loss_of(wrapped, is_packed=True)
            loss.backward()
    finally:
        dist.destroy_process_group()
    assert sum(reduced) == 2 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    got = {name: 2 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(got, expected) <= 1e-6


def test_a_mask_per_head_is_cut_with_the_heads() -> None:
    model = checkpointing_model(num_hidden_layers=1)
    layer = model.model.layers[0]
    torch.manual_seed(3)
    hidden_states, bias = torch.randn(2, 10, 64), torch.randn(1, 8, 10, 10)
    positions = torch.arange(10)[None]
    keywords = {"position_embeddings": model.model.rotary_emb(hidden_states, positions), "attention_mask": bias}

    def run(settings: TileSettings | None) -> tuple[torch.Tensor, Gradients]:
        with tiles(model, settings):
            output = layer(hidden_states, **keywords)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        found = {name: p.grad for name, p in layer.named_parameters()}
        model.zero_grad()
        return output.detach(), found

    expected_output, expected = run(None)
    output, got = run(TileSettings(3, 4))
    assert (output - expected_output).abs().max().item() < 1e-5
    assert relative_error(got, expected) <= 1e-6


def test_attention_is_the_models_own_after_a_layer_fails() -> None:
    model = checkpointing_model()

    def fail(*_: object) -> None:
        raise ValueError("in the MLP")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(ValueError, match="in the MLP"), tiles(model, TileSettings(8, 2)):
        loss_of(model, is_packed=True)
    handle.remove()
    assert interceptor_in_use() is None
    _, expected = gradients(model, None)
    with tiles(model, TileSettings(8, 2)):
        loss, _ = loss_of(model, is_packed=True)
    handle = model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(ValueError, match="in the MLP"):
        loss.backward()
    handle.remove()
    assert interceptor_in_use() is None
    model.zero_grad()
    assert relative_error(gradients(model, None)[1], expected) == 0.0


def test_head_groups_that_do_not_divide_the_heads_are_refused() -> None:
    model = checkpointing_model()
    with pytest.raises(SettingsError, match="attention_head_groups=3"), tiles(model, TileSettings(8, 3)):
        loss_of(model, is_packed=True)
