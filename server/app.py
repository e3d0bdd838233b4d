"""The HTTP app: every route, one exception handler, and nothing global."""

from litestar import Litestar
from litestar.config.response_cache import ResponseCacheConfig

from server.dashboard.routes import dashboard_routes
from server.errors import EXCEPTION_HANDLERS
from server.metrics import metrics_routes
from server.requests import Reception
from server.routes.chat import chat_routes
from server.routes.completions import completion_routes
from server.routes.docs import docs_routes
from server.routes.embeddings import embedding_routes
from server.routes.health import health_routes
from server.routes.models import model_routes
from server.routes.responses import response_routes
from server.routes.score import score_routes
from server.routes.tokens import token_routes
from server.service import Service


def create_app(service: Service) -> Litestar:
    """The app of one server; it may be made before the engine is there."""
    reception = Reception(service)
    return Litestar(
        route_handlers=[
            *chat_routes(reception),
            *completion_routes(reception),
            *response_routes(reception),
            *embedding_routes(reception),
            *score_routes(reception),
            *model_routes(reception),
            *token_routes(reception),
            *docs_routes(),
            *health_routes(service),
            *metrics_routes(service),
            *dashboard_routes(service),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        # The framework's own document does not know our bodies, its logging sets the root logger, and bodies are bounded before it.
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,
        response_cache_config=ResponseCacheConfig(),
    )
