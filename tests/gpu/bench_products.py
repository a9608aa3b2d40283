"""What the choice of matrix products gains: a layer's, and the head's, of Llama-3.1-8B's shape.

    python tests/gpu/bench_products.py [--rows 8,64,128,256,512,4096,8192]     prints one JSON object

Microseconds of torch's product and of the chosen one, weights taken in turn so that no cache has them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from components.engine.products import Job, Products, gpu_seconds, make_products

KINDS = {  # outputs, inputs, whether they are added to the residual
    "q/k/v": (6_144, 4_096, False),
    "output": (4_096, 4_096, True),
    "gate/up": (28_672, 4_096, False),
    "down": (4_096, 14_336, True),
    "head": (128_256, 4_096, False),
}
_MOST_HEAD_ROWS = 512
_WEIGHTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,16,32,64,96,128,192,256,384,512,1024,2048,4096,8192")
    given = parser.parse_args()
    device = torch.device("cuda")
    chosen, plain = make_products(device), Products()
    figures: dict[str, dict[str, list[float]]] = {}
    for name, (outputs, inputs, is_added) in KINDS.items():
        weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device) for _ in range(_WEIGHTS)]
        for rows in map(int, given.rows.split(",")):
            if name == "head" and rows > _MOST_HEAD_ROWS:
                continue
            chosen.tune([Job(weights, is_added, [rows])], lambda _: None)
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
            times = [_time(products, x, weights, is_added=is_added) for products in (plain, chosen)]
            figures.setdefault(str(rows), {})[name] = times
        del weights
    for kinds in figures.values():
        kinds["layer"] = [round(sum(kinds[name][i] for name in KINDS if name != "head"), 1) for i in range(2)]
    sys.stdout.write(json.dumps({"gpu": torch.cuda.get_device_name(), "torch_and_chosen_us": figures}, indent=1) + "\n")


def _time(products: Products, x: torch.Tensor, weights: list[torch.Tensor], *, is_added: bool) -> float:
    out = torch.zeros(len(x), len(weights[0]), dtype=x.dtype, device=x.device)

    def run() -> None:
        for weight in weights:
            if is_added:
                products.add(out, x, weight)
            else:
                products(x, weight, out)

    return round(gpu_seconds(run) * 1e6 / len(weights), 1)


if __name__ == "__main__":
    main()
