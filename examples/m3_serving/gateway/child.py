"""A child of the decoding pool: one job after the other, under limits the kernel enforces."""

import os
import resource
import socket
import sys
from typing import Any

from . import channel
from .errors import GatewayError
from .jobs import run_job


def _limit_process(memory_bytes: int) -> None:
    """Limits that hold for the life of the process.

    Args:
        memory_bytes: address space beyond what the libraries already take.
    """
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = mapped + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # a decoder has no file to write


def _limit_cpu(seconds: int) -> None:
    """From now on so many seconds of CPU time, then the kernel kills the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    used = int(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds + 1, hard))


def _warm_up() -> None:
    """Loads what the libraries load late, so that no job pays for it or fails under its limits."""
    from PIL import Image

    Image.init()


def _answer(data: bytes, job: dict[str, Any]) -> tuple[dict[str, Any], memoryview]:
    """The job's answer or error; an allocator that failed once makes the process retire."""
    nothing = memoryview(b"")
    try:
        meta, patches = run_job(data, job)
    except GatewayError as error:
        retire = isinstance(error.__cause__, MemoryError)
        return {"error": error.code, "message": error.message, "retire": retire}, nothing
    except MemoryError:
        message = "preparing the medium needs more memory than it may take"
        return {"error": "media_too_large", "message": message, "retire": True}, nothing
    return meta, memoryview(patches).cast("B")


def main(fd: int, memory_bytes: int, cpu_seconds: int, max_input_bytes: int) -> None:
    """Serves jobs from the socket `fd` until the pool closes it."""
    _warm_up()
    _limit_process(memory_bytes)
    with socket.socket(fileno=fd) as sock:
        channel.send(sock, {"ready": os.getpid()}, memoryview(b""))
        while True:
            try:
                job, data = channel.receive(sock, max_input_bytes)
                _limit_cpu(cpu_seconds)
                header, patches = _answer(bytes(data), job)
                channel.send(sock, header, patches)
            except (channel.ChannelClosed, OSError):
                return  # the server is gone
            del data, patches  # nothing of a job stays while waiting for the next


def run_from_arguments() -> None:
    """`main` with the numbers of the command line."""
    main(*map(int, sys.argv[1:5]))
