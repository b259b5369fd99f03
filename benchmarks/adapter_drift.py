"""How far the frozen base of a LoRA policy moves when its adapters are merged for vLLM, TRL's way and ours.

    python benchmarks/adapter_drift.py SmolLM2-135M-Instruct --output benchmarks/results/adapter_drift.json

Each sync follows an update of the adapters by `--learning-rate` with a random sign for each element, as large as one
of Adam's; no policy is trained. TRL's way is the pair of calls that TRL 1.16 makes for every sync, ours is
`merged_weights`. Reported are norms relative to the adapted weights: of the adapters' sum, and of how far the base is
from what was loaded. `nats_of_move` is how far log-probs are apart in fp32, on average over a text that the model
wrote, between the policy that training would go on with and the adapters on the loaded base, which is what a saved
adapter amounts to; `nats_of_adapters`, for scale, what the adapters change.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, set_seed

from trl_budget.adapter_weights import merged_weights

REPORTED = (1, 10, 30, 100, 300, 1000, 3000)
TEXT_TOKENS = 256


def adapted(folder: str, dtype: torch.dtype) -> Any:
    """Rank 16 on all linear layers, in fp32 as PEFT casts them, over a base in `dtype`."""
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


@torch.no_grad()
def log_probs(policy: Any, ids: Tensor) -> Tensor:
    """`[tokens - 1]` of a text `[1, tokens]`, computed in fp32."""
    logits = copy.deepcopy(policy).float()(input_ids=ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)


@contextmanager
def with_base(policy: Any, loaded: dict[str, Tensor]) -> Iterator[None]:
    """While it lasts, the base is what was loaded."""
    present = {name: policy.get_parameter(name).detach().clone() for name in loaded}
    for values in (loaded, present):
        for name, value in values.items():
            policy.get_parameter(name).data.copy_(value)
        if values is loaded:
            yield


def sync(policy: Any, way: str) -> None:
    """Reads the merged weights once."""
    if way == "trl":
        policy.merge_adapter()
        policy.unmerge_adapter()
        return
    for _ in merged_weights(policy, None):
        pass


def relative_norms(policy: Any, loaded: dict[str, Tensor]) -> tuple[float, float]:
    """Of the adapters' sum, and of what the base has moved by; both relative to the adapted weights."""
    squares = torch.zeros(3, dtype=torch.float64)
    for name, module in policy.named_modules():
        if name + ".base_layer.weight" in loaded:
            before = loaded[name + ".base_layer.weight"].double()
            parts = (module.get_delta_weight("default"), module.base_layer.weight.detach().double() - before, before)
            squares += torch.stack([part.detach().double().square().sum() for part in parts])
    delta, moved, base = squares.sqrt().tolist()
    return delta / base, moved / base


def measured(
    folder: str, dtype: torch.dtype, way: str, num_syncs: int, learning_rate: float
) -> list[dict[str, float]]:
    """One row for each of `REPORTED`."""
    policy = adapted(folder, dtype)
    adapters = [p for p in policy.parameters() if p.requires_grad]
    loaded = {name: p.detach().clone() for name, p in policy.named_parameters() if name.endswith("base_layer.weight")}
    text = policy.generate(input_ids=torch.tensor([[policy.config.bos_token_id]]), max_new_tokens=TEXT_TOKENS)
    original = log_probs(policy, text)
    generator, rows = torch.Generator().manual_seed(2), []
    for number in range(1, num_syncs + 1):
        with torch.no_grad():
            for adapter in adapters:
                sign = torch.randint(2, adapter.shape, generator=generator) * 2 - 1
                adapter.add_(sign, alpha=learning_rate)
        sync(policy, way)
        if number in REPORTED:
            adapters_norm, moved = relative_norms(policy, loaded)
            trained = log_probs(policy, text)
            with with_base(policy, loaded):
                saved = log_probs(policy, text)
            rows.append(
                {
                    "syncs": number,
                    "adapters": adapters_norm,
                    "base_moved": moved,
                    "nats_of_adapters": (saved - original).abs().mean().item(),
                    "nats_of_move": (saved - trained).abs().mean().item(),
                }
            )
            print(dtype, way, rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a model")
    parser.add_argument("--syncs", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/adapter_drift.json"))
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    start = time.perf_counter()
    for dtype in (torch.bfloat16, torch.float32):
        for way in ("trl", "ours"):
            key = f"{str(dtype).removeprefix('torch.')}, {way}"
            rows[key] = measured(args.model, dtype, way, args.syncs, args.learning_rate)
    report = {
        "versions": {name: version(name) for name in ("torch", "peft", "transformers", "trl")},
        "device": "cpu",
        "model": Path(args.model).name,
        "learning_rate": args.learning_rate,
        "command": " ".join(["python", "benchmarks/adapter_drift.py", *sys.argv[1:]]),
        "seconds": round(time.perf_counter() - start),
        "rows": rows,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
