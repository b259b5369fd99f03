"""Rows trimmed, packed and padded as stock TRL pads them, for every causal language model of transformers, tiny.

Says what the library decides for each (bf16 on CUDA, tried on the CPU in fp32) beside what its rows do: five rows that
are shorter than every length of the config when alone, behind columns of padding that lead past all of them.

    python benchmarks/family_sweep.py                      # all, to standard output
    python benchmarks/family_sweep.py Beam "Phi3, longrope" --padding 4000
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))

import torch
import torch.nn.functional as F
from family_models import UNSCORED, Family, families, tiny_model
from packed_models import rows, score, score_row_by_row
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import GRPOTrainer

from trl_budget.micro_batch import RowsModel
from trl_budget.pass_choices import PassChoices
from trl_budget.placement import ResolvedSetting
from trl_budget.row_layout import PACKED, STOCK
from trl_budget.upstream_attention import enable_packed_attention, packs_rows, restore_attention

PROMPTS, COMPLETIONS = (5, 1, 9, 3, 7), (11, 4, 6, 1, 16)
COLUMNS = max(COMPLETIONS)
PADDING = 40


class LayoutChoice(PassChoices):
    """What the library decides for a model as if it trained in bf16 on CUDA; its trials run where the model is."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._base = GRPOTrainer
        self._trainer = GRPOTrainer.__new__(GRPOTrainer)
        args = {
            "bf16": True,
            "optim": "adamw_torch_fused",
            "n_gpu": 1,
            "world_size": 1,
            "torch_compile": False,
            "fsdp": "",
            "deepspeed": None,
        }
        lengths = {"vllm_max_model_length": None, "max_completion_length": None}
        vars(self._trainer).update(
            model=model,
            ref_model=None,
            args=SimpleNamespace(device=torch.device("cuda"), neftune_noise_alpha=None, **args, **lengths),
            accelerator=SimpleNamespace(autocast=contextlib.nullcontext),
            callback_handler=SimpleNamespace(callbacks=[]),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            _is_vlm=False,
        )

    @classmethod
    def of(cls, model: PreTrainedModel) -> ResolvedSetting:
        """The row of the settings' table, after the library's own trials; the model has its own attention again."""
        try:
            return cls(model)._try_layouts()
        finally:
            restore_attention([model])


@dataclass(frozen=True)
class Comparison:
    """What a family's rows do, as the largest difference of a log-prob relative to 1 + its size; None if not run.

    Attributes:
        family: its name.
        trimmed: rows without padding beside the padded rows of stock.
        packed: packed rows beside the padded rows of stock.
        packed_alone: packed rows beside each row alone.
        moved: how far packed rows move when another row changes.
        gradient: norm of the difference of the gradients, relative, as decided beside stock.
        layout: what the library decides.
        reason: why.
    """

    family: str
    trimmed: float
    packed: float | None
    packed_alone: float | None
    moved: float | None
    gradient: float | None
    layout: str
    reason: str

    def line(self) -> str:
        """A row of the table."""
        numbers = (self.trimmed, self.packed, self.packed_alone, self.moved, self.gradient)
        shown = (f"{number:9.1e}" if number is not None else f"{'-':>9}" for number in numbers)
        return f"{self.family:27}{''.join(shown)}  {self.layout:8} {self.reason}"


HEADER = f"{'family':27}{'trimmed':>9}{'packed':>9}{'alone':>9}{'moved':>9}{'gradient':>9}  {'decision':8} reason"


def padded_rows(padding: int) -> tuple[Tensor, Tensor]:
    """Ids and mask `[5, padding + 25]`, int64: rows of 2 to 23 tokens behind `padding` columns more than needed."""
    ids, mask = rows(PROMPTS, COMPLETIONS)
    return F.pad(ids, (padding, 0)), F.pad(mask, (padding, 0))


