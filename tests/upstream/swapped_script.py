"""Runs TRL's installed `trl/scripts/grpo.py` with only the trainer class swapped: python FILE [script arguments]."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    import trl

    from trl_budget import BudgetGRPOTrainer

    trl.GRPOTrainer  # noqa: B018 (resolves TRL's lazy attribute before it is replaced)
    trl.GRPOTrainer = BudgetGRPOTrainer
    script = Path(trl.__file__).parent / "scripts" / "grpo.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")
