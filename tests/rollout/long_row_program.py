"""Rows that a real vLLM on the CPU cannot hold, in a process of its own: python FILE KIND FOLDER; prints the error."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

    import vllm._custom_ops as cpu_ops
    import vllm.model_executor.layers.utils as linear_layers
    from tiny import make_trainer, save_tiny_model

    from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer
    from trl_budget.errors import DeviceMemoryError, SettingsError

    cpu_ops._supports_onednn = False  # see colocated_run.py
    linear_layers.check_cpu_sgl_kernel = lambda *_: False

    kind, folder = sys.argv[1], Path(sys.argv[2])
    context, shape = {
        "prompt": (19, {}),
        "cache": (600_000, {"max_position_embeddings": 600_000, "num_attention_heads": 8, "num_key_value_heads": 8}),
    }[kind]  # the cache of 600,000 tokens takes at least 1.1 GiB, and vLLM has 1 GiB
    try:
        make_trainer(
            BudgetGRPOTrainer,
            folder / "out",
            config_class=BudgetGRPOConfig,
            model=save_tiny_model(folder / "model", **shape),
            max_steps=1,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=context,
            vllm_gpu_memory_utilization=0.3,
            model_init_kwargs={"dtype": "float32"},
        ).train()
    except (SettingsError, DeviceMemoryError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
