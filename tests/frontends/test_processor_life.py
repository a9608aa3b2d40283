"""The processor as the launcher sees it: what the graph decides for it, its start and its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from frontend_fakes import FakeClient, FakeContext

from components import Worker
from frontends import Processor
from frontends.processor import ProcessorOptions
from graph import Component, EdgeView, GraphView, LaunchError, NodeView


def make_node(name: str, component: type[Component], **options: Any) -> NodeView:
    return NodeView(name, component, 1, 0, 1, None, options, {})


def make_graph(*workers: NodeView, **options: Any) -> tuple[NodeView, GraphView]:
    """A processor linked to these workers."""
    processor = make_node("processor", Processor, **{"hash_unit": 0, "max_model_len": None, **options})
    edges = tuple(EdgeView("processor", "tokens", worker.name, "requests") for worker in workers)
    nodes = {node.name: node for node in (processor, *workers)}
    return processor, GraphView("g", "g.py", nodes, edges)


def test_lengths_and_hash_unit_follow_from_the_workers() -> None:
    large = make_node("large", Worker, block_size=64, max_model_len=None)
    small = make_node("small", Worker, block_size=16, max_model_len=4096)
    assert Processor.resolve(*make_graph(large, small)) == {"hash_unit": 16, "max_model_len": 4096}
    assert Processor.resolve(*make_graph(large)) == {"hash_unit": 64}
    assert Processor.resolve(*make_graph(small, hash_unit=8, max_model_len=100)) == {}


def test_starts_and_stops_with_its_own_model() -> None:
    async def main() -> None:
        context = FakeContext(tokens=FakeClient(), placement=FakeClient(is_linked=False))
        processor = Processor(ProcessorOptions())
        await processor.start(context)
        assert "requests" in context.handlers
        await processor.drain()
        await processor.stop()
        await processor.stop()
        context.cancel_tasks()

    asyncio.run(main())


def test_a_folder_without_a_tokenizer_is_a_start_fault_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    async def main() -> None:
        context = FakeContext(tokens=FakeClient(), placement=FakeClient(is_linked=False))
        processor = Processor(ProcessorOptions(model=str(tmp_path)))
        with pytest.raises(LaunchError, match=r"has no tokenizer\.json; convert"):
            await processor.start(context)
        await processor.stop()

    asyncio.run(main())
