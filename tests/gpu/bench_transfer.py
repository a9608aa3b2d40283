"""KV between two processes on GPUs: our driver and planner beside bare NIXL, per-layer pieces and a plain copy.

    python tests/gpu/bench_transfer.py [--source cuda:0] [--target cuda:0] [--rounds 20] [--table] [--out FILE]

Llama-8B shapes in bfloat16 (32 layers, 8 KV heads of 128, blocks of 16 tokens: 2 MiB), 128, 1,024 and 8,192
tokens in shuffled blocks. In the same run, in turns, and all of it checked byte by byte:

    driver     our agent on its thread: prepare, post, poll; `told` adds the plan and both ways to the event loop
    bare       the same pieces, prepared beforehand, posted and polled in a tight loop by a NIXL agent of its own
    per layer  the same blocks by bare NIXL in pieces of one layer's K or V (32 KiB), as other layouts have it
    peer copy  as many bytes in one piece, by torch from device to device: the limit
    hand-over  from asking prefill until decode may go on: request, announcement, room, READ, lease, over ZeroMQ

`--table` adds block sizes and allocation orders at 8,192 tokens. Exit status 1 if the driver reaches less than
95 % of bare NIXL's bandwidth at any length. `--seconds` bounds each length. `--source cpu --target cpu` tries
the script without a GPU; its figures mean little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import torch
from transfer_sides import MAX_TOKENS, ORDERS, SOURCE_SEED, TARGET_SEED, Target, llama_layout, pick, source_process
from transfer_sides import start as start_driver
from transfer_ways import Bare, HandOver, PeerCopy, TooSlowError, driver_seconds

from components.kv.layout import block_bytes
from components.messages import KVLayout, RankRegion
from components.transfer.plan import route
from components.transfer.probe import Speed

LENGTHS = (128, 1_024, MAX_TOKENS)
BLOCK_SIZES = (16, 32, 64)
LEAST_SHARE = 0.95
SLOW_BYTES_PER_S = 2e9
"""Below it, pieces of one layer would take too long to be measured."""

PER_LAYER_TURNS = 5
"""Pieces of one layer are moved once in so many turns."""


class Ends(msgspec.Struct, frozen=True):
    """A source that is alive, and the target in this process."""

    layout: KVLayout
    target: Target
    peer: RankRegion
    address: str
    copy: PeerCopy


@contextmanager
def both_ends(source: str, target: str, block_size: int) -> Iterator[Ends]:
    """Pools on both devices, the source's in a process of its own."""
    layout = llama_layout(block_size)
    num_bytes = MAX_TOKENS // block_size * block_bytes(layout)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/source.sock"
        with source_process(source, block_size, address) as peer:
            yield Ends(layout, Target(layout, target), peer, address, PeerCopy(source, target, num_bytes))


