"""One helper for running coroutines side by side."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; at the first error, or when cancelled itself, stops the others.

    Plain `asyncio.gather` lets the others run on, fetching and decoding for a request that has its
    answer already.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # they know errors that know this frame, which would keep the others' results
        task = None
