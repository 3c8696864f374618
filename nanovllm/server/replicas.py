"""Several engines behind one address: `nanovllm serve --replicas 4`, on Ray Serve.

    with open_replicas(config, options, num_replicas=2) as replicas:      # starts a Ray, or joins that of RAY_ADDRESS
        app = make_front(replicas, options)                               # an ASGI application, for uvicorn or a test

A replica is a Ray actor with an engine and the whole application of `app.py`; Ray Serve starts it, checks its health
and starts it anew when it dies. This process, the front, listens, checks the key, reads the body, and sends the request
to the replica that `PrefixRouter` chooses; what the application there sends comes back message by message. So every
endpoint, field and error is that of a single server, and only the front decides which clients may connect: Ray's own
HTTP proxy, dashboard and usage reports are off, and a Ray that is started here is on the loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.config import EngineConfig
from nanovllm.engine.generation_config import SamplingDefaults, read_sampling_defaults
from nanovllm.errors import ConfigError
from nanovllm.hardware.parallel import LOOPBACK
from nanovllm.ranks.ray_cluster import join_ray
from nanovllm.server.errors import INTERNAL, ApiError
from nanovllm.server.guard import SMALL_BODY, ClientGone, Gate, Guard, read_bytes
from nanovllm.server.metrics import CONTENT_TYPE
from nanovllm.server.options import ServerOptions
from nanovllm.server.prefix_router import PrefixRouter, body_keys, keeper_of
from nanovllm.weights.resolve import resolve_model

logger = logging.getLogger("nanovllm")
FACT_SECONDS = 5.0  # for GET requests such as /health: a monitor must not wait in a queue
SLACK = 5.0  # seconds beyond request_timeout, in which the replica itself answers that a request took too long
REPLICA_HEADER = b"x-nanovllm-replica"  # in every answer: where it came from
SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (.*)")
LOST = "the replica that had this request is gone; another one takes the next: try again"
NONE_LEFT = "no replica is running now; they are being started anew: try again later"


class ServeRouter(RequestRouter):
    """Ray Serve's router. It lives in the process that holds the handle: one front, one table of prefixes."""

    def initialize_state(self, **options: Any) -> None:
        self.prefixes = PrefixRouter(**options)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.prefixes.set_replicas(self.curr_replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.prefixes.set_replicas([known for known in self.prefixes.loads if known != replica_id])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of one replica, best first: Ray Serve takes the next group only if no replica of the last answers."""
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        routing = pending_request.kwargs if pending_request is not None else {}
        if (number := routing.get("number")) is not None:
            found = sorted(candidates.values(), key=lambda replica: str(replica.replica_id.unique_id))
            return [[found[number % len(found)]]] if found else []
        keepers = [one for known, one in candidates.items() if str(known.unique_id) == routing.get("keeper")]
        if keepers:
            return [keepers]
        order = self.prefixes.choose(routing.get("keys", ()))
        return [[candidates[chosen]] for chosen in order if chosen in candidates]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.prefixes.started(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self.prefixes.finished(replica_id)


class EngineReplica:
    """One engine with its application, in an actor. `answer` runs a request through it."""

    def __init__(self, config: EngineConfig, options: ServerOptions) -> None:
        from nanovllm.engine.async_engine import AsyncLLMEngine
        from nanovllm.server.app import make_app
        from nanovllm.server.run import freeze_gc
        from nanovllm.server.service import Service

        _keep_to_loopback()
        self.service = Service(AsyncLLMEngine(config), options)
        self.service.replica = serve.get_replica_context().replica_id.unique_id
        self.app = make_app(self.service)
        freeze_gc()
        self.name = f"{self.service.replica}-{os.getpid()}".encode()

    async def answer(
        self, scope: Scope, body: bytes, keys: tuple[bytes, ...] = (), number: int | None = None, keeper: str = ""
    ) -> AsyncIterator[list[Message]]:
        """What the application sends; several messages at once if they came faster than they were fetched. `keys`,
        `number` and `keeper` are for the router. When the client leaves, this call is cancelled."""
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        left = asyncio.Event()

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REPLICA_HEADER, self.name)]
            await sent.put(message)

        task = asyncio.ensure_future(self.app(scope, receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))  # an error was answered and logged by the application
        try:
            messages: list[Message | None] = []
            while None not in messages:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                if found := [message for message in messages if message is not None]:
                    yield found
        finally:
            left.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def check_health(self) -> None:
        """Ray Serve calls this every second; a replica that fails it three times is stopped, and another one started.
        A replica with a dead engine ends at once: it refuses faster than the others serve, so it would always have the
        smallest load and get their requests."""
        if self.service.engine.failure is not None:
            self.service.close()  # the ranks end with it
            os._exit(1)
        if self.service.trouble is not None:
            raise RuntimeError(self.service.trouble)

    def __del__(self) -> None:  # called by Ray Serve when it stops a replica
        if hasattr(self, "service"):
            self.service.close()


# ---- the front -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replicas:
    answer: Any  # a DeploymentHandle of EngineReplica.answer, streaming
    count: int
    app_name: str
    sampling_defaults: SamplingDefaults


def make_front(replicas: Replicas, options: ServerOptions) -> ASGIApp:
    return Gate(ReplicaFront(replicas, options), options)


class ReplicaFront:
    """ASGI: one request of a client to one replica. Behind a Gate, which gives it an id and checks the key."""

    def __init__(self, replicas: Replicas, options: ServerOptions) -> None:
        self._replicas = replicas
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        started: dict[bytes, bytes] = {}  # headers of the answer, once they are out
        is_fact = scope["method"] in ("GET", "HEAD")

        async def noting_send(message: Message) -> None:
            started.update(message.get("headers", ()) if message["type"] == "http.response.start" else ())
            await send(message)

        try:
            body = await read_bytes(request, self._options.max_body_bytes)
            async with Guard(receive, FACT_SECONDS if is_fact else self._options.request_timeout + SLACK):
                if scope["path"] in ("/metrics", "/load") and is_fact:
                    await (await self._sum(scope))(scope, receive, noting_send)
                elif scope["path"] == "/reset_prefix_cache":
                    message = "reset_prefix_cache: not with --replicas, each of which has a cache: restart the server"
                    raise ApiError(501, message, code="unsupported_with_replicas")
                else:
                    await self._forward(scope, body, noting_send)
        except (ClientGone, ClientDisconnect):
            logger.info("request %s: the client left", scope["request_id"])
        except Exception as error:
            await self._fail(error, started, scope, receive, send)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        keys = body_keys(body) if len(body) <= SMALL_BODY else await asyncio.to_thread(body_keys, body)
        keeper = keeper_of(scope["path"], body)
        async with aclosing(self._messages(scope, body, keys=keys, keeper=keeper)) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":  # the Gate here names the request too
                    message["headers"] = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                await send(message)

    async def _messages(self, scope: Scope, body: bytes, **routing: Any) -> AsyncGenerator[Message, None]:
        """Of the replica's application. Leaving early ends the request there."""
        response = self._replicas.answer.remote(_plain(scope), body, **routing)
        finished = False
        try:
            async for messages in response:
                for message in messages:
                    yield message
            finished = True
        finally:
            if not finished:
                response.cancel()

    async def _sum(self, scope: Scope) -> Response:
        """The load of all replicas, or their metrics, each sample with its replica's name."""
        found: dict[str, str] = {}

        async def fetch(number: int) -> None:
            name, body = "", b""
            async with aclosing(self._messages(scope, b"", number=number)) as messages:
                async for message in messages:
                    name = dict(message.get("headers", ())).get(REPLICA_HEADER, name.encode()).decode()
                    body += message.get("body", b"")
            found[name] = body.decode()

        await asyncio.gather(*map(fetch, range(self._replicas.count)))
        if scope["path"] == "/load":
            return JSONResponse({"server_load": sum(json.loads(text)["server_load"] for text in found.values())})
        return Response(merge_metrics(found), headers={"content-type": CONTENT_TYPE})

    async def _fail(
        self, error: Exception, started: dict[bytes, bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        problem = _as_problem(error, scope["method"] in ("GET", "HEAD"))
        if not isinstance(error, ApiError):
            logger.error("request %s failed in its replica", scope["request_id"], exc_info=error)
        if not started:
            await problem.response(scope["path"])(scope, receive, send)
        elif started.get(b"content-type", b"").startswith(b"text/event-stream"):
            from nanovllm.server.answers import failure

            data = failure(problem, scope["path"])
            await send({"type": "http.response.body", "body": data, "more_body": False})
        else:
            raise problem  # after half an answer, which closes the connection


def _as_problem(error: Exception, is_fact: bool) -> ApiError:
    if isinstance(error, ApiError):
        late = error.status == 408 and is_fact
        return ApiError(503, NONE_LEFT, code="no_replica") if late else error
    if isinstance(error, (RayError, RayServeException)):
        return ApiError(503, LOST, code="replica_failed", headers={"Retry-After": "1"})
    return ApiError(500, INTERNAL, code="internal_error")


def _plain(scope: Scope) -> Scope:
    """What a replica needs of a scope and what can be pickled. The key and the origin are not sent: the Gate of this
    process has checked them."""
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
    kept = {name: scope[name] for name in names if name in scope}
    headers = [(name, value) for name, value in scope["headers"] if name in (b"content-type", b"host", b"accept")]
    return {**kept, "headers": [*headers, (b"x-request-id", scope["request_id"].encode())], "client": None}


def merge_metrics(texts: dict[str, str]) -> str:
    """Prometheus wants all samples of a metric together: {replica: its text} -> one text."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for name, text in sorted(texts.items()):
        family: tuple[list[str], list[str]] = ([], [])
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], ([], []))
            if line.startswith("#"):
                if line not in family[0]:
                    family[0].append(line)
            elif line:
                metric, labels, value = SAMPLE.fullmatch(line).groups()  # type: ignore[union-attr]
                family[1].append(f'{metric}{{{labels + "," if labels else ""}replica="{name}"}} {value}')
    return "".join(f"{line}\n" for comments, samples in families.values() for line in (*comments, *samples))


# ---- Ray -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_replicas(config: EngineConfig, options: ServerOptions, num_replicas: int) -> Iterator[Replicas]:
    """Waits until all engines are loaded. At the end they are stopped; so is Ray, unless it was there before."""
    check_replicas(config)
    config, defaults = find_files(config)
    name = f"nanovllm-{uuid.uuid4().hex[:8]}"
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    join_ray(ray)
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        try:
            serve.start(proxy_location="Disabled", logging_config=quiet)
            inside = replace(options, api_key=None, allowed_origins=())  # the front checks both
            app = _deployment(config, options, num_replicas).bind(config, inside)
            try:
                handle = serve.run(app, name=name, route_prefix=None, logging_config=quiet)
            except RuntimeError as error:
                raise ConfigError(f"the replicas did not start ({error}); their error is in the lines above") from None
            yield Replicas(handle.options(method_name="answer", stream=True), num_replicas, name, defaults)
        finally:
            with contextlib.suppress(Exception):  # what is left of a private Ray dies with it
                serve.delete(name)


def find_files(config: EngineConfig) -> tuple[EngineConfig, SamplingDefaults]:
    """Here, once: a wrong name is one line and not a stack trace of each replica, and the replicas do not all fetch the
    model at once. Paths become absolute, since a replica may be started in another folder."""
    path = resolve_model(config.model)
    defaults = read_sampling_defaults(config.generation_config, path)
    if Path(config.model).exists():
        config = replace(config, model=str(path.absolute()))
    if config.generation_config not in ("auto", "vllm"):
        config = replace(config, generation_config=os.path.abspath(os.path.expanduser(config.generation_config)))
    return config, defaults


def _keep_to_loopback() -> None:
    """A replica of Ray Serve opens a port on all interfaces and unpickles what comes there. Calls of handles do not use
    it (they are actor calls), so in this process, before it is opened, it is moved to the loopback."""
    module: Any = importlib.import_module("ray.serve._private.replica")
    add_port = module.add_port_to_grpc_server
    module.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", LOOPBACK))


def _deployment(config: EngineConfig, options: ServerOptions, num_replicas: int) -> Any:
    resources = _resources(config, num_replicas, ray.cluster_resources())
    router_class: Any = ServeRouter  # Ray's types want a dictionary
    return serve.deployment(
        EngineReplica,
        num_replicas=num_replicas,
        ray_actor_options=resources,
        # Above what a replica admits, so that the replica answers 429, not Ray Serve.
        max_ongoing_requests=config.max_num_seqs + options.max_waiting + 64,
        max_constructor_retry_count=1,
        health_check_period_s=1,
        graceful_shutdown_timeout_s=options.drain_timeout,
        request_router_config=RequestRouterConfig(request_router_class=router_class),
    )


def check_replicas(config: EngineConfig) -> None:
    """What can be refused before Ray is started."""
    if not hasattr(RequestRouter, "on_request_completed"):
        raise ConfigError(f"replicas: Ray {ray.__version__} cannot say when a request has ended; take 2.60 or later")
    where = config.distributed_executor_backend
    if where in ("ray", "torchrun"):
        fault = "the ranks of a replica are processes beside it; leave it out, or serve a single engine"
        raise ConfigError(f"distributed_executor_backend={where!r}: {fault}")


def _resources(config: EngineConfig, num_replicas: int, cluster: dict[str, float]) -> dict[str, float]:
    """What one replica takes. Ray would wait for ever for more than there is, so it is refused."""
    if config.device != "cpu" and cluster.get("GPU", 0) > 0:
        each, there = config.tensor_parallel_size, int(cluster["GPU"])
        if num_replicas * each > there:
            raise ConfigError(
                f"replicas={num_replicas}: with tensor_parallel_size={each} they need {num_replicas * each} GPUs, Ray "
                f"has {there}: ask for at most {there // each}"
            )
        return {"num_gpus": each, "num_cpus": 1}
    return {"num_cpus": min(1.0, int(1000 * cluster.get("CPU", 1) / num_replicas) / 1000)}


def serve_replicas(config: EngineConfig, options: ServerOptions, num_replicas: int, say: Callable[[str], None]) -> None:
    """As `run.serve`, with several engines."""
    from nanovllm.server.run import DrainingServer, address_of, listening

    with listening(options, say) as listener:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with open_replicas(config, options, num_replicas) as replicas:
            say(f"{num_replicas} replicas of {config.model} at {address_of(listener)}/v1 (Ctrl-C ends)")
            say(f"sampling defaults: {replicas.sampling_defaults}")
            DrainingServer(make_front(replicas, options), options).run(sockets=[listener])
    say("all requests are answered, the engines are closed")
