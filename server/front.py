"""What stands before the app: every request passes these layers, also one that no route is there for."""

from typing import cast

from litestar import Litestar

from server.access import AccessLayer
from server.asgi_types import App
from server.auth import ApiKeys, AuthLayer, open_paths
from server.body_limit import BodyLayer
from server.cors import CorsLayer
from server.service import Service


def behind_front(inner: Litestar | App, service: Service, keys: ApiKeys) -> App:
    """The app behind, from the outside in: id and books; pages of other origins; API keys; size of bodies."""
    config = service.config
    app: App = BodyLayer(cast(App, inner), config.server.max_body, notes_bodies=config.log.prompts)
    app = AuthLayer(app, keys, open_paths(config))
    if config.server.allowed_origins:
        app = CorsLayer(app, config.server.allowed_origins)
    return AccessLayer(app, service)
