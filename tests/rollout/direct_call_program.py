"""A real vLLM engine that counts as asleep between rollouts, called by a callback: python FILE OUT.

On a CPU vLLM's workers give no memory back, but its executor counts as asleep all the same and generates nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

    import torch
    from shared_engine_program import keep_linear_weights, set_environment
    from tiny import make_trainer, save_tiny_model
    from transformers import TrainerCallback
    from trl import GRPOConfig

    set_environment()

    from vllm import LLM, SamplingParams

    from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, upstream_vllm

    keep_linear_weights()
    upstream_vllm.has_sleep_backends = lambda: False  # the workers of a CPU have none
    PROMPT = [5, 6, 7, 8]
    GREEDY = {"temperature": 0.0, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    WHOLE = {"chat_template": "{{ messages[0]['content'] }}", "add_generation_prompt": False, "use_tqdm": False}

    class SleepingOnCpu(BudgetGRPOTrainer):
        def _can_engine_sleep(self, args: GRPOConfig) -> bool:
            return True

        def _engine_class(self, **arguments: Any) -> LLM:
            return LLM(**{**arguments, "enable_sleep_mode": False, "dtype": "float32"})

        def _build_card(self, policy: torch.nn.Module) -> Any:
            for parameter in policy.parameters():  # loaded weights are mapped from their file and cannot be parked
                parameter.data = parameter.data.clone()
            return super()._build_card(policy)

    class CallsTheEngine(TrainerCallback):
        """Every kind of call, after each update."""

        def __init__(self) -> None:
            self.trainer: Any = None
            self.steps: list[dict[str, Any]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            llm, model = self.trainer.vllm_generation.llm, self.trainer.model
            asleep = sorted(upstream_vllm.sleeping_tags(llm))
            greedy = SamplingParams(**GREEDY)
            output = llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)[0].outputs[0]
            tokens = list(output.token_ids)
            logps = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
            chat = llm.chat([{"role": "user", "content": "Write: "}], greedy, **WHOLE)[0].outputs[0]
            norm = llm.apply_model(lambda engine_model: engine_model.model.norm.weight.tolist())[0]
            with torch.no_grad():
                scores = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            own = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            self.steps.append(
                {
                    "asleep_before": asleep,
                    "asleep_after": sorted(upstream_vllm.sleeping_tags(llm)),
                    "logp_distance": (own - torch.tensor(logps)).abs().max().item(),
                    "num_chat_tokens": len(chat.token_ids),
                    "norm_distance": (model.model.norm.weight - torch.tensor(norm)).abs().max().item(),
                    "num_rpc_answers": len(llm.collective_rpc("check_health")),
                }
            )

    out = Path(sys.argv[1])
    callback = CallsTheEngine()
    trainer = make_trainer(
        SleepingOnCpu,
        out.parent / "run",
        config_class=BudgetGRPOConfig,
        model=save_tiny_model(out.parent / "model"),
        max_steps=2,
        learning_rate=0.01,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=128,
        vllm_gpu_memory_utilization=0.3,
        model_init_kwargs={"dtype": "float32"},
        verify_weight_sync="always",
        trainer_kwargs={"callbacks": [callback]},
    )
    callback.trainer = trainer
    trainer.train()
    llm = trainer.vllm_generation.llm
    facts = {
        "is_llm": isinstance(llm, LLM),
        "max_model_len": llm.llm_engine.model_config.max_model_len,
        "settings": {setting.name: setting.value for setting in trainer.resolved_settings},
        "gaps": [entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history[:-1]],
    }
    out.write_text(json.dumps({"steps": callback.steps, **facts}))