def compare(family: Family, padding: int = PADDING) -> Comparison:
    """Scores and differentiates a family's rows in each layout.

    Args:
        family: one of `family_models.families()`, built anew.
        padding: columns to the left that no row uses.
    """
    model = tiny_model(family)
    choice = LayoutChoice.of(copy.deepcopy(model).to(torch.bfloat16))
    ids, mask = padded_rows(padding)
    is_real = mask[:, -COLUMNS:].bool()

    def difference(got: Tensor, expected: Tensor) -> float:
        return ((got - expected).abs() / (1 + expected.abs()))[is_real].max().item()

    with torch.no_grad():
        stock = score(model, ids, mask, COLUMNS)[0]
        alone = score_row_by_row(model, ids, mask, COLUMNS)
        trimmed = score(RowsModel(model, COLUMNS, is_packed=False), ids, mask, COLUMNS)[0]
    packed, packed_alone, moved = None, None, None
    with packing(model) as can_pack:
        if can_pack or choice.value == PACKED:
            rows_model = RowsModel(model, COLUMNS, is_packed=True)
            together = try_score(rows_model, ids, mask, is_needed=choice.value == PACKED)
            if together is not None:
                packed, packed_alone = difference(together, stock), difference(together, alone)
                moved = moved_by_another_row(rows_model, ids, mask, together)
    return Comparison(
        family=family.name,
        trimmed=difference(trimmed, stock),
        packed=packed,
        packed_alone=packed_alone,
        moved=moved,
        gradient=None if choice.value == STOCK else gradient_difference(model, choice.value, ids, mask),
        layout=choice.value,
        reason=choice.reason,
    )


@contextlib.contextmanager
def packing(model: PreTrainedModel) -> Iterator[bool]:
    """The model's attention takes packed rows meanwhile, if it can; yields whether."""
    enable_packed_attention([model])
    try:
        yield packs_rows(model)
    finally:
        restore_attention([model])


@torch.no_grad()
def try_score(model: RowsModel, ids: Tensor, mask: Tensor, *, is_needed: bool) -> Tensor | None:
    """Log-probs `[5, 16]`, or None where a model that is not packed anyway fails on packed rows."""
    try:
        return score(model, ids, mask, COLUMNS)[0]
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        if is_needed:
            raise
        return None


@torch.no_grad()
def moved_by_another_row(model: RowsModel, ids: Tensor, mask: Tensor, before: Tensor) -> float:
    """How far the rows after the first, and before the last, move when that one has other tokens; 0.0 for no bit."""
    moved = 0.0
    for changed in (0, len(ids) - 1):
        other = ids.clone()
        other[changed] = torch.where(mask[changed] == 1, 96 - other[changed].clamp(max=94), other[changed])
        after = score(model, other, mask, COLUMNS)[0]
        kept = [row for row in range(len(ids)) if row != changed]
        moved = max(moved, (after[kept] - before[kept]).abs().max().item())
    return moved


def gradient_difference(model: PreTrainedModel, layout: str, ids: Tensor, mask: Tensor) -> float:
    """Gradients of a weighted sum of the log-probs, as `layout` has the rows beside stock's padded ones."""
    weights = torch.randn(len(ids), COLUMNS, generator=torch.Generator().manual_seed(1))
    weights *= mask[:, -COLUMNS:]

    def gradient(scored: Any) -> Tensor:
        model.zero_grad()
        (score(scored, ids, mask, COLUMNS)[0] * weights).sum().backward()
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained(model)])

    expected = gradient(model)
    with packing(model) if layout == PACKED else contextlib.nullcontext():
        got = gradient(RowsModel(model, COLUMNS, is_packed=layout == PACKED))
    return ((got - expected).norm() / expected.norm()).item()


def trained(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters with a gradient."""
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def head(padding: int) -> str:
    """Versions, commit and command."""
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    return (
        f"{packages}, fp32, one thread of a CPU; {run.stdout.strip()}, {time.strftime('%Y-%m-%d')}.\n"
        f"{shlex.join(['python', *sys.argv])}\n\n"
        f"Largest difference of a log-prob, relative to 1 + its size, with {padding} columns of padding: trimmed and\n"
        "packed rows beside stock's padded ones, packed rows beside each row alone, packed rows when another row\n"
        "changes; norm of the difference of the gradients (as decided, beside stock), relative. The decision is that\n"
        "of padding_free='auto' for bf16 on CUDA.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names as in the table (default: all)")
    parser.add_argument("--padding", type=int, default=PADDING, help="columns of padding (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(head(args.padding), HEADER, sep="\n", flush=True)
    for family in families():
        if family.name in (args.families or [family.name]) and family.name not in UNSCORED:
            print(compare(family, args.padding).line(), flush=True)
    if not args.families:
        print("\nNot scored, by stock TRL either:")
        print(*(f"{name:27}{reason}" for name, (reason, _) in UNSCORED.items()), sep="\n")


if __name__ == "__main__":
    main()
