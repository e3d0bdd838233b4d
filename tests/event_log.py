"""What an engine or a server said, kept."""

from jaxpaged import events


class EventLog(list[events.Event]):
    """A sink that keeps every event."""

    def __call__(self, event: events.Event, /) -> None:
        """See `events.Sink`."""
        self.append(event)

    def close(self) -> None:
        """See `events.Sink`."""

    def of[E](self, kind: type[E]) -> list[E]:
        """The events of one kind, in order."""
        return [event for event in self if isinstance(event, kind)]
