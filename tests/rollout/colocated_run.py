"""One colocated vLLM training run in a process of its own (vLLM allows one engine a process): python FILE KIND OUT.

Prints nothing that matters; writes the log and the final weights to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

    import torch
    import vllm._custom_ops as cpu_ops
    import vllm.model_executor.layers.utils as linear_layers
    from frozen_base import with_frozen_base
    from peft import LoraConfig
    from tiny import comparable_log, make_trainer, save_tiny_model, save_tiny_olmo2, weights
    from trl import GRPOTrainer

    from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

    # On CPUs with AMX or AVX512-BF16, vLLM 0.31 packs linear weights and drops the originals, after which no trainer
    # can load new ones. Both trainers run on the plain torch linears that other CPUs use.
    cpu_ops._supports_onednn = False
    linear_layers.check_cpu_sgl_kernel = lambda *_: False

    kind, out = sys.argv[1], Path(sys.argv[2])
    folder = (
        save_tiny_olmo2(out.parent / "olmo2") if kind == "olmo2" else save_tiny_model(out.parent / f"model-{out.stem}")
    )
    trainer_class, settings = {
        "stock": (GRPOTrainer, {}),
        "ours": (BudgetGRPOTrainer, {"config_class": BudgetGRPOConfig, "reuse_old_logprobs": "off"}),
        "reusing": (BudgetGRPOTrainer, {"config_class": BudgetGRPOConfig, "reuse_old_logprobs": "require"}),
        "olmo2": (BudgetGRPOTrainer, {"vllm_model_impl": "auto"}),
        "packed": (
            BudgetGRPOTrainer,
            {"config_class": BudgetGRPOConfig, "padding_free": "on", "max_tokens_per_microbatch": 60},
        ),
        "stock lora": (GRPOTrainer, {}),
        "lora": (
            BudgetGRPOTrainer,
            {"config_class": BudgetGRPOConfig, "reuse_old_logprobs": "off", "verify_weight_sync": "always"},
        ),
    }[kind]
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
    trainer = make_trainer(
        trainer_class,
        out.parent / out.stem,
        **settings,
        model=folder,
        trainer_kwargs=lora if "lora" in kind else None,
        max_steps=3,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=128,
        vllm_gpu_memory_utilization=0.3,
        model_init_kwargs={"dtype": "bfloat16" if "lora" in kind else "float32"},  # vLLM's own dtype
    )
    if kind == "stock lora":
        with_frozen_base(trainer)
    before = weights(trainer)
    forwards: list[tuple[int, ...]] = []
    trainer.model.model.register_forward_pre_hook(
        lambda _m, _args, kwargs: forwards.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    trainer.train()
    result = {"log": comparable_log(trainer), "weights": weights(trainer), "before": before, "forwards": forwards}
    if kind == "lora":
        result["num_verified"] = trainer._weight_sync._num_verified
    torch.save(result, out)
