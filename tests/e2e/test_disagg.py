"""The disaggregated graph from outside: what moves over NIXL, when, and what is left when a client goes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest
from completions import complete
from harness import ServedGraph, serving
from prompts import Prompt, counting, text_ids

BLOCK = 16
BLOCK_BYTES_BF16 = 3 * 30 * 2 * BLOCK * 64 * 2  # heads, layers, K and V, tokens, head size, bytes


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGraph]:
    with serving("graph/disagg.py", log=tmp_path_factory.mktemp("disagg") / "serve.log") as served:
        yield served


def test_counting_prompt_is_prefilled_remotely_and_continued(graph: ServedGraph) -> None:
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": counting(1),
        "max_tokens": 120,
        "temperature": 0,
        "headrace": {"timing": True},
    }
    reply = graph.client.post("/v1/completions", json=body).raise_for_status().json()
    assert reply["choices"][0]["text"] == "".join(f" {n}," for n in range(16, 46))
    assert reply["headrace"]["mode"] == "remote"
    assert reply["headrace"]["prefill_worker"] == "prefill/0"


@pytest.mark.parametrize("num_tokens", [17, 32, 33, 512, 1000])
def test_moves_what_the_layout_predicts(graph: ServedGraph, num_tokens: int) -> None:
    ids = text_ids()[num_tokens : 2 * num_tokens]
    timing = complete(graph.url, [Prompt("p", tuple(ids), 4)], cache_salt=f"moves-{num_tokens}")["p"].headrace
    blocks = -(-num_tokens // BLOCK)
    assert timing is not None
    moved = (timing["mode"], timing["blocks_moved"], timing["bytes_moved"])
    assert moved == ("remote", blocks, blocks * BLOCK_BYTES_BF16)
    assert timing["descriptors"] == blocks


def test_reads_overlap_prefill(graph: ServedGraph) -> None:
    prompt = Prompt("long", tuple(text_ids()[:2000]), 4)
    timing = complete(graph.url, [prompt], cache_salt="overlap")["long"].headrace
    assert timing is not None
    chunks = [at for what, at in timing["timeline"] if what == "chunk"]
    reads = [at for what, at in timing["timeline"] if what == "read_done"]
    assert len(chunks) >= 4
    assert reads[0] < chunks[-1], "the first READ was done before the last chunk was computed"


def test_cached_prompt_is_not_moved_again(graph: ServedGraph) -> None:
    prompt = Prompt("again", tuple(text_ids()[:600]), 4)
    first, second = (complete(graph.url, [prompt], cache_salt="again")["again"] for _ in range(2))
    assert first.text == second.text
    assert first.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.usage["prompt_tokens_details"]["cached_tokens"] == 592


@pytest.mark.parametrize("after_s", [0.0, 0.15, 1.0])
def test_client_that_leaves_frees_both_sides(graph: ServedGraph, after_s: float) -> None:
    body = json.dumps(
        {
            "model": "smollm2-135m-instruct",
            "prompt": text_ids()[:1500],
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": f"leave-{after_s}",
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", graph.port)) as client:
        client.sendall(head.encode() + body.encode())
        time.sleep(after_s)
    left = time.monotonic()
    while graph.metric("headrace_kv_blocks_used") or graph.metric("headrace_requests_running"):
        assert time.monotonic() - left < 3.0, "blocks were not freed"
        time.sleep(0.05)
