"""How far the 2-norm of one large fp32 tensor on a CPU is from fp64: torch's own, and in rows of `gradient_norm.py`.

    python benchmarks/norm_accuracy.py --output benchmarks/results/norm_accuracy.json

The sizes are those of an MLP matrix and of the embedding of a 4B model.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from trl_budget.gradient_norm import ROW_ELEMENTS, norm_of_norms, row_norms

SIZES = {"9728 x 2560": 9728 * 2560, "151936 x 2560": 151_936 * 2560}


def relative_errors(gradient: Tensor) -> dict[str, float]:
    """Signed errors relative to the fp64 norm."""
    expected = sum(float(piece.double().square().sum()) for piece in gradient.split(2**24)) ** 0.5
    measured = {"torch": torch.linalg.vector_norm(gradient), "rows": norm_of_norms(row_norms(gradient))}
    return {name: float(norm) / expected - 1 for name, norm in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/norm_accuracy.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    errors = {}
    for name, num_elements in SIZES.items():
        errors[name] = {
            "normal": relative_errors(torch.randn(num_elements) * 1e-3),
            "equal": relative_errors(torch.full((num_elements,), 1e-3)),
        }
        print(name, errors[name], flush=True)
    report = {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_cores": os.cpu_count(),
        "row_elements": ROW_ELEMENTS,
        "relative_error": errors,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
