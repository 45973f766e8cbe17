"""The exceptions of Fairlane.

    FairlaneError
    ├── ConfigError          the configuration cannot be used; its text is for the operator
    ├── BrokerError          Redis did not do what was asked
    │   ├── BrokerDown       nothing was sent: safe to try again
    │   ├── BrokerUncertain  the command was sent and no answer came: it may have run
    │   └── BrokerRefused    Redis answered with an error (out of memory, read-only, …)
    ├── StoreError           the object store did not do what was asked
    └── WireError            bytes from another process that are not of this version's contract

Expected refusals (a full queue, a stale term) are return values of the verbs, never exceptions.
Exceptions of libraries are turned into these once, in the file that made the call.
"""


class FairlaneError(Exception):
    """Root of all that Fairlane raises on purpose."""


class ConfigError(FairlaneError):
    """A setting is unknown, of the wrong type or out of range."""


class BrokerError(FairlaneError):
    """Redis cannot be used just now."""


class BrokerDown(BrokerError):
    """There is no connection, and the command was not sent."""


class BrokerUncertain(BrokerError):
    """The command was sent, and the connection broke or timed out before its answer."""


class BrokerRefused(BrokerError):
    """Redis answered with an error: out of memory, read-only, loading, wrong type."""


class WireError(FairlaneError):
    """A message that does not decode, or is of another version."""


class StoreError(FairlaneError):
    """The object store cannot be used just now; its text holds no secret."""
