"""How any service here starts, is watched, and ends. Needs the extra `serving`.

- `settings`, `command_line`, `addresses`: one frozen object per service; a field is a flag is an environment variable.
- `logs`, `request_ids`, `metrics`: what a service tells about its calls.
- `gate`: which calls are let in; none before the start, none while draining.
- `interceptor`: around every call: id, metrics, one log line, errors to gRPC status.
- `server`: binds, warms up, serves until a signal, drains, stops.
"""

from loraplex.serving.addresses import check_target
from loraplex.serving.errors import CannotStart
from loraplex.serving.request_ids import outgoing_metadata, request_id
from loraplex.serving.server import Service, run, serving
from loraplex.serving.settings import ServingSettings, load_settings

__all__ = [
    "CannotStart",
    "Service",
    "ServingSettings",
    "check_target",
    "load_settings",
    "outgoing_metadata",
    "request_id",
    "run",
    "serving",
]
