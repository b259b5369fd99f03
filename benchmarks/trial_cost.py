"""What trial runs of rows cost when a trainer is built: seconds and device memory, Qwen3-4B's shape, random weights.

    python benchmarks/trial_cost.py --commit $(git rev-parse HEAD) --output benchmarks/results/trial_cost.json

Each configuration is timed as a user meets it, in a process whose kernels are cold for the first one, and once more.
Stock runs no trial, so there is nothing to pair it with.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_budget import upstream_config
from trl_budget.packing_trial import packing_fault
from trl_budget.padding_trial import PaddedColumns, try_padding
from trl_budget.upstream_attention import enable_packed_attention, restore_attention, with_own_attention

SHAPE = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
SHAPE |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 258, "max_position_embeddings": 40_960}
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as published": {},
    "a window of 4,096": {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0},
    "rope of llama3, original length 8,192": {"rope_parameters": {**ROPE, "original_max_position_embeddings": 8192}},
}


def timed(device: torch.device, run: Any) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if is_cuda else 0
    start = time.perf_counter()
    found = run()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if is_cuda else 0
    return {"seconds": seconds, "extra_bytes": peak, "found": str(found)}


def measure(model: Any, device: torch.device) -> list[dict[str, Any]]:
    config = model.config
    columns = PaddedColumns(0, upstream_config.position_boundaries(config), upstream_config.max_positions(config))
    layers = upstream_config.telling_layers(model, config)
    autocast = autocast_of(device)

    def packing() -> str | None:
        enable_packed_attention([model])
        windows = upstream_config.num_windows(config)
        try:
            return packing_fault(
                model,
                config.vocab_size,
                autocast,
                is_exact=True,
                num_windows=windows,
                unpacked=lambda: with_own_attention([model]),
            )
        finally:
            restore_attention([model])

    trials = {"padding": lambda: try_padding(model, config.vocab_size, columns, layers, autocast), "packing": packing}
    return [
        {"run": number, "trial": name, "past": columns.past_boundaries(), **timed(device, run)}
        for number in range(2)
        for name, run in trials.items()
    ]


def autocast_of(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script on the CPU")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {
        "commit": args.commit,
        "command": "python benchmarks/trial_cost.py",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
    }
    for name, settings in CONFIGURATIONS.items():
        torch.manual_seed(0)
        config = Qwen3Config(**(TINY if args.tiny else SHAPE), tie_word_embeddings=True, pad_token_id=0, **settings)
        config._attn_implementation = "sdpa"
        with torch.device(device):
            torch.set_default_dtype(torch.bfloat16)
            model = Qwen3ForCausalLM(config)
            torch.set_default_dtype(torch.float32)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        results[name] = measure(model, device)
        for row in results[name]:
            print(name, {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
        del model
    args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
