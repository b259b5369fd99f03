"""Rows of a padded batch to the tensors that a pass runs, and back: packed end to end, or trimmed.

Both stand where TRL's code calls the model, so every loss, entropy and mask stays TRL's. What comes back has the shape
that the padded call returns; masked places hold zero, as they do there. Equal to the padded call up to the rounding of
other matrix shapes. Legend: B rows, L = prompt + completion padded, T packed tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from trl_budget.attention import packed_rows

_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@dataclasses.dataclass(frozen=True)
class RowSpans:
    """Where the real tokens of each row of a padded batch are.

    Attributes:
        starts: column of the first real token; `L` for an empty row.
        lengths: number of real tokens.
        is_contiguous: whether no row has a masked token between two real ones.
    """

    starts: list[int]
    lengths: list[int]
    is_contiguous: bool

    @classmethod
    def of(cls, attention_mask: Tensor) -> RowSpans:
        """Reads a `[B, L]` mask of 0 and 1, on any device; one synchronisation."""
        mask = attention_mask.to("cpu", torch.bool)
        lengths = mask.sum(1)
        columns = torch.arange(mask.shape[1])
        starts = torch.where(mask, columns, mask.shape[1]).amin(1)
        stops = torch.where(mask, columns + 1, 0).amax(1)
        is_contiguous = bool(((stops - starts == lengths) | (lengths == 0)).all())
        return cls(starts.tolist(), lengths.tolist(), is_contiguous)

    def can_be_packed(self, prompt_columns: int) -> bool:
        """Whether closing the gaps between rows changes nothing that stock computes.

        Masked tokens inside a row hold a position, and a completion without a prompt is predicted from padding.
        """
        has_prompt = all(s < prompt_columns or n == 0 for s, n in zip(self.starts, self.lengths, strict=True))
        return self.is_contiguous and has_prompt and sum(self.lengths) > 0


class RowsModel:
    """Called like the model with a padded batch; runs its rows packed or trimmed.

    Args:
        model: the policy or the reference, wrapped or not, with TRL's fused head; with a packing attention if packed.
        logits_to_keep: columns that hold completions.
        is_packed: lay rows end to end; a batch for which that would not be the same is trimmed, one whose rows have
            adapters of their own (PEFT's `adapter_names`) among them.
    """

    def __init__(self, model: Callable[..., Any], logits_to_keep: int, *, is_packed: bool) -> None:
        self._model = model
        self._logits_to_keep = logits_to_keep
        self._is_packed = is_packed

    def __call__(
        self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs: Any
    ) -> FusedCausalLMOutput:
        """Takes `[B, L]` ids, mask and labels; returns per-token fields of shape `[B, L - 1]`."""
        spans = RowSpans.of(attention_mask)
        prompt_columns = input_ids.shape[1] - self._logits_to_keep
        if self._is_packed and "adapter_names" not in kwargs and spans.can_be_packed(prompt_columns):
            return run_packed(self._model, spans, input_ids, labels, **kwargs)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **kwargs}
        return run_trimmed(self._model, spans, prompt_columns, batch)


def run_packed(
    model: Callable[..., Any], spans: RowSpans, input_ids: Tensor, labels: Tensor, **kwargs: Any
) -> FusedCausalLMOutput:
    """Runs the real tokens end to end, `[1, T]`; positions restart in every row.

    Args:
        model: as for `RowsModel`.
        spans: the batch's real tokens.
        input_ids: `[B, L]`, int64.
        labels: `[B, L]`, int64, -100 where no log-prob is wanted.
        kwargs: handed on.

    Returns:
        Per-token fields of shape `[B, L - 1]`, zero at masked places.
    """
    rows, columns = input_ids.shape
    lengths, starts = torch.tensor(spans.lengths), torch.tensor(spans.starts)
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    row = torch.repeat_interleave(torch.arange(rows), lengths)
    position = torch.arange(int(bounds[-1])) - bounds[row]
    place = (row * columns + starts[row] + position).to(input_ids.device)
    next_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    cu_seq_lens = bounds.to(input_ids.device, torch.int32)
    longest = max(spans.lengths)
    with packed_rows():
        outputs = model(
            input_ids=input_ids.flatten()[place][None],
            position_ids=position.to(input_ids.device)[None],
            attention_mask=None,
            shift_labels=next_labels.flatten()[place][None],
            cu_seq_lens_q=cu_seq_lens,
            cu_seq_lens_k=cu_seq_lens,
            max_length_q=longest,
            max_length_k=longest,
            **kwargs,
        )

    def unpack(flat: Tensor) -> Tensor:
        padded = flat.new_zeros(rows * columns).index_copy(0, place, flat[0])
        return padded.view(rows, columns)[:, :-1]

    return _replaced(outputs, unpack)


def run_trimmed(
    model: Callable[..., Any], spans: RowSpans, prompt_columns: int, batch: dict[str, Any]
) -> FusedCausalLMOutput:
    """Runs the padded batch without the columns that no row uses.

    Args:
        model: as for `RowsModel`, with any attention.
        spans: the batch's real tokens.
        prompt_columns: columns that hold prompts; the last one stays, since it predicts the first completion token.
        batch: the model's arguments, `input_ids` among them; those of its shape are trimmed.

    Returns:
        Per-token fields of shape `[B, L - 1]`.
    """
    shape = batch["input_ids"].shape
    columns = shape[1]
    stops = [start + n for start, n in zip(spans.starts, spans.lengths, strict=True) if n]
    left = max(0, min(min(spans.starts), prompt_columns - 1))
    right = max([*stops, min(left + 2, columns)]) if spans.is_contiguous else columns

    def trim(value: Any) -> Any:
        return value[:, left:right] if isinstance(value, Tensor) and value.shape == shape else value

    outputs = model(**{name: trim(value) for name, value in batch.items()})
    return _replaced(outputs, lambda values: F.pad(values, (left, columns - right)))


def _replaced(outputs: FusedCausalLMOutput, convert: Callable[[Tensor], Tensor]) -> FusedCausalLMOutput:
    fields = {name: vars(outputs)[name] for name in _PER_TOKEN}
    converted = {name: None if values is None else convert(values) for name, values in fields.items()}
    return dataclasses.replace(outputs, **converted, label_mask=None)
