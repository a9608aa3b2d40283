"""Aggregated serving: every worker prefills and decodes."""

from components import Router, Worker
from frontends import OpenAIFrontend, Processor
from graph import Graph, Node

frontend = Node(OpenAIFrontend, port=8000)
processor = Node(Processor)
router = Node(Router, policy="kv")
worker = Node(Worker, gpus=1)

graph = Graph(
    "agg",
    frontend.requests >> processor.requests,  # text in, text out
    processor.placement >> router.placement,  # which worker?
    processor.tokens >> worker.requests,  # token ids in, token ids out
    worker.events >> router.events,  # which blocks live where, and how busy
)
