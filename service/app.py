"""The API process: `create_app` builds it, `python -m ablate.service.app` serves it with one uvloop worker."""

import logging
import pkgutil
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import version
from types import FrameType

import uvicorn
from anyio import to_thread
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import BaseRoute

from ablate.experiments.system.logs import configure_logging
from ablate.service import routes
from ablate.service.errors import ConfigurationError
from ablate.service.http import openapi, problems
from ablate.service.http.authentication import Authenticator, RateLimiter, bootstrap
from ablate.service.http.deps import Services
from ablate.service.http.event_streams import Streams
from ablate.service.http.metrics import StoreMetrics
from ablate.service.http.middleware import RequestMiddleware
from ablate.service.http.readiness import ReadinessMonitor
from ablate.service.queue.wake_ups import WakePublisher
from ablate.service.settings import ServiceSettings, get_settings
from ablate.service.store.migrate import upgrade
from ablate.service.store.session import OTHERS_AT_ONCE, Store
from ablate.service.web import actions, html, mlflow_pages, pages, sign_in

log = logging.getLogger(__name__)

SHUTDOWN_S = 5
DISCONNECT_S = 30
_MAX_FILES = 65_536


def create_app(settings: ServiceSettings, store: Store | None = None) -> FastAPI:
    """Build the application on `store`, by default the one that the settings name."""
    store = store or Store(settings.sqlalchemy_url)
    wakes = WakePublisher(store, settings.celery_url)
    authenticator = Authenticator(store)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = OTHERS_AT_ONCE
        await to_thread.run_sync(_prepare, store, settings)
        wakes.start()
        yield
        app.state.stopping = True
        if app.state.mlflow is not None:
            await app.state.mlflow.aclose()
        await to_thread.run_sync(wakes.stop)
        store.close()

    app = FastAPI(
        title="Ablate", version=version("ablate"), lifespan=lifespan, docs_url=None, redoc_url=None, routes=_routes()
    )
    app.state.services = Services(
        settings=settings,
        store=store,
        authenticator=authenticator,
        limiter=RateLimiter(per_s=settings.rate_limit_per_s, burst=settings.rate_limit_burst),
        wakes=wakes,
    )
    app.state.readiness = ReadinessMonitor(store, settings)
    app.state.store_metrics = StoreMetrics(store, settings)
    app.state.mlflow = mlflow_pages.mlflow_client(settings) if settings.forward_mlflow else None
    app.state.stopping = False
    app.state.streams = Streams(
        store,
        most=settings.max_streams,
        most_of_token=settings.max_token_streams,
        stopping=lambda: bool(app.state.stopping),
    )
    app.add_middleware(RequestMiddleware, settings=settings, authenticator=authenticator)
    problems.install(app)
    html.install(app)
    openapi.install(app)
    return app


def _routes() -> list[BaseRoute]:
    """Return the routes of every module in `ablate.service.routes` and of the pages, in one flat list."""
    modules = [import_module(f"{routes.__name__}.{module.name}") for module in pkgutil.iter_modules(routes.__path__)]
    modules += [pages, actions, sign_in, mlflow_pages, html]
    return [route for module in modules for route in module.router.routes]


def _prepare(store: Store, settings: ServiceSettings) -> None:
    upgrade(store)
    bootstrap(store, settings)


class _Server(uvicorn.Server):
    """Ends all streams as soon as a signal arrives, so that they do not delay the shutdown."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop."""
        self._app.state.stopping = True
        super().handle_exit(sig, frame)


def _allow_many_files() -> None:
    """Raise the limit of open files: every stream and every connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if most == resource.RLIM_INFINITY else min(most, _MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def main() -> int:
    """Serve until a signal; return 1 when the settings or the database do not allow a start."""
    try:
        settings = get_settings()
        configure_logging(settings.log_format)
        settings.check_address()
        for name in ("admin", "worker"):
            settings.checked_secret(name)
        store = Store(settings.sqlalchemy_url)
        upgrade(store)
        app = create_app(settings, store)
    except (ConfigurationError, SQLAlchemyError) as error:
        log.error("cannot start: %s", error)
        return 1
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        timeout_keep_alive=DISCONNECT_S,
    )
    for signum in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again after a clean end
        signal.signal(signum, lambda *_: None)
    _allow_many_files()
    import_module("scipy.optimize")  # every plan needs it; imported later, it would delay the first submission
    server = _Server(config, app)
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
