"""Names and sizes that both sides of the wire must agree on."""

PROTOCOL = 2

SERVICE = "m3_serving.worker.v1.Worker"
GENERATE = f"/{SERVICE}/Generate"
HEALTH = f"/{SERVICE}/Health"

FIELD_KEY = "field"
"""trailing metadata of a refusal: the request's field it is about"""

MAX_MESSAGE_BYTES = 8 << 20
"""Of one message. gRPC's own limit of 4 MiB would do for every chunk; a Start with half a million
token ids and what is inline in it would not fit. Above that a message costs more than its parts."""

CHUNK_BYTES = 2 << 20
"""payload of one chunk: large enough that calls do not count, small enough to be copied cheaply"""

INLINE_BYTES = 64 << 10
"""an item up to this size travels in the Start message itself"""

INLINE_TOTAL_BYTES = 2 << 20
"""of all inline items of a request together"""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without closing its connection is noticed within these two.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Only the server reads this one: such pings are what it expects.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
