"""A tiny training as a user would launch it: `accelerate launch --config_file ... launched_script.py <folder>`."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

from tiny import comparable_log, make_trainer, tiny_model

from trl_budget import BudgetGRPOTrainer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    faulthandler.dump_traceback_later(180, exit=True)
    rank = int(os.environ["RANK"])
    saves = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(BudgetGRPOTrainer, folder, model=tiny_model(seed=rank), **saves)
    trainer.train()
    weights = sum(p.detach().double().abs().sum().item() for p in trainer.model.parameters())
    settings = {setting.name: setting.value for setting in trainer.resolved_settings}
    result = {"weights": weights, "settings": settings, "log": comparable_log(trainer)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    trainer.accelerator.end_training()