async def measure_lengths(ends: Ends, rounds: int, limit_s: float) -> dict[str, Any]:
    """All figures of all lengths, medians over `rounds` or as many as the time allows."""
    layout, peer = ends.layout, ends.peer
    way = route(layout, layout)
    driver, region = await start_driver(layout, ends.target.pool)
    speed: Speed | None = await driver.link(peer, way)
    assert speed is not None
    whole = Bare(region, peer, block_bytes(layout))
    by_layer = Bare(region, peer, block_bytes(layout) // (2 * layout.num_layers))
    hand_over = HandOver(driver, peer, way, ends.address)
    report: dict[str, Any] = {"self_test_gb_s": speed.bytes_per_s / 1e9, "is_slow": speed.is_slow}
    for num_tokens in LENGTHS:
        ids = (
            pick(layout, num_tokens, order="shuffled", seed=SOURCE_SEED),
            pick(layout, num_tokens, order="shuffled", seed=TARGET_SEED),
        )
        num_bytes = len(ids[0]) * block_bytes(layout)
        times: dict[str, list[float]] = {}
        stop_s = time.monotonic() + limit_s
        for turn in range(rounds + 2):
            moved, told = await driver_seconds(driver, peer, way, *ids)
            bare_s = whole.seconds(*ids)
            turns = {"driver": moved, "told": told, "bare": bare_s, "peer_copy": ends.copy.seconds(num_bytes)}
            if turn % PER_LAYER_TURNS == 2 and num_bytes / bare_s > SLOW_BYTES_PER_S:
                turns["per_layer"] = by_layer.seconds(*ids)
            turns["hand_over"] = await hand_over.seconds(num_tokens, ids[1])
            if turn == 0:
                ends.target.verify(*ids)
            elif turn > 1:
                _note(times, turns)
            if turn > 1 and time.monotonic() > stop_s:
                break
        report[str(num_tokens)] = summary(num_bytes, times)
    await hand_over.close()
    by_layer.close()
    whole.close()
    await driver.close()
    return report


async def measure_orders(ends: Ends, rounds: int, limit_s: float) -> list[dict[str, Any]]:
    """One row of the table for each allocation order, at the longest length."""
    layout, peer = ends.layout, ends.peer
    way = route(layout, layout)
    driver, region = await start_driver(layout, ends.target.pool)
    await driver.connect(peer, way)
    bare = Bare(region, peer, block_bytes(layout))
    rows = []
    for order in ORDERS:
        ids = tuple(pick(layout, MAX_TOKENS, order=order, seed=seed) for seed in (SOURCE_SEED, TARGET_SEED))
        num_bytes = len(ids[0]) * block_bytes(layout)
        times: dict[str, list[float]] = {}
        stop_s = time.monotonic() + limit_s
        for turn in range(rounds + 1):
            moved, _ = await driver_seconds(driver, peer, way, ids[0], ids[1])
            turns = {"driver": moved, "bare": bare.seconds(*ids), "peer_copy": ends.copy.seconds(num_bytes)}
            if turn == 0:
                ends.target.verify(*ids)
            else:
                _note(times, turns)
            if turn > 0 and time.monotonic() > stop_s:
                break
        about = {"block_size": layout.block_size, "block_mib": block_bytes(layout) / (1 << 20), "order": order}
        rows.append(about | summary(num_bytes, times))
    bare.close()
    await driver.close()
    return rows


def _note(times: dict[str, list[float]], turns: dict[str, float]) -> None:
    for name, took in turns.items():
        times.setdefault(name, []).append(took)


def summary(num_bytes: int, times: dict[str, list[float]]) -> dict[str, float]:
    """Medians of one length's ways, and what they make of each other."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    found = {f"{name}_gb_s": round(num_bytes / seconds / 1e9, 2) for name, seconds in median.items()}
    found |= {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in median.items()}
    found["turns"] = len(times["driver"])
    found["share_of_bare"] = round(median["bare"] / median["driver"], 4)
    found["share_of_peer_copy"] = round(median["peer_copy"] / median["driver"], 4)
    if "per_layer" in median:
        found["times_per_layer"] = round(median["per_layer"] / median["driver"], 1)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [
        "| block | order | driver GB/s | bare NIXL GB/s | peer copy GB/s | driver / bare | driver / peer copy |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['block_size']} tokens, {r['block_mib']:g} MiB | {r['order']} | {r['driver_gb_s']:.0f} "
        f"| {r['bare_gb_s']:.0f} | {r['peer_copy_gb_s']:.0f} | {r['share_of_bare']:.2f} "
        f"| {r['share_of_peer_copy']:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Everything that was asked for, put into `report` as soon as it is known."""
    source, target, rounds, limit_s = arguments.source, arguments.target, arguments.rounds, arguments.seconds
    with both_ends(source, target, BLOCK_SIZES[0]) as ends:
        report |= asyncio.run(measure_lengths(ends, rounds, limit_s))
    _write(arguments.out, report)
    if arguments.table:
        report["table"] = []
        for block_size in BLOCK_SIZES:
            with both_ends(source, target, block_size) as ends:
                report["table"] += asyncio.run(measure_orders(ends, rounds, limit_s))
            _write(arguments.out, report)


def _write(out: Path | None, report: dict[str, Any]) -> None:
    if out:
        out.write_text(json.dumps(report, indent=2) + "\n")


def main() -> int:
    """Prints one JSON object, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="cuda:0")
    parser.add_argument("--target", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="longest time for one length or row")
    parser.add_argument("--table", action="store_true", help="block sizes and allocation orders as well")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report: dict[str, Any] = {
        "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "commit": found.stdout.strip(),
        "torch": torch.__version__, "source": arguments.source, "target": arguments.target,
    }  # fmt: skip
    if torch.cuda.is_available():
        report["gpu"] = torch.cuda.get_device_name()
    try:
        measure(arguments, report)
    except TooSlowError as error:
        report["stopped"] = str(error)
    _write(arguments.out, report)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if rows := report.get("table"):
        sys.stdout.write(table(rows) + "\n")
    is_good = all(report.get(str(n), {}).get("share_of_bare", 0.0) >= LEAST_SHARE for n in LENGTHS)
    return 0 if is_good and "stopped" not in report else 1


if __name__ == "__main__":
    sys.exit(main())
