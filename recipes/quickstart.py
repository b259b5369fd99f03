"""See GRPO learn in under a minute: no GPU, no download.

A Qwen3 with two layers and random weights starts by writing random bytes. The reward is the share of sevens in what
it writes, and after some eighty steps it writes nothing else. This is a check that the installation works and
a template for a script of your own; the model itself is of no use.

    python recipes/quickstart.py
    python recipes/quickstart.py --trainer stock    # TRL's own GRPOTrainer, everything else the same
    python recipes/quickstart.py --trainer packed   # rows end to end, passes of 256 tokens: a GPU's default layout
    accelerate launch --config_file accelerate_configs/cpu_2proc.yaml recipes/quickstart.py    # two processes
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from _curves import finish_run, record_run
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

TRAINERS = {
    "budget": (BudgetGRPOTrainer, BudgetGRPOConfig),
    "packed": (BudgetGRPOTrainer, partial(BudgetGRPOConfig, padding_free="on", max_tokens_per_microbatch=256)),
    "stock": (GRPOTrainer, GRPOConfig),
}
SMALLEST_RISE = 0.05


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, a padding token and an end-of-text token."""
    tokens = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def tiny_qwen3(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 with two layers and random fp32 weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def share_of_sevens(completions: list[str], **kwargs) -> list[float]:
    """Reward: the share of characters which are a 7, from 0 to 1."""
    return [completion.count("7") / max(len(completion), 1) for completion in completions]


def build_trainer(arguments: argparse.Namespace) -> GRPOTrainer:
    """The chosen trainer over the tiny model.

    Args:
        arguments: The parsed command line.

    Returns:
        A trainer that has not started.
    """
    set_seed(arguments.seed)
    tokenizer = byte_tokenizer()
    trainer_class, config_class = TRAINERS[arguments.trainer]
    config = config_class(
        output_dir=str(arguments.output_dir),
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=16,
        max_steps=arguments.steps,
        logging_steps=1,
        disable_tqdm=False,
        save_strategy="no",
        report_to="none",
        seed=arguments.seed,
    )
    return trainer_class(
        model=tiny_qwen3(tokenizer),
        args=config,
        reward_funcs=share_of_sevens,
        train_dataset=Dataset.from_list([{"prompt": f"Line {i}, sevens only: "} for i in range(64)]),
        processing_class=tokenizer,
    )


def parse_arguments() -> argparse.Namespace:
    """The command line of this recipe."""
    parser = argparse.ArgumentParser(description="Train a tiny model with GRPO on the CPU and draw its reward curve.")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps, at least 2")
    parser.add_argument("--output-dir", type=Path, default=Path("out/quickstart"), help="folder for the results")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the prompts and the sampling")
    parser.add_argument(
        "--trainer", choices=TRAINERS, default="budget", help="stock is TRL's own class, packed a layout for GPUs"
    )
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2: with one step there is no rise to see")
    return arguments


def main() -> None:
    """Train, write the results and fail if the reward did not rise."""
    arguments = parse_arguments()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(arguments)
    recorder = record_run(trainer, 10, arguments.output_dir, vars(arguments))
    trainer.train()
    if not trainer.is_world_process_zero():
        return

    title = f"tiny Qwen3, seed {arguments.seed}"
    label = "reward (share of sevens)"
    first, last = finish_run(arguments.output_dir, trainer, recorder, vars(arguments), title, label)
    if last < first + SMALLEST_RISE:
        sys.exit(
            f"The reward went from {first:.3f} to {last:.3f}, a rise under {SMALLEST_RISE}. "
            "With the default 80 steps it reaches 0.9 or more, so check the versions in rewards.json; "
            "with fewer steps set --steps 80."
        )


if __name__ == "__main__":
    main()
