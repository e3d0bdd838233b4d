"""Every error a user can meet: one class each, with its code and HTTP status.

A message says what was given, the limit, and the way out, in one sentence. The command line prints it and exits with 2;
the server wraps it in OpenAI's error body; the metric label is `code`.
"""


class JaxpagedError(Exception):
    """Root of the tree. `code` names the kind, `http_status` is what the server answers, `param` names the field at fault.

    `retry_after_s`: seconds after which the same request may well be served; None: waiting alone does not help.
    """

    code: str = "internal_error"
    http_status: int = 500
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(JaxpagedError, ValueError):
    """A prompt or a sampling field is not acceptable."""

    code = "invalid_value"
    http_status = 400


class ContextLengthError(InvalidRequestError):
    """The prompt (with what was asked for) does not fit the model's context."""

    code = "context_length_exceeded"


class PoolTooSmallError(InvalidRequestError):
    """The request can never fit in the page pool, however long it waits."""

    code = "kv_pool_exceeded"


class QueueFullError(JaxpagedError):
    """Too much waits already; the same request may be accepted a little later."""

    code = "queue_full"
    http_status = 429
    retry_after_s = 1


class ConfigError(JaxpagedError, ValueError):
    """An option, YAML key, flag or environment variable is unknown, malformed, out of range or contradicts another."""

    code = "invalid_config"
    http_status = 400


class ModelNotFoundError(JaxpagedError):
    """No model goes by the given name, file or folder."""

    code = "model_not_found"
    http_status = 404


class CheckpointError(JaxpagedError):
    """A model file is missing, cut, malformed, or does not hold what its config promises."""

    code = "bad_checkpoint"


class UnsupportedModelError(JaxpagedError):
    """The architecture, rope type or quantization is known to be one we do not run."""

    code = "unsupported_model"


class ChatTemplateError(InvalidRequestError):
    """The model's chat template is missing or refuses the messages."""

    code = "invalid_messages"


class DownloadError(JaxpagedError):
    """A model could not be fetched: no network, wrong hash, refused, or no space left."""

    code = "download_failed"
    http_status = 502


class MemoryBudgetError(JaxpagedError):
    """The weights, the page pool and the largest step do not fit in the memory given."""

    code = "out_of_memory"


class EngineDeadError(JaxpagedError):
    """The engine has stopped after a fatal error and serves no more requests."""

    code = "engine_dead"
    http_status = 503
    retry_after_s = 10


class StreamError(EngineDeadError):
    """Another process of the engine is gone, is silent, or sends what none of ours does."""


class EnginePausedError(JaxpagedError):
    """The engine is paused or asleep, and whoever asks could not wait for it to go on."""

    code = "engine_paused"
    http_status = 503
    retry_after_s = 10


class RequestFailedError(JaxpagedError):
    """This request failed inside the engine; others go on."""

    code = "request_failed"


class ServerStartingError(JaxpagedError):
    """The server is up and the model is not loaded yet."""

    code = "server_starting"
    http_status = 503
    retry_after_s = 5


class ServerDrainingError(JaxpagedError):
    """The server was told to stop: it ends what runs and takes nothing new."""

    code = "server_draining"
    http_status = 503
    retry_after_s = 5


class TooManyConnectionsError(JaxpagedError):
    """As many connections are open as may be."""

    code = "too_many_connections"
    http_status = 503
    retry_after_s = 1


class TooManyViewersError(JaxpagedError):
    """As many look at the live page as may."""

    code = "too_many_viewers"
    http_status = 503
    retry_after_s = 10


class AuthenticationError(JaxpagedError):
    """The request brings no API key, or one that is not known."""

    code = "invalid_api_key"
    http_status = 401


class ForbiddenError(JaxpagedError):
    """Nobody is let in this way, with whatever key."""

    code = "forbidden"
    http_status = 403


class BodyTooLargeError(JaxpagedError):
    """The body of a request is larger than the limit."""

    code = "body_too_large"
    http_status = 413


class HeadersTooLargeError(JaxpagedError):
    """A request has too many headers, or too long ones."""

    code = "headers_too_large"
    http_status = 431


class SlowRequestError(JaxpagedError):
    """The headers or the body of a request did not come in time."""

    code = "request_too_slow"
    http_status = 408


class BadRequestError(JaxpagedError):
    """What came is no HTTP request, or has a form that is not served."""

    code = "bad_request"
    http_status = 400


class RequestAbortedError(JaxpagedError):
    """Somebody other than the client ended the request: an operator's pause or sleep, or the end of the process."""

    code = "request_aborted"
    http_status = 503
    retry_after_s = 5


class QueueTimeoutError(JaxpagedError):
    """The request waited for longer than it may and was not started."""

    code = "queue_timeout"
    http_status = 503
    retry_after_s = 2


class RequestTimeoutError(JaxpagedError):
    """The request took longer than any may; the same one would again."""

    code = "request_timeout"
    http_status = 504


class UnsupportedMediaTypeError(JaxpagedError):
    """The body of an HTTP request is of another type or encoding than the server reads."""

    code = "unsupported_media_type"
    http_status = 415


class NotFoundError(JaxpagedError):
    """Nothing goes by the given path or id."""

    code = "not_found"
    http_status = 404


class UnknownMethodError(JaxpagedError):
    """No path takes the method, since nobody knows it."""

    code = "method_not_implemented"
    http_status = 501


class MethodNotAllowedError(JaxpagedError):
    """The path is there and does not take the method."""

    code = "method_not_allowed"
    http_status = 405
