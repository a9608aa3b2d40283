"""Disaggregated serving: prefill and decode on separate workers, KV blocks over NIXL."""

from components import DecodeWorker, PrefillWorker, Router
from frontends import OpenAIFrontend, Processor
from graph import Graph, Node

transceiver = {"backend": "NIXL"}

frontend = Node(OpenAIFrontend, port=8000)
processor = Node(Processor)
router = Node(Router, policy="kv")
prefill = Node(PrefillWorker, gpus=1, cache_transceiver_config=transceiver)
decode = Node(DecodeWorker, gpus=1, cache_transceiver_config=transceiver)

graph = Graph(
    "disagg",
    frontend.requests >> processor.requests,  # text in, text out
    processor.placement >> router.placement,  # which workers?
    processor.tokens >> decode.requests,  # token ids in, token ids out
    decode.prefill >> prefill.requests,  # compute this prompt for me
    prefill.kv >> decode.kv,  # KV blocks, over NIXL
    prefill.events >> router.events,  # which blocks live where, and how busy
    decode.events >> router.events,
)
