"""What all tests share: `async def` tests run on an event loop of their own."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test to its end; tasks it leaves behind are cancelled with its loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**wanted))
    return True
