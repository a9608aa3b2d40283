"""The token side: router and workers. Names load on first use, so that declaring a graph stays cheap."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.decode import DecodeWorker
    from components.prefill import PrefillWorker
    from components.router import Router
    from components.worker import Worker

__all__ = ["DecodeWorker", "PrefillWorker", "Router", "Worker"]

_HOMES = {"DecodeWorker": "decode", "PrefillWorker": "prefill", "Router": "router", "Worker": "worker"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'components' has no attribute {name!r}")
    return getattr(import_module(f"components.{_HOMES[name]}"), name)
