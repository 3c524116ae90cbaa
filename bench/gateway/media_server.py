"""A server of local media: a process of the benchmark.

python -m bench.gateway.media_server FOLDER

Every file of the folder, under any query, so that one file can be many URLs.
"""

import asyncio
import sys
from pathlib import Path

from aiohttp import web


async def serve(folder: Path) -> None:
    """Prints its port, then serves until it is killed."""
    files = {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}

    async def handle(request: web.BaseRequest) -> web.Response:
        body = files.get(request.path)
        return web.Response(status=404) if body is None else web.Response(body=body)

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
