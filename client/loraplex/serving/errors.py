"""Why a service does not start, as opposed to a fault of it."""


class CannotStart(Exception):
    """The operator can mend this; the message is one line that names the setting. Raised only at start."""
