"""How much may be going on at a time: requests, requests of one client, bytes held for them.

What does not fit is refused at once (429), not queued: a queue only moves the wait to where nobody
can decide otherwise, and holds the bodies meanwhile.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import BodyTooLarge, Overloaded


class Lease:
    """One request's share of what is counted."""

    def __init__(self, admission: "Admission") -> None:
        """Holds nothing yet."""
        self._admission = admission
        self.bytes = 0

    def hold(self, count: int) -> None:
        """Counts bytes that the request makes the server hold from now on.

        Raises:
            BodyTooLarge: the request alone holds more than any may.
            Overloaded: all requests together do.
        """
        limits = self._admission
        if self.bytes + count > limits.max_request_bytes:
            raise BodyTooLarge(
                f"a request may hold {limits.max_request_bytes} bytes of body, media and prepared "
                "media together; send fewer or smaller media"
            )
        if limits.bytes + count > limits.max_bytes:
            raise Overloaded(f"the {limits.max_bytes} bytes that requests may hold are in use")
        self.bytes += count
        limits.bytes += count

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """The same for bytes that are free again soon. Raises as `hold`."""
        self.hold(count)
        try:
            yield
        finally:
            self.bytes -= count
            self._admission.bytes -= count


class Admission:
    """Counts requests from their first byte to their last."""

    def __init__(
        self, max_requests: int, max_client_requests: int, max_bytes: int, max_request_bytes: int
    ) -> None:
        """Limits, all at least 1; `max_request_bytes` is cut to `max_bytes`."""
        if min(max_requests, max_client_requests, max_bytes, max_request_bytes) < 1:
            raise ValueError("every limit of requests and bytes must be at least 1")
        self.max_requests, self.max_client_requests = max_requests, max_client_requests
        self.max_bytes, self.max_request_bytes = max_bytes, min(max_request_bytes, max_bytes)
        self.requests = 0
        self.bytes = 0
        self._clients: Counter[str] = Counter()

    @contextmanager
    def request(self, client: str) -> Iterator[Lease]:
        """One more request while inside.

        Args:
            client: whose requests are counted together.

        Raises:
            Overloaded: too many in all, or of this client.
        """
        if self.requests >= self.max_requests:
            raise Overloaded(f"{self.max_requests} requests are being served, as many as may be")
        if self._clients[client] >= self.max_client_requests:
            raise Overloaded(
                f"{self.max_client_requests} requests of this client are being served, as many as "
                "may be"
            )
        lease = Lease(self)
        self.requests += 1
        self._clients[client] += 1
        try:
            yield lease
        finally:
            self.requests -= 1
            self.bytes -= lease.bytes
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]
