"""What stands before the app: every request passes these layers, also one that no route is there for."""

from typing import cast

from litestar import Litestar

from server.access import AccessLayer
from server.asgi_types import App, Receive, Scope, Send, send_plain
from server.auth import ApiKeys, AuthLayer, NoBrowsersLayer, open_paths
from server.body_limit import BodyLayer
from server.cors import CorsLayer
from server.errors import allowed_methods
from server.service import Service


def with_options(inner: Litestar | App) -> App:
    """The app with OPTIONS answered for every path that it has: the framework's answer knows neither HEAD nor a path's second handler."""
    if not isinstance(inner, Litestar):
        return inner

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        methods = allowed_methods(inner, scope["path"]) if scope["type"] == "http" and scope["method"] == "OPTIONS" else []
        if methods:
            await send_plain(send, 204, [(b"allow", ", ".join(methods).encode())])
        else:
            await cast(App, inner)(scope, receive, send)

    return app


def behind_front(inner: Litestar | App, service: Service, keys: ApiKeys) -> App:
    """The app behind, from the outside in: id and books; pages of other origins; API keys; size of bodies."""
    config = service.config
    app: App = BodyLayer(with_options(inner), config.server.max_body, notes_bodies=config.log.prompts)
    app = AuthLayer(app, keys, open_paths(config))
    if config.server.allowed_origins:
        app = CorsLayer(app, config.server.allowed_origins)
    return AccessLayer(app, service)


def behind_admin_front(inner: Litestar | App, service: Service, keys: ApiKeys) -> App:
    """The operators' app behind, from the outside in: id and books; no web page, of whatever origin; API keys on every path; bodies."""
    app: App = BodyLayer(with_options(inner), service.config.server.max_body)
    return AccessLayer(NoBrowsersLayer(AuthLayer(app, keys, frozenset())), service)
