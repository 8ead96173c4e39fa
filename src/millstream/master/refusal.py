"""What a master answers when it will not do what it is asked."""

from millstream.errors import MillstreamError


class Refused(MillstreamError):
    """A request is refused: with the HTTP status `status`, and a line that says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
