"""The options of every channel and server here, in one place, because gRPC ignores a misspelt one in silence.

Client and server belong together: a server that is pinged more often than it allows closes the connection.
"""

from collections.abc import Sequence

ChannelOptions = Sequence[tuple[str, int]]

# The largest file of an initial image or of a mask.
MAX_IMAGE_BYTES = 32 << 20
# A request with both, and room for its texts: so that a service itself can say which image is too large, and by how
# much more. An image that is answered arrives whole: an uncompressed 4096 x 4096 RGB image has 48 MiB.
MAX_MESSAGE_BYTES = 3 * MAX_IMAGE_BYTES
# A status with its details; gRPC's own default of 8 KiB would drop the reason of a long one.
_MAX_METADATA_BYTES = 64 << 10

CLIENT_OPTIONS: ChannelOptions = (
    # gRPC's own pauses grow to two minutes, for which a service that is back would not be noticed.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # How long one attempt may take: two packets that are lost, and sent again, fit in.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
)

SERVER_OPTIONS: ChannelOptions = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A second service on a taken port must fail to start instead of sharing the calls.
    ("grpc.so_reuseport", 0),
)
