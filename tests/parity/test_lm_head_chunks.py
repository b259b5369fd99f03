"""`lm_head_chunk_size`: TRL's fused head takes so many vocabulary entries at a time, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils as trl_utils
from tiny import comparable_log, make_trainer
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer
from trl_budget.errors import SettingsError

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 258  # of the tiny model: three chunks of 100


class RecordedHead:
    """TRL's kernel, with the chunk sizes that it was given."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.sizes: list[int] = []

    def apply(self, *arguments: Any) -> Any:
        self.sizes.append(arguments[5])
        return self.kernel.apply(*arguments)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> RecordedHead:
    recorded = RecordedHead(trl_utils._ChunkedLogProbFunction)
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", recorded)
    return recorded


def build(tmp_path: Path, **settings: Any) -> Any:
    return make_trainer(BudgetGRPOTrainer, tmp_path, config_class=BudgetGRPOConfig, max_steps=2, **settings)


def log_probs_and_gradients(trainer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.arange(2, 26).view(2, 12)
    log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, torch.ones_like(ids), 8, compute_entropy=True
    )
    weights = torch.linspace(-1.0, 1.0, log_probs.numel()).view_as(log_probs)
    (weights * (log_probs + 0.3 * entropies)).sum().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
    return log_probs.detach(), entropies.detach(), gradients


def test_log_probs_entropies_and_gradients_are_those_of_one_chunk(tmp_path: Path, head: RecordedHead) -> None:
    whole = log_probs_and_gradients(build(tmp_path / "whole"))
    cut = log_probs_and_gradients(build(tmp_path / "cut", lm_head_chunk_size=100))
    assert head.sizes[-1] == 100 and head.sizes[0] == 32_768
    for ours, reference in zip(cut, whole, strict=True):
        assert (ours - reference).norm() / reference.norm() <= 1e-6


@pytest.mark.parametrize(
    "layout", [{}, {"padding_free": "on", "max_tokens_per_microbatch": 40}], ids=["stock", "packed"]
)
def test_every_pass_of_training_takes_the_chunks_and_trains_as_stock(
    tmp_path: Path, head: RecordedHead, layout: dict[str, Any]
) -> None:
    trainer = build(tmp_path / "ours", lm_head_chunk_size=100, **layout)
    head.sizes.clear()  # trial forwards
    trainer.train()
    assert set(head.sizes) == {100} and len(head.sizes) >= 2
    stock = make_trainer(GRPOTrainer, tmp_path / "stock", max_steps=2)
    stock.train()
    assert set(head.sizes) == {100, 32_768}
    for ours, reference in zip(comparable_log(trainer), comparable_log(stock), strict=True):
        assert ours == pytest.approx(reference, rel=1e-4, abs=1e-6)


def test_trl_has_its_own_size_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(tmp_path, lm_head_chunk_size=100)

    def fail(*_: Any, **__: Any) -> None:
        assert trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE == 100
        raise KeyError("no forward")

    monkeypatch.setattr(trainer.model, "forward", fail)
    ids = torch.ones(1, 8, dtype=torch.long)
    with pytest.raises(KeyError, match="no forward"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 4)
    assert trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE == 32_768


def test_the_tile_is_at_most_4096_tokens_times_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that the field's documentation gives."""
    made: list[tuple[torch.Size, torch.dtype]] = []
    empty = torch.empty

    def recorded(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        made.append((tensor.shape, tensor.dtype))
        return tensor

    hidden = torch.zeros(5000, 4, dtype=torch.bfloat16, requires_grad=True)
    weight, targets = torch.zeros(64, 4, dtype=torch.bfloat16), torch.zeros(5000, dtype=torch.long)
    monkeypatch.setattr(torch, "empty", recorded)
    trl_utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16)[0].sum().backward()
    assert made == [(torch.Size([4096, 16]), torch.bfloat16)] * 2  # forward and backward


@pytest.mark.parametrize("value", [0, -1, "auto", True, 1.5])
def test_a_chunk_that_holds_nothing_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SettingsError, match="lm_head_chunk_size"):
        BudgetGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, lm_head_chunk_size=value)
