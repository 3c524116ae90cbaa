"""What Prometheus is told. docs/gateway.md lists the names."""

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from ..protocols import WorkerHealth

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One gateway's numbers, in a registry of its own."""

    def __init__(self) -> None:
        """All at zero."""
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        prefix = "m3_gateway"
        self.requests = Counter(
            f"{prefix}_requests", "chat requests by HTTP status", ["status"], registry=registry
        )
        self.errors = Counter(
            f"{prefix}_errors", "refused or failed requests by code", ["code"], registry=registry
        )
        self.disconnects = Counter(
            f"{prefix}_disconnects", "requests whose client left first", registry=registry
        )
        self.in_flight = Gauge(
            f"{prefix}_requests_in_flight", "from first byte to last", registry=registry
        )
        self.bytes_in_flight = Gauge(
            f"{prefix}_bytes_in_flight", "of bodies, media and patches", registry=registry
        )
        self.decoders = Gauge(
            f"{prefix}_decoder_processes", "children of the decode pool", registry=registry
        )
        self.media = Counter(
            f"{prefix}_media", "images and clips prepared", ["modality"], registry=registry
        )
        self.tokens = Counter(
            f"{prefix}_tokens",
            "prompt, cached, image, video and completion tokens",
            ["kind"],
            registry=registry,
        )
        self.phase = Histogram(
            f"{prefix}_phase_seconds",
            "body, render, media, expand: time before a worker is asked",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            f"{prefix}_first_token_seconds",
            "from a request's first byte to its answer's first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            f"{prefix}_request_seconds",
            "from a request's first byte to its answer's last",
            buckets=_SECONDS,
            registry=registry,
        )
        self._worker_ready = Gauge(
            f"{prefix}_worker_ready", "1 or 0", ["worker"], registry=registry
        )
        self._worker_requests = Gauge(
            f"{prefix}_worker_requests", "at a worker", ["worker", "state"], registry=registry
        )

    def set_workers(self, workers: Sequence[WorkerHealth]) -> None:
        """What is known of the workers now."""
        for worker in workers:
            self._worker_ready.labels(worker.name).set(worker.ready)
            self._worker_requests.labels(worker.name, "running").set(worker.running)
            self._worker_requests.labels(worker.name, "waiting").set(worker.waiting)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
