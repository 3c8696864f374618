"""Which names the server answers to and which web pages may use it: DNS rebinding, cross-origin requests, CORS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from nanovllm.errors import ConfigError
from nanovllm.server.options import ServerOptions
from nanovllm.server.trace_app import make_trace_app
from nanovllm.telemetry.trace import Trace
from tests.cli.runner import make_runner
from tests.server.rig import Running, running
from tests.server.test_refusals import check_error
from tests.tiny_models import TinyModel

APP = "https://chat.example.com"
OURS = ["127.0.0.1", "127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "localhost.:{port}", "127.0.0.1.", "[::1]",
        "[::1]:{port}", "[fe80::1%25eth0]:1", "192.168.1.7:9", "10.0.0.1:", "[2001:DB8::7]"]  # fmt: skip
OTHERS = ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "evil.localhost",
          "localhost:{port}@evil.example", "evil.example/localhost", "localhost,evil.example", "[::1", "::1", "[]", "",
          ":{port}", "localhost:x", "localhost:1:2", "..", "256.0.0.1", "127.0.0.1..", "ローカル", "a b"]  # fmt: skip
PATHS = [
    "/",
    "/static/app.js",
    "/health",
    "/metrics",
    "/engine/info",
    "/engine/events",
    "/v1/models",
    "/openapi.json",
    "/nothing",
]
HI = {"prompt": "the", "max_tokens": 1}


@pytest.fixture(scope="module")
def plain(llama: TinyModel) -> Iterator[Running]:
    with running(llama.path, events=True) as server:
        yield server


@pytest.fixture(scope="module")
def open_to_app(llama: TinyModel) -> Iterator[Running]:
    options: dict[str, Any] = {
        "allowed_hosts": ("GPU-box.lan.", "other"),
        "allowed_origins": (f"{APP}:443/", "app://x"),
    }
    with running(llama.path, events=True, api_key="k", **options) as server:
        yield server


def with_port(server: Running, text: str) -> str:
    return text.format(port=server.url.rpartition(":")[2])


# ---- Host ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", OURS)
def test_addresses_and_localhost_are_ours(plain: Running, host: str) -> None:
    with plain.http() as http:
        assert http.get("/engine/info", headers={"Host": with_port(plain, host)}).status_code == 200


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_not(plain: Running, host: str) -> None:
    with plain.http() as http:
        given = with_port(plain, host).encode()
        error = check_error(http.get("/engine/info", headers={b"Host": given}), 421)
    assert (error["param"], error["code"]) == ("Host", "host_not_allowed")
    assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_is_exempt(plain: Running, path: str) -> None:
    for headers, status in (({"Host": "evil.example"}, 421), ({"Origin": "http://evil.example"}, 403)):
        with plain.http() as http:
            check_error(http.get(path, headers=headers), status)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", HI),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/engine/control", {"action": "pause"}),
        ("/engine/policy", {"policy": "sjf"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_a_rebound_page_can_do_nothing(plain: Running, path: str, body: dict[str, Any]) -> None:
    """Its name resolves to 127.0.0.1 by now, so for the browser all is of one origin."""
    name = with_port(plain, "evil.example:{port}")
    check_error(plain.post(path, body, headers={"Host": name, "Origin": f"http://{name}"}), 421)
    assert not plain.service.engine.paused
    assert plain.engine.scheduler.policy.name == "fcfs"
    assert plain.engine.stats.generated_tokens == 0


def test_a_host_that_is_missing_or_given_twice(plain: Running) -> None:
    assert plain.raw(b"GET /version HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")  # no browser speaks HTTP/1.0
    assert plain.raw(b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 400")
    twice = "GET /version HTTP/{}\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    for version in ("1.0", "1.1"):
        assert plain.raw(twice.format(version).encode()).split()[1] in (b"400", b"421")


def test_names_that_were_allowed(open_to_app: Running) -> None:
    with open_to_app.http() as http:
        for host in ("gpu-box.lan", "GPU-BOX.lan.:80", "other:1", "localhost", "127.0.0.1"):
            assert http.get("/health", headers={"Host": host}).status_code == 200
        for host in ("evil.gpu-box.lan", "lan", "gpu-box"):
            check_error(http.get("/health", headers={"Host": host}), 421)


def test_any_name_and_any_origin(llama: TinyModel) -> None:
    with running(llama.path, allowed_hosts=("*",), allowed_origins=("*",)) as server, server.http() as http:
        for origin in ("http://evil.example", "null", "nonsense"):
            answer = http.get("/version", headers={"Host": "anything", "Origin": origin})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin


def test_the_name_it_listens_on_is_its_own() -> None:
    from nanovllm.server.guard import Gate

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    client = TestClient(Gate(app, ServerOptions(host="Gpu-Box")), base_url="http://gpu-box:8000")
    assert client.get("/").status_code == 200
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 421


# ---- Origin --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1", "http://127.0.0.1"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("LOCALHOST:8000", "http://localhost.:8000"),
        ("localhost:80", "http://localhost"),
        ("localhost", "https://localhost"),
        ("localhost", "https://localhost:443"),  # behind a proxy with TLS
    ],
)
def test_pages_of_this_server_may_use_it(plain: Running, host: str, origin: str) -> None:
    answer = plain.post("/v1/completions", HI, headers={"Host": host, "Origin": origin})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", [
    "http://evil.example", "null", "", "http://localhost", "http://localhost:{port}1", "http://127.0.0.1:{port}",
    "http://localhost:{port}.evil.example", "http://localhost:{port}@evil.example", "localhost:{port}", "*",
    "chrome-extension://abcdef", "http://localhost:{port}, http://evil.example", APP, "tauri://localhost:{port}",
])  # fmt: skip
def test_other_pages_may_not(plain: Running, origin: str) -> None:
    headers = {"Host": with_port(plain, "localhost:{port}"), "Origin": with_port(plain, origin)}
    answer = plain.post("/v1/completions", HI, headers=headers)
    error = check_error(answer, 403)
    assert (error["param"], error["code"], error["type"]) == ("Origin", "origin_not_allowed", "permission_error")
    assert "--allowed-origins" in error["message"]
    assert "access-control-allow-origin" not in answer.headers
    asked = {**headers, "Access-Control-Request-Method": "POST"}
    with plain.http() as http:
        check_error(http.options("/v1/completions", headers=asked), 403)


def test_two_origins_are_none(open_to_app: Running) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: {APP}\r\nOrigin: http://evil.example\r\n"
    assert open_to_app.raw(f"{head}Connection: close\r\n\r\n".encode()).startswith(b"HTTP/1.1 403")


# ---- CORS ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [APP, "app://x"])
def test_an_allowed_page_uses_all_of_it(open_to_app: Running, origin: str) -> None:
    server = open_to_app
    with server.http(headers={"Origin": origin}) as http:
        asked = {"Access-Control-Request-Method": "POST"}
        names = "authorization,content-type,x-stainless-os"
        for wanted, granted in ((None, "Authorization, Content-Type"), (names, names)):
            more = {} if wanted is None else {"Access-Control-Request-Headers": wanted}
            answer = http.options("/v1/chat/completions", headers={**asked, **more})  # without a key, as browsers do
            assert (answer.status_code, answer.content) == (204, b"")
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["access-control-allow-headers"] == granted
            assert {"GET", "POST"} <= set(answer.headers["access-control-allow-methods"].split(", "))
            assert "Origin" in answer.headers["vary"]
            assert "access-control-allow-credentials" not in answer.headers
        key = {"Authorization": "Bearer k"}
        answers = [
            http.post("/v1/completions", json=HI, headers=key),
            http.post("/v1/completions", json={**HI, "stream": True}, headers=key),
            http.post("/v1/completions", json={"prompt": 1}, headers=key),  # errors can be read as well
            http.get("/v1/models"),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 401]
        with http.stream("GET", "/engine/events", headers=key) as events:
            assert next(events.iter_lines()).startswith("id:")
        for answer in (*answers, events):
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["vary"] == "Origin"
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_the_list_opens_no_more_than_it_says(open_to_app: Running) -> None:
    with open_to_app.http() as http:
        for origin in ("http://chat.example.com", f"{APP}:8443", f"{APP}.evil.example", "https://example.com", "null"):
            answer = http.options("/health", headers={"Origin": origin, "Access-Control-Request-Method": "GET"})
            check_error(answer, 403)
            assert "access-control-allow-origin" not in answer.headers
        answer = http.get("/health")  # curl and the openai client send no Origin; a cache must know that it matters
        assert (answer.status_code, answer.headers["vary"]) == (200, "Origin")
        assert "access-control-allow-origin" not in answer.headers
        check_error(http.options("/metrics"), 401)  # no preflight: a request like any other


@pytest.mark.parametrize("option", [
    {"allowed_hosts": ("http://a",)}, {"allowed_hosts": ("a:80",)}, {"allowed_hosts": ("*.a.example",)},
    {"allowed_hosts": "a"}, {"allowed_hosts": ("",)}, {"allowed_hosts": (5,)}, {"allowed_hosts": ("a,b",)},
    {"allowed_hosts": ("bücher.example",)}, {"allowed_hosts": ("a/b",)}, {"allowed_hosts": None},
    {"allowed_origins": ("a",)}, {"allowed_origins": ("null",)}, {"allowed_origins": ("https://a/path",)},
    {"allowed_origins": ("https://*.a",)}, {"allowed_origins": "*"}, {"allowed_origins": ("https://a,https://b",)},
    {"allowed_origins": ('["*"]',)}, {"allowed_origins": ("https://",)}, {"allowed_origins": ("https://a b",)},
])  # fmt: skip
def test_lists_that_could_not_mean_anything(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(option))}.*for example"):
        ServerOptions(**option)


def test_the_command_takes_several(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, seen = make_runner(monkeypatch, capsys), []
    monkeypatch.setattr("nanovllm.server.run.serve", lambda config, options, say: seen.append(options))
    words = ("--allowed-hosts", "a", "--allowed-hosts", "b", "--allowed-origins", APP)
    assert run("serve", *words).code == 0
    assert (seen[0].allowed_hosts, seen[0].allowed_origins) == (("a", "b"), (APP,))
    wrong = run("serve", "--allowed-hosts", "http://a:80")
    assert wrong.code == 2
    assert "allowed_hosts: 'http://a:80' is not a name without scheme and port" in wrong.err


def test_trace_view_answers_to_the_same_names_only() -> None:
    trace = Trace(name="run", header={"num_blocks": 1}, events=[], raw=b"{}\n")
    client = TestClient(make_trace_app(trace), base_url="http://127.0.0.1:8000")
    for path in ("/", "/engine/info", "/engine/trace", "/static/app.js"):
        assert client.get(path).status_code == 200
        check_error(client.get(path, headers={"Host": "evil.example"}), 421)
        check_error(client.get(path, headers={"Origin": "http://evil.example"}), 403)
