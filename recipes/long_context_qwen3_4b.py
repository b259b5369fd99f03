"""GRPO on all weights of Qwen3-4B with long completions, vLLM in the same process, on one card of 16, 24 or 48 GB.

A row of the update is a pass of its own. Where it would not fit, layer inputs wait in host memory, layers run in tiles
of the sequence, and attention runs in groups of heads: the three fields below, each "auto" here, decide alone. The
optimizer is in host memory (about 65 GB of RAM, and 0.18 GB for 1,000 tokens of a row), policy and vLLM share one copy
of the weights. Problems and verifier come from reasoning-gym (`chain_sum`); the model thinks at length before it
answers, and the reward is the verifier's score of the last number.

    pip install "trl-budget[vllm]" reasoning-gym
    python recipes/long_context_qwen3_4b.py --card 24
    python recipes/long_context_qwen3_4b.py --card 16 --row-length 16384
    python recipes/long_context_qwen3_4b.py --card 48 --shape-only --steps 3    # random weights: every row is full

Every 50 steps a checkpoint of 52 GiB is written and the one before deleted; `--resume` goes on from the last. The
model is saved at the end. On a larger card the training behaves as if the card had `--card` GB.
"""

import argparse
from pathlib import Path

import reasoning_gym
import torch
from _curves import finish_run, record_run
from _saving import add_saving_arguments, saving_settings, train_and_save
from qwen3_4b import SHAPES, TASK, chat_prompts, random_model
from reasoning_smollm2_135m import NUM_PROBLEMS, verifier_reward

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

MODEL = "Qwen/Qwen3-4B-Thinking-2507"
MAX_POSITIONS = 262_144
MAX_PROMPT_LENGTH = 1024
TASK_OPTIONS = {"min_terms": 20, "max_terms": 40, "min_digits": 3, "max_digits": 6}
NUM_GENERATIONS = 8

# vLLM needs the weights (7.5 GiB) and the cache of at least one whole row (0.14 MiB a token) within its share of the
# budget, the update the weights, the LM head's gradient and a row's activations within all of it.
CARDS = {
    16: {"device_memory_budget": "15.5GiB", "vllm_gpu_memory_utilization": 0.88, "row_length": 32_768},
    24: {"device_memory_budget": "23GiB", "vllm_gpu_memory_utilization": 0.85, "row_length": 65_536},
    48: {"device_memory_budget": "44GiB", "vllm_gpu_memory_utilization": 0.85, "row_length": 131_072},
}


def build_config(arguments: argparse.Namespace) -> BudgetGRPOConfig:
    """The configuration for a card of the given size and rows of the given length.

    Args:
        arguments: The parsed command line.
    """
    card = dict(CARDS[arguments.card])
    row_length = arguments.row_length or card["row_length"]
    del card["row_length"]
    is_cuda = torch.cuda.is_available()
    return BudgetGRPOConfig(
        output_dir=str(arguments.output_dir),
        use_cpu=not is_cuda,
        bf16=is_cuda,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=row_length,
        max_completion_length=row_length - MAX_PROMPT_LENGTH,
        max_tokens_per_microbatch=row_length,  # short rows share a pass, a long one has its own
        activation_offload="auto",
        tiled_mlp="auto",
        attention_head_groups="auto",
        lm_head_chunk_size=8192,
        **card,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=arguments.completions,
        num_generations=NUM_GENERATIONS,
        max_steps=arguments.steps,
        logging_steps=1,
        disable_tqdm=False,
        **saving_settings(arguments),
        report_to="none",
        seed=arguments.seed,
    )


def build_trainer(arguments: argparse.Namespace) -> BudgetGRPOTrainer:
    """The trainer over Qwen3-4B, or random weights of a shape.

    Args:
        arguments: The parsed command line.

    Returns:
        A trainer that has not started.
    """
    model = arguments.model
    if arguments.shape_only:
        model = str(random_model(arguments.cache_dir, arguments.shape, MAX_POSITIONS))
    problems = reasoning_gym.create_dataset(TASK, size=NUM_PROBLEMS, seed=arguments.seed, **TASK_OPTIONS)
    return BudgetGRPOTrainer(
        model=model,
        args=build_config(arguments),
        reward_funcs=verifier_reward(problems),
        train_dataset=chat_prompts(problems),
    )


def parse_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    """The command line of this recipe.

    Args:
        command_line: Its words; those of the process by default.
    """
    parser = argparse.ArgumentParser(description="Full-parameter GRPO on Qwen3-4B with long rows, on one card.")
    parser.add_argument("--card", type=int, choices=CARDS, default=24, help="memory of the card in GB")
    parser.add_argument("--row-length", type=int, help="tokens of a prompt and its completion; default: by the card")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--completions", type=int, default=16, help=f"of a step, a multiple of {NUM_GENERATIONS}")
    parser.add_argument("--model", default=MODEL, help="a name on the hub or a folder")
    parser.add_argument("--shape-only", action="store_true", help="random weights of the shape, nothing is downloaded")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b", help="of the random weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems and the sampling")
    parser.add_argument("--output-dir", type=Path, default=Path("out/long_context_qwen3_4b"))
    parser.add_argument("--cache-dir", type=Path, default=Path("out/models"), help="where random weights are kept")
    add_saving_arguments(parser)
    arguments = parser.parse_args(command_line)
    if arguments.completions % NUM_GENERATIONS:
        parser.error(f"--completions {arguments.completions} is no multiple of {NUM_GENERATIONS}, those of a problem")
    length = arguments.row_length
    if length is not None and not MAX_PROMPT_LENGTH < length <= MAX_POSITIONS:
        parser.error(f"--row-length {length} is not above {MAX_PROMPT_LENGTH}, a prompt, and up to {MAX_POSITIONS}")
    return arguments


def main() -> None:
    """Train and save the model, then write the record and the picture of the reward."""
    arguments = parse_arguments()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(arguments)
    recorder = record_run(trainer, 1, arguments.output_dir, vars(arguments))
    train_and_save(trainer, arguments)
    name = arguments.shape if arguments.shape_only else arguments.model
    title = f"{name}, {TASK}, a card of {arguments.card} GB, seed {arguments.seed}"
    finish_run(arguments.output_dir, trainer, recorder, vars(arguments), title, "reward (verifier's score)")


if __name__ == "__main__":
    main()
