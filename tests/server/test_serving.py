"""The life of a server process, as far as it needs no process of its own."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpaged.config import Config
from server.auth import ApiKeys
from server.phase import Phase
from server.service import Service
from server.serving import Doors, Serving


class Graph:
    """Stands in for an engine: many objects that refer to each other, and garbage."""

    def __init__(self) -> None:
        self.objects: list[Any] = [[index] for index in range(20_000)]
        garbage: list[Any] = []
        garbage.append(garbage)

    def check_health(self) -> None:
        """See `EngineClient`."""


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen before, and nothing stays so."""
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_what_is_loaded_is_never_looked_through_again() -> None:
    service, frozen = Service(Config()), []

    def make_engine(*_: object) -> Any:
        assert gc.get_freeze_count() == 0
        return Graph()

    def attach(engine: Any) -> None:
        frozen.append(gc.get_freeze_count())
        Service.attach(service, engine)

    service.attach = attach  # type: ignore[method-assign]
    serving = Serving(service, Doors((), (), None, ApiKeys(())), make_engine, lambda _: pytest.fail("no app is asked for"), say=print)
    serving._load()
    assert serving._load_error is None
    assert service.phase is Phase.READY
    assert frozen[0] > 20_000, "requests are let in before it is frozen"
    engine: Any = service.engine
    assert not any(found is engine.objects for found in gc.get_objects())
