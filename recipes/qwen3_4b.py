"""GRPO on Qwen3-4B, all weights or adapters, with vLLM in the same process, on cards of 16, 24 or 48 GB.

The optimizer is in host memory (about 65 GB of RAM, 80 with two cards, which share it), policy and vLLM share one copy
of the weights on each card, and the rest is vLLM's cache during rollouts and the update's activations afterwards.
Neither NVLink nor peer access is needed between cards. Problems and their verifier come from
reasoning-gym (`chain_sum`); the reward is the verifier's score of the last number in the completion.

    pip install "trl-budget[vllm]" reasoning-gym
    python recipes/qwen3_4b.py --card 24
    python recipes/qwen3_4b.py --card 16 --lora 32                 # adapters, with their optimizer on the card
    python recipes/qwen3_4b.py --card 16 --shape-only --steps 3    # random weights: no download, no learning
    accelerate launch --config_file accelerate_configs/ddp_2gpu_pcie.yaml recipes/qwen3_4b.py --card 48

Every 50 steps a checkpoint is written, 52 GiB for all weights, and the one before deleted; `--resume` goes on from the
last. The model is saved at the end. On a larger card the training behaves as if the card had `--card` GB.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import reasoning_gym
import torch
from _curves import finish_run, record_run
from _saving import add_saving_arguments, saving_settings, train_and_save
from datasets import Dataset
from peft import LoraConfig
from quickstart import byte_tokenizer
from reasoning_gym.dataset import ProceduralDataset
from reasoning_smollm2_135m import NUM_PROBLEMS, verifier_reward
from transformers import AutoModelForCausalLM, Qwen3Config

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
TASK = "chain_sum"
TASK_OPTIONS = {"min_terms": 4, "max_terms": 6, "min_digits": 2, "max_digits": 4}
SYSTEM_PROMPT = "Work it out step by step. End with the final number."
MAX_PROMPT_LENGTH = 512

# A card sold as 24 GB has 24 GiB, of which a display and the driver hold some; one of 48 has 45 where error correction
# is on. `vllm_gpu_memory_utilization` is a share of the budget. More tokens in a pass need more activations, 0.4 MB a
# token; longer completions a larger cache.
CARDS = {
    48: {
        "device_memory_budget": "44GiB",
        "vllm_gpu_memory_utilization": 0.85,
        "max_tokens_per_microbatch": 32_768,
        "max_completion_length": 8192,
    },
    24: {
        "device_memory_budget": "23GiB",
        "vllm_gpu_memory_utilization": 0.85,
        "max_tokens_per_microbatch": 16_384,
        "max_completion_length": 4096,
    },
    16: {
        "device_memory_budget": "15.5GiB",
        "vllm_gpu_memory_utilization": 0.80,
        "max_tokens_per_microbatch": 4096,
        "max_completion_length": 2048,
    },
}
SHAPES = {
    "qwen3-4b": {
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def random_model(folder: Path, shape: str, max_positions: int = 8192) -> Path:
    """A folder with random bf16 weights and a tokenizer of one token per byte.

    Args:
        folder: Where the model is kept; made on first use.
        shape: Key of `SHAPES`.
        max_positions: Longest row in tokens.
    """
    path = folder / f"{shape}-random-{max_positions}"
    if path.exists():
        return path
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3Config(**SHAPES[shape], **special, tie_word_embeddings=True, max_position_embeddings=max_positions)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    unfinished = path.with_name(path.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(path)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # a budget counts what torch keeps
    return path


def chat_prompts(problems: ProceduralDataset) -> Dataset:
    """One chat prompt per problem.

    Args:
        problems: A reasoning-gym dataset.

    Returns:
        Columns `prompt` (list of messages) and `problem_index` (place in `problems`).
    """
    opening = {"role": "system", "content": SYSTEM_PROMPT}
    questions = ({"role": "user", "content": problem["question"]} for problem in problems)
    return Dataset.from_list([{"prompt": [opening, asked], "problem_index": i} for i, asked in enumerate(questions)])


def build_config(arguments: argparse.Namespace) -> BudgetGRPOConfig:
    """The configuration for a card of the given size: every lever of the library at its default, and the budget.

    Args:
        arguments: The parsed command line.
    """
    card = dict(CARDS[arguments.card])
    if arguments.max_completion_length is not None:
        card["max_completion_length"] = arguments.max_completion_length
    is_cuda = torch.cuda.is_available()
    return BudgetGRPOConfig(
        output_dir=str(arguments.output_dir),
        use_cpu=not is_cuda,
        bf16=is_cuda,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=MAX_PROMPT_LENGTH + card["max_completion_length"],
        **card,
        # All weights are trained from fp32 masters, which are loaded as TRL loads them.
        model_init_kwargs={"dtype": "bfloat16"} if arguments.lora else None,
        learning_rate=1e-5 if arguments.lora else 1e-6,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=arguments.completions // 4,
        num_generations=8,
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
    config = build_config(arguments)
    model = arguments.model
    if arguments.shape_only:
        with config.main_process_first():  # of each node
            model = str(random_model(arguments.cache_dir, arguments.shape, config.vllm_max_model_length))
    problems = reasoning_gym.create_dataset(TASK, size=NUM_PROBLEMS, seed=arguments.seed, **TASK_OPTIONS)
    return BudgetGRPOTrainer(
        model=model,
        args=config,
        reward_funcs=verifier_reward(problems),
        train_dataset=chat_prompts(problems),
        peft_config=adapters(arguments.lora) if arguments.lora else None,
    )


def adapters(rank: int) -> LoraConfig:
    """Adapters on every linear layer but the LM head.

    Args:
        rank: Of each.
    """
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def parse_arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of this recipe.

    Args:
        command_line: Its words; those of the process by default.
    """
    parser = argparse.ArgumentParser(description="GRPO on Qwen3-4B, on one or several cards of 16 to 48 GB.")
    parser.add_argument("--card", type=int, choices=CARDS, default=24, help="memory of the card in GB")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--completions", type=int, default=64, help="of a step and card, a multiple of 8")
    parser.add_argument("--max-completion-length", type=int, help="default: 8192, 4096, 2048 for 48, 24, 16 GB")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank instead of all weights")
    parser.add_argument("--model", default=MODEL, help="a name on the hub or a folder")
    parser.add_argument("--shape-only", action="store_true", help="random weights of the shape, nothing is downloaded")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b", help="of the random weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems and the sampling")
    parser.add_argument("--output-dir", type=Path, default=Path("out/qwen3_4b"))
    parser.add_argument("--cache-dir", type=Path, default=Path("out/models"), help="where random weights are kept")
    add_saving_arguments(parser)
    arguments = parser.parse_args(command_line)
    if arguments.completions % 8:
        parser.error(f"--completions {arguments.completions} is no multiple of 8, the completions of one problem")
    return arguments


def main() -> None:
    """Train and save the model, then write the record and the picture of the reward."""
    arguments = parse_arguments()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(arguments)
    recorder = record_run(trainer, 1, arguments.output_dir, vars(arguments))
    train_and_save(trainer, arguments)
    name = arguments.shape if arguments.shape_only else arguments.model
    num_cards = trainer.accelerator.num_processes
    cards = f"{num_cards} cards" if num_cards > 1 else "a card"
    title = f"{name}, {TASK}, {cards} of {arguments.card} GB, seed {arguments.seed}"
    if trainer.is_world_process_zero():
        finish_run(arguments.output_dir, trainer, recorder, vars(arguments), title, "reward (verifier's score)")


if __name__ == "__main__":
    main()
