"""Errors that stay inside the executor; what a caller can see is in `loraplex.errors`."""


class NoFreeRows(Exception):
    """Too few rank rows are free or evictable now; wait until a running job unpins some."""


class UnsupportedModel(Exception):
    """The base model cannot be served; the message says what is missing. Raised only at start."""


class UnsupportedOption(Exception):
    """A setting cannot be had here; the message names it and says what it needs. Raised only at start."""
