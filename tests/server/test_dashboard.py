"""The live page's files and stream, over a scripted engine: who may see what, how much and how often, and that nothing keeps running."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.config import Config, LogConfig, ServerConfig
from jaxpaged.errors import ServerDrainingError, TooManyViewersError
from jaxpaged.request import SamplingParams
from jaxpaged.tokenizer import Tokenizer
from server.dashboard import frames
from server.dashboard.files import FILE_PATHS, FILES, FOLDER, MEDIA_TYPES
from server.dashboard.viewers import ENDED, FRAME_S, MAX_VIEWERS, Viewer, Viewers
from server.phase import Phase
from server.service import Service
from tests.server.door_server import Connection, DoorServer, wait_until
from tests.server.live import LiveServer, live_server, talker

pytestmark = pytest.mark.jax

KEY = "sk-of-the-page"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def keyed(chat_tokenizer: Tokenizer) -> Iterator[LiveServer]:
    config = Config(log=LogConfig(level="error"), server=ServerConfig(api_key=(KEY,)))
    with live_server(chat_tokenizer, talker(chat_tokenizer), config) as server:
        yield server


def ask(server: LiveServer, text: str = "hello", **headers: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8}
    assert server.post("/v1/chat/completions", body, authorization=f"Bearer {KEY}", **headers).status == 200


def watch(door: DoorServer, key: str = KEY, **options: Any) -> Connection:
    """Opens the stream and leaves it unread."""
    connection = door.connect(**options)
    connection.send(f"GET /dashboard/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n")
    return connection


def events_of(data: bytes) -> list[tuple[str, Any]]:
    """Names and contents of the whole events of a chunked answer."""
    text = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", b"\r\n" + data.partition(b"\r\n\r\n")[2]).decode()
    found = []
    for part in text.split("\n\n")[:-1]:
        name, _, content = part.partition("\n")
        found.append((name.removeprefix("event: "), json.loads(content.removeprefix("data: "))))
    return found


def frame_when(connection: Connection, is_so: Any) -> dict[str, Any]:
    """The first frame of which it is so."""
    while True:
        connection.read_some(1)
        for name, content in events_of(connection.seen):
            if name == "frame" and is_so(content):
                return dict(content)


def test_the_files_need_no_key_and_carry_no_data(keyed: LiveServer) -> None:
    assert {f"/dashboard/{path.name}" for path in FOLDER.iterdir()} - {"/dashboard/index.html"} | {"/dashboard"} == FILE_PATHS
    for path in sorted(FILE_PATHS):
        reply = keyed.get(path)
        name = path.rpartition("/")[2] if path != "/dashboard" else "index.html"
        assert (reply.status, reply.content) == (200, (FOLDER / name).read_bytes())
        assert reply.headers["content-type"].startswith(MEDIA_TYPES[f".{name.rpartition('.')[2]}"])
        policy = reply.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'self'"
        assert not any(re.search(r"unsafe|http|[*]|^script|^style|^connect", word) for word in policy)
        assert (reply.headers["x-content-type-options"], reply.headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert keyed.request("HEAD", path).status == 200
        assert keyed.post(path, {}).status == 401


def test_everything_else_of_the_page_needs_one(keyed: LiveServer) -> None:
    for name in ("events", "", "none.js", "../metrics", "main.js/", "/main.js"):
        path = f"/dashboard/{name}"
        assert keyed.get(path).status == 401, path
        assert "not known" in keyed.get(path, authorization="Bearer wrong").error["message"]
    for path in ("/dashboard/none.js", "/dashboard/..%2f..%2fauth.py", "/dashboard/%2e%2e", "/dashboard/index.html%00"):
        assert keyed.get(path, authorization=f"Bearer {KEY}").status in (400, 404), path


class Tags(HTMLParser):
    """What a page has of scripts, styles and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self._is_in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._is_in = tag

    def handle_endtag(self, tag: str) -> None:
        self._is_in = ""

    def handle_data(self, data: str) -> None:
        if self._is_in in ("script", "style"):
            self.inline += data.strip()


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    tags = Tags()
    tags.feed((FOLDER / "index.html").read_text())
    assert tags.inline == ""
    for tag, attributes in tags.found:
        assert tag != "style"
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        for name in ("src", "href"):
            if (address := attributes.get(name)) is not None:
                assert address in FILE_PATHS or address.startswith("#"), address
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"(?:https?:)?//[a-z][\w.-]*\.[a-z]+|url\(", text) == [], path.name
    imported = {name for path in FOLDER.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert imported | {"main.js", "dashboard.css", "favicon.svg"} == set(FILES)


def test_what_clients_say_gets_into_the_page_as_text_alone() -> None:
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\.srcdoc|setHTML|DOMParser|localStorage"
    for path in FOLDER.glob("*.js"):
        assert re.findall(banned, path.read_text()) == [], path.name


def test_the_stream_tells_what_the_engine_does(keyed: LiveServer) -> None:
    ask(keyed, x_request_id="ignored", **{"x-request-id": "my-name"})
    connection = watch(keyed.door)
    busy = threading.Thread(target=lambda: [ask(keyed, f"again {number}") for number in range(3)])
    frame = frame_when(connection, lambda frame: frame["requests"] and frame["pages"] is not None)
    busy.start()
    busy.join()
    connection.close()
    head = connection.seen.partition(b"\r\n\r\n")[0].lower()
    assert b"content-type: text/event-stream" in head
    assert b"cache-control: no-store" in head
    assert events_of(connection.seen)[0][0] == "history"
    assert (frame["phase"], frame["model"], frame["viewers"]) == ("ready", "smollm2-135m", 1)
    assert frame["verdict"]["state"] in ("early", "healthy", "idle", "found")
    pool = frame["pages"]
    assert pool["num_pages"] == len(pool["map"]["owners"]) == len(pool["map"]["used"]) == 64
    assert "9" in pool["map"]["cached"], "the answer's pages are kept for their prefixes"
    (row,) = [row for row in frame["requests"] if row["name"] == "my-name"]
    assert (row["reason"], row["num_output_tokens"]) == ("length", 8)
    assert row["queued_s"] <= row["scheduled_s"] <= row["first_token_s"] <= row["finished_s"]
    wait_until(lambda: keyed.service.ledger.num_open == 0)


def test_a_request_id_is_text_in_the_stream(keyed: LiveServer) -> None:
    async def generate() -> None:
        await keyed.engine.generate("hello", SamplingParams(temperature=0, max_tokens=4), HOSTILE)

    asyncio.run(generate())
    keyed.num_unsure += 1
    ask(keyed, **{"x-request-id": HOSTILE})
    connection = watch(keyed.door)
    frame = frame_when(connection, lambda frame: frame["requests"])
    connection.close()
    assert [row["id"] for row in frame["requests"] if HOSTILE in row["id"]] == [HOSTILE]
    assert [row for row in frame["requests"] if HOSTILE in row["name"]] == [], "the server takes no such header over"
    wait_until(lambda: keyed.service.ledger.num_open == 0)


def test_the_seventeenth_viewer_is_told_and_a_place_becomes_free(keyed: LiveServer) -> None:
    watching = [watch(keyed.door) for _ in range(MAX_VIEWERS)]
    for connection in watching:
        connection.read_until(b"event: history")
    reply = keyed.get("/dashboard/events", authorization=f"Bearer {KEY}")
    assert (reply.status, reply.error["code"]) == (503, "too_many_viewers")
    assert "16 pages" in reply.error["message"]
    watching.pop().close()
    wait_until(lambda: keyed.service.ledger.num_open == MAX_VIEWERS - 1)
    watching.append(watch(keyed.door))
    watching[-1].read_until(b"event: history")
    for connection in watching:
        connection.close()
    wait_until(lambda: keyed.service.ledger.num_open == 0)


def test_it_ends_when_the_server_begins_to_stop(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer) as server:
        connection = watch(server.door)
        connection.read_until(b"event: frame")
        server.service.drain()
        connection.read_until(b"0\r\n\r\n")
        assert [name for name, _ in events_of(connection.seen)][-1] == "end"
        assert events_of(connection.seen)[-2][1]["phase"] == "draining"
        assert server.get("/dashboard/events").error["code"] == "server_draining"
        server.service.phase = Phase.READY  # as the checks at the end want it


class Pace:
    """A clock's `sleep` that lets frames come one at a time, when a test says so."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._go = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self._go.acquire()

    async def next(self) -> None:
        """One rest is over, and the next has begun."""
        before = len(self.asked)
        self._go.release()
        while len(self.asked) == before:
            await asyncio.sleep(0)


async def settled(viewer: Viewer) -> bytes:
    return await anext(aiter(viewer.frames()))


def run_viewers(check: Any) -> None:
    """Runs a check over viewers of a service without an engine, that takes place when a pace says so."""

    async def run() -> None:
        pace, service = Pace(), Service(Config())
        service.phase = Phase.READY
        service.progress.num_open = 1  # something moves, so that each rest is the short one
        await check(Viewers(service, pace), service, pace)

    asyncio.run(run())


def test_a_frame_is_made_once_for_all_and_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    real = frames._encode
    monkeypatch.setattr(frames, "_encode", lambda content: made.append(b"") or real(content))

    async def check(viewers: Viewers, service: Service, pace: Pace) -> None:
        joined = [viewers.join() for _ in range(MAX_VIEWERS)]
        with pytest.raises(TooManyViewersError, match="16 pages"):
            viewers.join()
        streams = [viewer.frames() for viewer in joined]
        for number in range(5):
            got = {await anext(stream) for stream in streams}
            assert len(got) == 1
            assert len(made) == number + 1
            await pace.next()
        assert set(pace.asked) == {FRAME_S}
        for viewer in joined:
            viewers.leave(viewer)
        number = len(made)
        for _ in range(50):
            await asyncio.sleep(0)
        assert (len(made), viewers.num_viewers) == (number, 0)

    run_viewers(check)
    assert FRAME_S >= 0.25


def test_a_slow_viewer_has_one_frame_waiting_and_misses_the_others() -> None:
    async def check(viewers: Viewers, service: Service, pace: Pace) -> None:
        slow, quick = viewers.join(), viewers.join()
        stream = quick.frames()
        times = []
        for number in range(6):
            service.clocks = service.clocks._replace(wall=lambda number=number: 1000.0 + number)
            await pace.next()
            times.append(json.loads((await anext(stream)).partition(b"data: ")[2])["time_s"])
        assert len(set(times)) >= 5
        assert json.loads((await settled(slow)).partition(b"data: ")[2])["time_s"] == times[-1]
        viewers.leave(slow)
        viewers.leave(quick)

    run_viewers(check)


def test_an_idle_engine_is_told_of_once_a_second() -> None:
    async def check(viewers: Viewers, service: Service, pace: Pace) -> None:
        service.progress.num_open = 0
        viewer = viewers.join()
        stream = viewer.frames()
        await anext(stream)
        for _ in range(3):
            await pace.next()
        assert viewer._frame is None, "three quarters of a second, and nothing has happened"
        await pace.next()
        await anext(stream)
        await pace.next()
        service.progress.num_moves += 1
        await pace.next()
        await anext(stream)
        viewers.leave(viewer)

    run_viewers(check)


def test_nobody_waits_for_an_engine_that_hangs() -> None:
    """Its copy of the pool is asked for once, and given up when nobody looks."""

    class Hanging:
        def __init__(self) -> None:
            self.asked, self.left = 0, 0

        async def pool_copy(self) -> Any:
            self.asked += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1

    async def check(viewers: Viewers, service: Service, pace: Pace) -> None:
        engine = Hanging()
        service.engine = engine  # type: ignore[assignment]
        viewer = viewers.join()
        stream = viewer.frames()
        for _ in range(4):
            assert b'"pages":null' in await anext(stream)
            await pace.next()
        assert engine.asked == 1
        viewers.leave(viewer)
        while not engine.left:
            await asyncio.sleep(0)

    run_viewers(check)


def test_a_fault_of_ours_ends_the_stream_and_not_the_server(
    keyed: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frames.FrameMaker, "_take_scrapes", lambda self: 1 / 0)

    async def check(viewers: Viewers, service: Service, pace: Pace) -> None:
        assert await anext(viewers.join().frames()) == ENDED
        assert "no frame" in caplog.text

    run_viewers(check)
    keyed.tracebacks.clear()


def test_nobody_joins_a_server_that_stops() -> None:
    async def check(viewers: Viewers, service: Service, pace: Pace) -> None:
        for phase in (Phase.DRAINING, Phase.STOPPED, Phase.DEAD):
            service.phase = phase
            with pytest.raises(ServerDrainingError):
                viewers.join()

    run_viewers(check)


def test_a_server_that_starts_is_shown_starting() -> None:
    async def check(viewers: Viewers, service: Service, pace: Pace) -> None:
        service.phase = Phase.STARTING
        service.emit(events.PhaseChanged(time_s=1.0, phase="load", message="loading 3 of 10", done=3, total=10))
        frame = json.loads((await settled(viewers.join())).partition(b"data: ")[2])
        assert (frame["phase"], frame["message"], frame["pages"]) == ("starting", "loading 3 of 10", None)

    run_viewers(check)
