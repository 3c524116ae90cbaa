"""A gateway with a worker that does nothing but answer, stall or die: a process of the benchmark.

    python -m bench.gateway.serve FOLDER MEDIA_PORT SCRIPT

SCRIPT is JSON: {"tokens": 16, "delay_s": 0, "stall_every": 0, "die_every": 0, "stall_s": 60}.
"""

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

from examples.m3_serving.gateway.errors import WorkerLost
from examples.m3_serving.gateway.protocols import GeneratedTokens, GenerateRequest, WorkerHealth
from examples.m3_serving.gateway.server.command import build_service, parse_arguments, serve


class ScriptedWorker:
    """A `WorkerClient`."""

    def __init__(self, script: dict[str, Any]) -> None:
        """See the module."""
        self._script = script
        self._count = itertools.count(1)
        self._running = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedTokens]:
        """`tokens` tokens one by one; every so many requests half of them and then no more."""
        script, number = self._script, next(self._count)
        stalls = script["stall_every"] and number % script["stall_every"] == 0
        dies = script["die_every"] and number % script["die_every"] == 0
        self._running += 1
        try:
            for i in range(script["tokens"]):
                if i == script["tokens"] // 2 and dies:
                    raise WorkerLost("the worker died, as it was told to")
                if i == script["tokens"] // 2 and stalls:
                    await asyncio.Event().wait()
                await asyncio.sleep(script["delay_s"])
                last = i == script["tokens"] - 1
                yield GeneratedTokens((64 + i % 26,), "length" if last else None)
        finally:
            self._running -= 1

    async def health(self) -> list[WorkerHealth]:
        """Always well."""
        return [WorkerHealth("scripted", True, self._running, 0)]

    async def close(self) -> None:
        """Nothing to close."""


def main(folder: str, media_port: str, script: str) -> int:
    """Serves until SIGTERM."""
    settings = json.loads(script)
    logging.disable(logging.WARNING)  # every worker that dies as told would be a line
    options = ["--model", folder, "--worker", "scripted", "--port", "0"]
    options += ["--served-model-name", "bench", "--stall-s", str(settings["stall_s"])]
    options += ["--allow-media-network", "127.0.0.1/32", "--allow-media-port", media_port]
    parsed = parse_arguments(options)
    return 0 if serve(build_service(parsed, ScriptedWorker(settings)), "127.0.0.1", 0) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
