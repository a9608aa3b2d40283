"""Compiles FlashInfer's modules for the tests and benchmarks here, side by side, before anything waits for them.

    python tests/gpu/compile_kernels.py [--jobs 16] [--only 64] [--list]

Chunks run on fa3 on Hopper; decodes have a kernel of ours. Each module is built in a folder of its own, as FlashInfer's
first use would: a second build finds it done.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec


class Kind(msgspec.Struct, frozen=True):
    """A module, and who asks for it."""

    head_dim: int
    backend: str
    has_window: bool
    is_capped: bool
    asked_by: str

    @property
    def name(self) -> str:
        extras = [name for name, is_set in (("window", self.has_window), ("cap", self.is_capped)) if is_set]
        return " ".join([f"{self.backend} heads of {self.head_dim}", *extras])


KINDS = (
    Kind(64, "fa3", False, False, "llama, qwen, mixtral: chunks"),
    Kind(64, "fa3", True, False, "mistral-window: chunks"),
    Kind(64, "fa3", False, True, "gemma2: its full layers"),
    Kind(64, "fa3", True, True, "gemma2: its sliding layers"),
    Kind(128, "fa3", False, False, "llama-8b: chunks"),
)


def spec_of(kind: Kind) -> Any:
    """How FlashInfer builds the module."""
    import torch
    from flashinfer.jit import gen_batch_prefill_module

    from components.engine.flash import module_arguments

    arguments = module_arguments(torch.bfloat16, kind.head_dim, has_window=kind.has_window, is_capped=kind.is_capped)
    return gen_batch_prefill_module(kind.backend, *arguments)


def build(kind: Kind, spec: Any) -> str:
    """Compiles a module unless it is there; a line that tells what it took."""
    began_s = time.monotonic()
    spec.build(verbose=False)
    size = spec.get_library_path().stat().st_size / 1e6
    return f"{kind.name}: {time.monotonic() - began_s:.0f} s, {size:.1f} MB ({kind.asked_by})"


def main() -> int:
    """One line for each module as it is done; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    parser.add_argument(
        "--only", type=int, choices=sorted({kind.head_dim for kind in KINDS}), help="heads of this size"
    )
    parser.add_argument("--list", action="store_true", help="compile nothing")
    args = parser.parse_args()
    began_s = time.monotonic()
    specs = {kind: spec_of(kind) for kind in KINDS if args.only in (None, kind.head_dim)}
    missing = {kind: spec for kind, spec in specs.items() if not spec.is_aot}
    for kind, spec in specs.items():
        if args.list or kind not in missing:
            there = "prebuilt" if spec.is_aot else "compiled" if spec.is_compiled else "missing"
            sys.stdout.write(f"{kind.name}: {there}, {len(spec.sources)} sources ({kind.asked_by}) {spec.name}\n")
    if args.list or not missing:
        return 0
    os.environ["MAX_JOBS"] = str(max(1, math.ceil(args.jobs / len(missing))))  # of each module's ninja
    num_failed = 0
    with ThreadPoolExecutor(min(args.jobs, len(missing))) as builders:
        building = {builders.submit(build, kind, spec): kind for kind, spec in missing.items()}
        for done in as_completed(building):
            error = done.exception()
            num_failed += error is not None
            sys.stdout.write((f"{building[done].name} failed: {str(error)[-3000:]}" if error else done.result()) + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(missing) - num_failed} of {len(missing)} modules in {time.monotonic() - began_s:.0f} s\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
