"""The gateway as a process: options, start, and an end that leaves no request without an answer."""

import argparse
import asyncio
import ipaddress
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from ..addresses import DEFAULT_PORTS
from ..families import default_registry
from ..fetch import HttpFetcher
from ..pool import DecodePool
from ..protocols import ModelFamily, WorkerClient
from .app import create_app
from .chat import ChatService, Settings
from .template import load_template
from .text import TextTokenizer


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    defaults = Settings("", 0)
    parser = argparse.ArgumentParser(
        prog="python -m examples.m3_serving.gateway",
        description="OpenAI's chat API in front of workers that generate; see docs/gateway.md.",
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="checkpoint folder; its weights are not read")
    add("--worker", action="append", required=True, metavar="HOST:PORT", help="repeatable")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=int, default=8000, help="0 takes a free one; default: %(default)s")
    add("--served-model-name", help="default: the folder's name")
    add("--chat-template", type=Path, help="Jinja file; default: the checkpoint's")
    add("--context-tokens", type=int, help="default: the checkpoint's max_position_embeddings")
    add(
        "--default-max-tokens",
        type=int,
        default=defaults.default_max_tokens,
        help="of an answer whose request does not say; default: %(default)s",
    )
    add("--sizing", choices=["area", "long_side"], help="how media are resized; default: area")
    add("--default-fps", type=float, help="frames a second of a clip; default: the family's")
    add("--keep-last", action="store_true", default=None, help="always a clip's last frame")
    add("--decoders", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    add("--max-requests", type=int, default=defaults.max_requests, help="default: %(default)s")
    add(
        "--max-client-requests",
        type=int,
        default=defaults.max_client_requests,
        help="of one Authorization header, else of one address; default: %(default)s",
    )
    add(
        "--max-bytes",
        type=int,
        default=defaults.max_bytes,
        help="held for all requests; default: %(default)s",
    )
    add(
        "--max-request-bytes",
        type=int,
        default=defaults.max_request_bytes,
        help="held for one request; default: %(default)s",
    )
    add("--fetch-s", type=float, default=30.0, help="for one media URL; default: %(default)s")
    add(
        "--stall-s",
        type=float,
        default=defaults.stall_s,
        help="that a worker may be silent; default: %(default)s",
    )
    add(
        "--drain-s",
        type=float,
        default=defaults.drain_s,
        help="for running requests after SIGTERM; default: %(default)s",
    )
    add(
        "--allow-media-network",
        type=ipaddress.ip_network,
        action="append",
        default=[],
        metavar="CIDR",
        help="media URLs may lead there although it is not public; for one's own media server",
    )
    add(
        "--allow-media-port",
        type=int,
        action="append",
        default=[],
        metavar="PORT",
        help="of media URLs, beside 80 and 443",
    )
    return parser.parse_args(arguments)


def load_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json; ValueError if it is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{folder} must hold config.json: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} must hold an object")
    return config


def context_tokens(config: dict[str, Any]) -> int:
    """What the checkpoint was trained for; ValueError if it does not say."""
    for part in (config.get("text_config"), config):
        if isinstance(part, dict) and isinstance(part.get("max_position_embeddings"), int):
            return part["max_position_embeddings"]
    raise ValueError("config.json does not say max_position_embeddings: give --context-tokens")


def choose_family(config: dict[str, Any], options: argparse.Namespace) -> ModelFamily:
    """The checkpoint's family with what the options change; ValueError if it has no such option."""
    name = str(config.get("model_type"))
    try:
        family = default_registry().get(name)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    changes = {
        "default_sizing": options.sizing,
        "default_fps": options.default_fps,
        "keep_last": options.keep_last,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    try:
        return type(family)(**changes) if changes else family
    except TypeError:
        raise ValueError(f"{name} has no option for {', '.join(changes)}") from None


def build_service(options: argparse.Namespace, client: WorkerClient) -> ChatService:
    """Everything but the socket.

    Raises:
        ValueError: an option or a file of the checkpoint is not usable.
    """
    config = load_config(options.model)
    family = choose_family(config, options)
    settings = Settings(
        model_name=options.served_model_name or options.model.resolve().name,
        context_tokens=options.context_tokens or context_tokens(config),
        default_max_tokens=options.default_max_tokens,
        max_requests=options.max_requests,
        max_client_requests=options.max_client_requests,
        max_bytes=options.max_bytes,
        max_request_bytes=options.max_request_bytes,
        stall_s=options.stall_s,
        drain_s=options.drain_s,
    )
    fetcher = HttpFetcher(
        total_s=options.fetch_s,
        allowed_ports=DEFAULT_PORTS | set(options.allow_media_port),
        allowed_networks=options.allow_media_network,
    )
    return ChatService(
        settings,
        family=family,
        tokenizer=TextTokenizer.from_folder(options.model),
        template=load_template(options.model, family, options.chat_template),
        fetcher=fetcher,
        pool=DecodePool(options.decoders),
        client=client,
    )


class _Server(uvicorn.Server):
    """Says where it listens, and gives running requests their time after a signal."""

    def __init__(self, config: uvicorn.Config, service: ChatService) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            name = self._service.settings.model_name
            print(f"gateway: {name} at http://{shown}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        if hasattr(self, "_loop"):
            self._loop.call_soon_threadsafe(
                self._loop.call_later, self._service.settings.drain_s, self._service.aborting.set
            )
        super().handle_exit(sig, frame)


def serve(service: ChatService, host: str, port: int) -> bool:
    """Serves until SIGTERM or SIGINT; whether it ever listened.

    From then on nothing new is accepted. Running requests have `drain_s`; those that are not done
    then end with an error, as a status or as an event of their stream.
    """
    config = uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        loop="asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(service.settings.drain_s) + 10,
    )
    server = _Server(config, service)
    # The server raises the signal again when it is done, which would end the process by it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *arguments: None)
    server.run()
    return server.started


def connect_workers(addresses: Sequence[str]) -> WorkerClient:
    """The gRPC client of these workers."""
    from ..wire.client import GrpcWorkerClient

    return GrpcWorkerClient(addresses)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2, and one line on stderr, for what is refused."""
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        service = build_service(options, connect_workers(options.worker))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if serve(service, options.host, options.port) else 1
