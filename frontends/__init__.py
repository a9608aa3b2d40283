"""The text side: HTTP ingress and the pool of text processors. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frontends.ingress import OpenAIFrontend
    from frontends.processor import Processor

__all__ = ["OpenAIFrontend", "Processor"]

_HOMES = {"OpenAIFrontend": "ingress", "Processor": "processor"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'frontends' has no attribute {name!r}")
    return getattr(import_module(f"frontends.{_HOMES[name]}"), name)
