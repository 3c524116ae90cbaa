"""The worker process: `python -m examples.m3_serving.worker --model DIR --listen ADDRESS`."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config import DTYPES
from ..engine import Engine
from .admission import AdmissionLimits
from .server import WorkerOptions, WorkerServer

READY = "listening on "
"""what the process prints before its address, once requests may come"""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.m3_serving.worker", description=__doc__
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        help="host:port (port 0: any) or unix:PATH. There is no encryption and no login: only "
        "gateways may be able to reach it. Default: %(default)s",
    )
    parser.add_argument(
        "--text-only", action="store_true", help="load no vision tower (it needs transformers)"
    )
    parser.add_argument("--cache-tokens", type=int, default=16_384, help="default: %(default)s")
    parser.add_argument(
        "--step-tokens", type=int, default=512, help="tokens a step; default: %(default)s"
    )
    parser.add_argument(
        "--max-requests", type=int, default=64, help="at a time; default: %(default)s"
    )
    parser.add_argument(
        "--max-media-mib",
        type=int,
        default=2048,
        help="of all requests' images and clips; default: %(default)s",
    )
    parser.add_argument(
        "--feature-mib",
        type=int,
        default=256,
        help="of the vision tower's outputs, kept for media that come again; default: %(default)s",
    )
    parser.add_argument(
        "--grace", type=float, default=10.0, help="seconds for running answers at the end"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: the checkpoint's")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    return parser.parse_args(arguments)


async def serve(engine: Engine, options: argparse.Namespace) -> None:
    """Until the process is told to end."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    limits = AdmissionLimits(options.max_requests, options.max_media_mib << 20)
    server = WorkerServer(engine, WorkerOptions(admission=limits))
    print(f"{READY}{await server.start(options.listen)}", flush=True)
    await ending.wait()
    await server.close(options.grace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2, and one line on stderr, for what is refused."""
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        engine = Engine.from_folder(
            options.model,
            dtype=DTYPES[options.dtype] if options.dtype else None,
            device=options.device,
            vision=not options.text_only,
            cache_tokens=options.cache_tokens,
            max_step_tokens=options.step_tokens,
            feature_bytes=options.feature_mib << 20,
        )
        asyncio.run(serve(engine, options))
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
