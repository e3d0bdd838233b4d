"""What one server is made of, handed to whoever answers requests: options, engine, phase and books. Nothing is global."""

from collections.abc import Sequence

from jaxpaged import events
from jaxpaged.clocks import REAL_CLOCKS, Clocks
from jaxpaged.config import Config
from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import EngineDeadError, JaxpagedError, ServerDrainingError, ServerStartingError
from jaxpaged.gpu_readings import GpuSource, NvmlSource
from jaxpaged.sinks import FanOut
from server.dashboard.live_view import LiveView
from server.ledger import Ledger
from server.machine_metrics import MachineMetrics
from server.phase import EngineProgress, Phase
from server.prometheus_sink import PrometheusSink


class Service:
    """One server. Built before the model is loaded; `attach` brings the engine.

    Args:
        config: the options.
        clocks: where times come from.
        sinks: logs; they take the engine's events and the server's.
        gpus: where readings of GPUs come from; None: the driver.

    Attributes:
        phase: what the server does now.
        engine: None until it is loaded.
        progress: what the engine's events say of its health.
        metrics: figures of all that happened.
        live: the last minutes, for the live page.
        machine: figures of the machine, read when asked for.
        ledger: the books of requests.
        emit: the sink that the engine is to be given.
    """

    def __init__(
        self, config: Config, *, clocks: Clocks = REAL_CLOCKS, sinks: Sequence[events.Sink] = (), gpus: GpuSource | None = None
    ) -> None:
        self.config, self.clocks = config, clocks
        self.phase = Phase.STARTING
        self.engine: EngineClient | None = None
        self.progress = EngineProgress(clocks.monotonic)
        self.metrics = PrometheusSink(self.model_name if config.metrics.vllm_names else None)
        self.machine = MachineMetrics(gpus or NvmlSource(), wall=clocks.wall)
        self.live = LiveView(self.metrics.scrape)
        self.emit = FanOut((*sinks, self.progress, self.live, self.metrics))
        self.ledger = Ledger(self.emit, clocks)
        self._reason = ""

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients may use; the first is the one that answers carry."""
        return self.config.server.served_model_name or (self.config.model.model,)

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.served_names[0]

    @property
    def reason(self) -> str:
        """Why the server does not serve."""
        return self._reason or self.progress.death or ""

    def ready_engine(self) -> EngineClient:
        """The engine, if it serves now.

        Raises:
            ServerStartingError: it is not loaded yet.
            ServerDrainingError: the server was told to stop.
            EngineDeadError: it has failed.
        """
        if self.phase in (Phase.DRAINING, Phase.STOPPED) and self.progress.death is None:
            raise ServerDrainingError("the server is about to stop and takes no new requests; ask another one, or this one a little later")
        engine = self.open_engine()
        engine.check_health()
        return engine

    def open_engine(self) -> EngineClient:
        """The engine, for requests that it has already; also while the server drains. Errors but for that as `ready_engine`."""
        if self.phase is Phase.DEAD or self.progress.death is not None:
            raise EngineDeadError(f"the engine stopped: {self.reason}")
        if self.phase is Phase.STARTING or self.engine is None:
            raise ServerStartingError(f"the model is not loaded yet ({self.progress.start_up.message}); try again in a few seconds")
        return self.engine

    def attach(self, engine: EngineClient) -> None:
        """The model is loaded."""
        self.engine = engine
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    def drain(self) -> None:
        """Takes no new requests from now on."""
        if self.phase in (Phase.STARTING, Phase.READY):
            self.phase = Phase.DRAINING

    def stop(self) -> None:
        """The end of a server that was told to stop."""
        if self.phase is not Phase.DEAD:
            self.phase = Phase.STOPPED

    def die(self, reason: str) -> None:
        """The engine is dead or stuck: nothing is served any more, and open requests are told so. Any thread may call it."""
        if self.phase is Phase.DEAD:
            return
        self._reason, self.phase = reason, Phase.DEAD
        self.fail_open(EngineDeadError(f"the engine stopped: {reason}"))

    def fail_open(self, error: JaxpagedError) -> None:
        """Ends every open request with an error."""
        if self.engine is not None:
            self.engine.fail_open(error)
