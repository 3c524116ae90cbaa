"""What can go wrong with a request, as exceptions that already know their HTTP answer.

Whatever a client sent that cannot be served is one of these, with a 4xx status and a text that says
what is wrong. The others say whose fault it was: 429 when this gateway or its workers are full, 504
when the host of the client's URL or the worker is too slow, 502 and 503 when a worker died or none
is there, 503 when the gateway is being stopped, 500 for a fault of its own.
"""

from typing import ClassVar

MAX_MESSAGE_CHARS = 1000
"""of what a client is told; a message may quote the request"""


class GatewayError(Exception):
    """A refusal with an HTTP status and an OpenAI-style code. Raise one of the subclasses."""

    status: int
    code: ClassVar[str]
    kind: str = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Message for the client, and the request's field it is about."""
        super().__init__(message)
        self.message = message
        self.param = param

    def to_openai(self) -> dict[str, dict[str, str | None]]:
        """The body of the HTTP answer."""
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 3] + "..."
        return {
            "error": {
                "message": message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidParameter(GatewayError):
    """A field is out of its range, of the wrong type, or contradicts another."""

    status, code = 400, "invalid_parameter"


class InvalidMedia(GatewayError):
    """The bytes are not a readable image or clip of an accepted format."""

    status, code = 400, "invalid_media"


class InvalidUrl(GatewayError):
    """The URL cannot be parsed, or has a scheme, port, user part or host that is not allowed."""

    status, code = 400, "invalid_media_url"


class ForbiddenAddress(GatewayError):
    """The URL's host has an address that is not on the public internet."""

    status, code = 400, "forbidden_media_address"


class MediaUnreachable(GatewayError):
    """The URL's host cannot be found or reached, or did not answer with the medium."""

    status, code = 400, "media_unreachable"


class MediaTimeout(GatewayError):
    """The URL's host did not deliver in time."""

    status, code, kind = 504, "media_timeout", "upstream_error"


class MediaTooLarge(GatewayError):
    """More bytes, pixels, frames or memory than one medium may take."""

    status, code = 413, "media_too_large"


class MediaTooSlow(GatewayError):
    """Decoding takes more time than one medium may take."""

    status, code = 400, "media_too_slow"


class DecoderCrashed(GatewayError):
    """The process that decoded the medium died of it."""

    status, code = 400, "media_decoder_crashed"


class UnsupportedParameter(GatewayError):
    """A field that this server does not have; ignoring it would answer another question."""

    status, code = 400, "unsupported_parameter"


class InvalidBody(GatewayError):
    """The body is no UTF-8, no JSON, or no JSON object."""

    status, code = 400, "invalid_body"


class BodyTooLarge(GatewayError):
    """The body, or everything a request makes the server hold, has too many bytes."""

    status, code = 413, "request_too_large"


class BodyTimeout(GatewayError):
    """The body did not arrive in time."""

    status, code = 408, "request_timeout"


class UnsupportedContentType(GatewayError):
    """The body is declared to be something else than JSON."""

    status, code = 415, "unsupported_content_type"


class ModelNotFound(GatewayError):
    """Another model is served here."""

    status, code = 404, "model_not_found"


class NotFound(GatewayError):
    """No such path."""

    status, code = 404, "not_found"


class MethodNotAllowed(GatewayError):
    """The path exists, with another method."""

    status, code = 405, "method_not_allowed"


class TooManyItems(GatewayError):
    """More images or clips than a request may carry."""

    status, code = 400, "too_many_media"


class PromptMismatch(GatewayError):
    """Media and their places in the prompt do not correspond."""

    status, code = 400, "media_prompt_mismatch"


class PromptTooLong(GatewayError):
    """The expanded prompt does not fit the context."""

    status, code = 400, "context_length_exceeded"


class Overloaded(GatewayError):
    """No room for more work now; the same request may succeed later."""

    status, code, kind = 429, "overloaded", "rate_limit_error"


class WorkerBusy(GatewayError):
    """Every worker is at its limit of bytes or of requests; the same may succeed later."""

    status, code, kind = 429, "worker_busy", "rate_limit_error"


class WorkerUnavailable(GatewayError):
    """No worker is healthy."""

    status, code, kind = 503, "worker_unavailable", "server_error"


class WorkerLost(GatewayError):
    """The worker died, or its connection broke, under the request."""

    status, code, kind = 502, "worker_lost", "server_error"


class WorkerRejected(GatewayError):
    """The worker refused the request; its message says which field and why.

    Status 400 for what the request asks; 500 where gateway and worker disagree about something that
    no client can choose, such as the shape of a tensor.
    """

    status, code = 400, "worker_rejected"

    def __init__(self, message: str, *, param: str | None = None, internal: bool = False) -> None:
        """Takes the worker's message; `internal` if the request's author cannot be to blame."""
        super().__init__(message, param=param)
        if internal:
            self.status, self.kind = 500, "server_error"


class WorkerTimeout(GatewayError):
    """The worker did not say anything for too long."""

    status, code, kind = 504, "worker_timeout", "server_error"


class ShuttingDown(GatewayError):
    """This gateway is being stopped; another one may take the request."""

    status, code, kind = 503, "shutting_down", "server_error"


class InternalError(GatewayError):
    """A fault of this gateway. The text says no more than that."""

    status, code, kind = 500, "internal_error", "server_error"


def error_from_code(code: object, message: str) -> GatewayError:
    """Rebuilds an error that a decoding process reported; a code it cannot know is InvalidMedia."""
    known = {cls.code: cls for cls in GatewayError.__subclasses__()}
    return known.get(code if isinstance(code, str) else "", InvalidMedia)(message)
