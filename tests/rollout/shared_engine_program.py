"""A real vLLM engine that shares its weights with a policy, in a process of its own: python FILE FAMILY DEVICE OUT.

Completions are judged by the policy itself. Writes what was measured to OUT as JSON; on a CPU, engines do not sleep.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[2] + [10 + (7 * i + j) % 200 for j in range(12 + i)] for i in range(6)]
NEW_TOKENS = 16


def set_environment() -> None:
    """vLLM reads these when it is imported."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"})
    os.environ["MASTER_PORT"] = port
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "DO_NOT_TRACK": "1"})
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})


def keep_linear_weights() -> None:
    """On CPUs with AMX or AVX512-BF16, vLLM packs linear weights and drops the originals; others keep them."""
    import vllm._custom_ops as cpu_ops
    import vllm.model_executor.layers.utils as linear_layers

    cpu_ops._supports_onednn = False
    linear_layers.check_cpu_sgl_kernel = lambda *_: False


def start_engine(folder: str, dtype: str, device: str) -> Any:
    from vllm import LLM

    from trl_budget import upstream_vllm

    on_gpu: dict[str, Any] = {
        "enable_sleep_mode": True,
        "gpu_memory_utilization": 0.2,
    }
    llm = LLM(
        model=folder,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        distributed_executor_backend="external_launcher",
        seed=0,
        **(on_gpu if device == "cuda" else {}),
    )
    if device == "cuda":
        upstream_vllm.choose_sleep_backend(llm)
        upstream_vllm.sleep_backend(llm).kept_tags = frozenset({"weights"})
    return llm


def generate(llm: Any) -> list[tuple[list[int], list[float]]]:
    """Greedy completions of the prompts and vLLM's log-probs of their tokens."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling_params=greedy, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        (list(c.token_ids), [entry[token].logprob for token, entry in zip(c.token_ids, c.logprobs, strict=True)])
        for c in completions
    ]


def against_policy(policy: Any, completions: list[tuple[list[int], list[float]]]) -> dict[str, float]:
    """How far vLLM's tokens are from the policy's best, and vLLM's log-probs of them from the policy's, at most."""
    import torch

    gaps, distances = [], []
    for prompt, (tokens, vllm_logps) in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([prompt + tokens], device=policy.device)
        with torch.no_grad():
            log_probs = policy(input_ids=ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1].cpu()
        chosen = log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gaps.append((log_probs.max(-1).values - chosen).max().item())
        distances.append((chosen - torch.tensor(vllm_logps)).abs().max().item())
    return {"gap": max(gaps), "logp_distance": max(distances)}


def gradient_difference(policy: Any, separate: Any) -> float:
    """max|gradient of the shared policy - of a separate copy|, all parameters; both are dropped."""
    import torch

    ids = torch.tensor([PROMPTS[0]], device=policy.device)
    for model in (policy, separate):
        model(input_ids=ids, labels=ids).loss.backward()
    pairs = zip(policy.parameters(), separate.parameters(), strict=True)
    difference = max((p.grad.float() - q.grad.float()).abs().max().item() for p, q in pairs)
    policy.zero_grad()
    return difference


def change_weights(policy: Any) -> None:
    """In place, as an optimizer step would, but large enough to change what is generated."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.mul_(1 + 0.3 * noise)


def sleep_and_wake(llm: Any, policy: Any, vllm_model: Any, views: Any) -> dict[str, Any]:
    """One cycle at level 2; what was asleep, what the card got back, and whether the weights kept their bits."""
    import torch

    from trl_budget.shared_weights import first_difference, named_values
    from trl_budget.upstream_vllm import sleeping_bytes

    values = [(name, value.cpu()) for name, value in named_values(policy)]
    torch.cuda.empty_cache()
    free_awake = torch.cuda.mem_get_info()[0]
    llm.sleep(level=2)
    measured: dict[str, Any] = {
        "asleep_bytes": sleeping_bytes(),
        "freed_bytes": torch.cuda.mem_get_info()[0] - free_awake,
        "difference_asleep": first_difference(values, vllm_model, views),
    }
    change_weights(policy)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    return {**measured, "asleep_bytes_awake": sleeping_bytes()}


def main(family: str, device: str, out: Path) -> None:
    import torch
    from fused_models import tiny_policy
    from tiny import byte_tokenizer
    from transformers import AutoModelForCausalLM

    from trl_budget import shared_weights

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = {"vocab_size": 258, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    made = tiny_policy(family, dtype, **sizes, max_position_embeddings=512)
    folder = str(out.parent / "model")
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    if device == "cpu":
        keep_linear_weights()
    llm = start_engine(folder, str(dtype).removeprefix("torch."), device)
    vllm_model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    policy, separate = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for _ in range(2))
    views = shared_weights.plan_views(policy, vllm_model, vllm_model.packed_modules_mapping)
    if isinstance(views, str):
        raise SystemExit(views)
    before = shared_weights.first_difference(shared_weights.named_values(policy), vllm_model, views)
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    shared_weights.share(policy, vllm_model, views)
    policy.to(device)  # buffers; the parameters are there
    added = (torch.cuda.memory_allocated() if device == "cuda" else 0) - allocated
    first = generate(llm)
    result: dict[str, Any] = {
        "num_parameters": len(list(policy.parameters())),
        "num_views": len(views),
        "difference_before": before,
        "added_bytes": added,
        "first": against_policy(policy, first),
        "gradient_difference": gradient_difference(policy, separate.to(device)),
        "cycles": [],
    }
    for _ in range(2):
        if device == "cuda":
            result["cycles"].append(sleep_and_wake(llm, policy, vllm_model, views))
        else:
            change_weights(policy)
            llm.reset_prefix_cache()
    result["first_after_changes"] = against_policy(policy, first)
    result["after_changes"] = against_policy(policy, generate(llm))
    result["first_unshared"] = shared_weights.first_unshared(policy, vllm_model, views)
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    set_environment()
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
