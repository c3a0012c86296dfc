"""Cuts a stream of bytes into lines of bounded length. Must not know what the lines mean."""


class Lines:
    """A line longer than `limit` bytes is dropped whole; so much is held at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun = b""
        self._dropping = False

    def feed(self, said: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their ends."""
        *ended, begun = (self._begun + said).split(b"\n")
        if self._dropping and ended:
            del ended[0]
            self._dropping = False
        self._begun = begun
        if len(begun) > self._limit:
            self._begun, self._dropping = b"", True
        return [line for line in ended if len(line) <= self._limit]
