"""The routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..errors import GatewayError, InternalError, MethodNotAllowed, NotFound
from .chat import ChatService, log
from .exchange import ChatEndpoint
from .metrics import CONTENT_TYPE
from .openai_objects import model


def _refusal(error: GatewayError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error.to_openai(), error.status, headers=headers)


def create_app(service: ChatService) -> FastAPI:
    """The application around a service, which it starts and closes with itself."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    # A path with a slash too many is not found: a redirect would name the Host that the client
    # sent, under the scheme this server sees behind its proxy.
    app = FastAPI(
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_route("/v1/chat/completions", ChatEndpoint(service), methods=["POST"])

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """What is served."""
        entry = model(service.settings.model_name, service.created, service.settings.context_tokens)
        return JSONResponse({"object": "list", "data": [entry]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> JSONResponse:
        """The same by name."""
        service.check_model(name)
        return JSONResponse(model(name, service.created, service.settings.context_tokens))

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 if a request has a chance now."""
        ready = await service.watch.check() and not service.draining
        status = "ok" if ready else "draining" if service.draining else "no worker is ready"
        workers = [
            {
                "name": worker.name,
                "ready": worker.ready,
                "running": worker.running,
                "waiting": worker.waiting,
                "reason": worker.reason,
            }
            for worker in service.watch.workers
        ]
        return JSONResponse({"status": status, "workers": workers}, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    @app.exception_handler(GatewayError)
    async def refused(request: Request, error: GatewayError) -> JSONResponse:
        return _refusal(error)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 405:
            refusal = MethodNotAllowed(f"{request.method} is not allowed here")
            return _refusal(refusal, dict(error.headers or {}))
        return _refusal(NotFound(f"there is nothing at {request.url.path[:200]!r}"))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        log.error("%s failed", request.url.path, exc_info=error)
        return _refusal(InternalError("the gateway failed; the fault is logged"))

    return app
