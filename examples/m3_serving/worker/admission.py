"""Room for requests: by count and by bytes, decided before their bytes are read."""

from dataclasses import dataclass


class NoRoom(Exception):
    """The worker is full now."""


@dataclass(frozen=True)
class AdmissionLimits:
    """What all accepted requests may take together."""

    max_requests: int = 64
    max_payload_bytes: int = 2 << 30


class Place:
    """A request's share; give it back once."""

    def __init__(self, admission: "Admission", num_bytes: int) -> None:
        """Made by `Admission.take`."""
        self._admission, self._num_bytes = admission, num_bytes

    def give_back(self) -> None:
        """When nothing of the request is in memory any more. More calls change nothing."""
        if self._admission is not None:
            self._admission.requests -= 1
            self._admission.payload_bytes -= self._num_bytes
            self._admission = None


class Admission:
    """Counts what was admitted. Used by the event loop's thread alone."""

    def __init__(self, limits: AdmissionLimits) -> None:
        """Nothing is admitted yet."""
        self.limits = limits
        self.requests = 0
        self.payload_bytes = 0

    def take(self, num_bytes: int) -> Place:
        """A place for a request with so many bytes of patches; NoRoom if there is none."""
        limits = self.limits
        if self.requests >= limits.max_requests:
            raise NoRoom(f"the worker has {self.requests} requests, as many as it takes")
        if self.payload_bytes + num_bytes > limits.max_payload_bytes:
            raise NoRoom(
                f"the worker has {self.payload_bytes} bytes of media and takes "
                f"{limits.max_payload_bytes}; the request has {num_bytes}"
            )
        self.requests += 1
        self.payload_bytes += num_bytes
        return Place(self, num_bytes)
