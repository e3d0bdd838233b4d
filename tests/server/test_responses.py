"""/v1/responses: answers, events in their order, what is stored and what is forgotten."""

import json
import threading
from typing import Any

import msgspec
import pytest

from jaxpaged.config import Config, LimitsConfig, LogConfig
from jaxpaged.errors import NotFoundError
from jaxpaged.tokenizer import Tokenizer
from server.ledger import End
from server.protocol.chat import Message
from server.protocol.responses import ResponseObject
from server.response_store import ResponseStore, StoredResponse
from tests.openai.validate import errors
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, Reply, live_server, slowed, talker

pytestmark = pytest.mark.jax

PATH = "/v1/responses"


def ask(server: LiveServer, given: Any = "hello", **fields: Any) -> Reply:
    return server.post(PATH, {"input": given, "temperature": 0, "max_output_tokens": 8, **fields})


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_a_text_is_answered_as_in_a_chat(server: LiveServer) -> None:
    body = ask(server, "hello", instructions="be brief", metadata={"a": "b"}).json
    chat = server.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
            "temperature": 0,
            "max_completion_tokens": 8,
        },
    )
    assert text_of(body) == chat.text
    assert (body["status"], body["incomplete_details"], body["metadata"]) == ("incomplete", {"reason": "max_output_tokens"}, {"a": "b"})
    assert (body["instructions"], body["store"], body["error"], body["tools"]) == ("be brief", True, None, [])
    assert body["usage"]["total_tokens"] == chat.json["usage"]["total_tokens"]


def test_messages_of_all_kinds(server: LiveServer) -> None:
    given = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}], "id": "msg_1", "status": "completed"},
        {"role": "user", "content": "e"},
    ]
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, ("d", "a\nb", "c", "e"), strict=True)]
    chat = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8})
    assert text_of(ask(server, given).json) == chat.text


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_events_come_in_their_order(server: LiveServer, has_logprobs: bool) -> None:
    extra = {"include": ["message.output_text.logprobs"], "top_logprobs": 2} if has_logprobs else {}
    whole = ask(server, "stream", **extra).json
    reply = ask(server, "stream", stream=True, **extra)
    assert reply.headers["content-type"] == "text/event-stream"
    assert b"[DONE]" not in reply.content
    events = reply.json
    named = [line.removeprefix(b"event: ").decode() for line in reply.content.split(b"\n") if line.startswith(b"event: ")]
    kinds = [event["type"] for event in events]
    assert kinds == named
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    last = ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"]
    assert kinds[:4] == first
    assert kinds[-4:] == last
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds[4:-4] == ["response.output_text.delta"] * len(deltas)
    assert "".join(event["delta"] for event in deltas) == text_of(whole) == text_of(events[-1]["response"])
    assert events[0]["response"]["status"] == "in_progress"
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    told = [entry for event in deltas for entry in event["logprobs"]]
    assert told == whole["output"][0]["content"][0]["logprobs"]
    assert len(told) == (8 if has_logprobs else 0)


def test_an_end_token_completes_a_response(chat_tokenizer: Tokenizer) -> None:
    runner = talker(chat_tokenizer)
    talk = runner.next_id
    runner.next_id = lambda history: 2 if history[-1] >= 3 and len(history) % 7 == 0 and len(history) > 30 else talk(history)
    with live_server(chat_tokenizer, runner) as server:
        for is_streamed in (False, True):
            reply = ask(server, "until the end", max_output_tokens=None, stream=is_streamed)
            response = reply.json[-1]["response"] if is_streamed else reply.json
            assert (response["status"], response["incomplete_details"]) == ("completed", None)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_goes_on_from_a_stored_response(server: LiveServer, is_streamed: bool) -> None:
    reply = ask(server, "first", stream=is_streamed)
    first = reply.json[-1]["response"] if is_streamed else reply.json
    assert server.get(f"{PATH}/{first['id']}").json == first
    second = ask(server, "second", previous_response_id=first["id"], instructions="other").json
    assert second["previous_response_id"] == first["id"]
    messages = [
        {"role": "system", "content": "other"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "second"},
    ]
    chat = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8})
    assert text_of(second) == chat.text
    third = ask(server, "third", previous_response_id=second["id"]).json
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_input_items_come_in_pages(server: LiveServer) -> None:
    given = [{"role": "assistant" if index % 2 else "user", "content": f"m{index}", "id": f"msg_{index}"} for index in range(5)]
    path = f"{PATH}/{ask(server, given).json['id']}/input_items"

    def page(query: str) -> tuple[list[str], bool]:
        reply = server.get(path + query)
        assert errors("ResponseItemList", reply.json) == []
        return [item["id"] for item in reply.json["data"]], reply.json["has_more"]

    assert page("") == (["msg_4", "msg_3", "msg_2", "msg_1", "msg_0"], False)
    assert page("?order=asc&limit=2") == (["msg_0", "msg_1"], True)
    assert page("?order=asc&limit=2&after=msg_3") == (["msg_4"], False)
    for query in ("?order=up", "?limit=0", "?limit=101", "?limit=x", "?after=msg_9", "?limit=99999999999999999999"):
        reply = server.get(path + query)
        assert reply.status == 400
        assert reply.error["param"] in query


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "stream"),
        ("stream=True&starting_after=3", "stream"),
        ("starting_after=3", "starting_after"),
        ("include=nobody", "include"),
        ("include[]=nobody", "include"),
        ("stream=false&include[]=message.output_text.logprobs&include_obfuscation=false", None),
    ],
)
def test_a_stored_response_is_given_whole_or_not_at_all(server: LiveServer, query: str, param: str | None) -> None:
    response = server.post(PATH, {"input": "hello", "max_output_tokens": 4}).json
    reply = server.get(f"{PATH}/{response['id']}?{query}")
    if param is None:
        assert reply.json == response
    else:
        assert (reply.status, reply.error["param"]) == (400, param)


def test_what_is_not_stored_is_not_there(server: LiveServer) -> None:
    response = ask(server, "secret", store=False).json
    for reply in (server.get(f"{PATH}/{response['id']}"), server.get(f"{PATH}/{response['id']}/input_items")):
        assert (reply.status, reply.error["code"]) == (404, "not_found")
    reply = ask(server, "x", previous_response_id=response["id"])
    assert (reply.status, reply.error["param"]) == (404, "previous_response_id")
    kept = ask(server, "kept").json["id"]
    assert server.request("DELETE", f"{PATH}/{kept}").json == {"id": kept, "object": "response", "deleted": True}
    assert server.request("DELETE", f"{PATH}/{kept}").status == 404
    assert server.get(f"{PATH}/{'x' * 3000}").status == 404


def test_a_finished_response_cannot_be_cancelled(server: LiveServer) -> None:
    reply = server.post(f"{PATH}/{ask(server).json['id']}/cancel", None)
    assert (reply.status, reply.error["param"]) == (400, "response_id")
    assert server.post(f"{PATH}/resp_nobody/cancel", None).status == 404


def test_a_stream_is_cancelled_by_another_call(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer), 0.01)) as server:
        body = {"input": "long", "max_output_tokens": 400, "stream": True}
        connection = server.stream_until(PATH, body, lambda seen: seen.count(b"output_text.delta") >= 4)
        (running,) = server.service.ledger.open.values()
        assert running.path == ""
        (request_id,) = server.engine._engine.unfinished_ids
        response_id = request_id.removesuffix("-0")
        assert server.get(f"{PATH}/{response_id}").json["status"] == "in_progress"
        early = ask(server, "more", previous_response_id=response_id)
        assert (early.status, early.error["param"]) == (400, "previous_response_id")
        cancelled = server.post(f"{PATH}/{response_id}/cancel", None)
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        content = b""
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(65536)
        connection.close()
        last = json.loads(content.rpartition(b"data: ")[2].partition(b"\n\n")[0])
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        wait_until(lambda: not server.engine._engine.has_work)
        server.counts[End.ABORTED] += 1
        assert server.get(f"{PATH}/{response_id}").json["status"] == "cancelled"


def test_a_whole_response_is_cancelled_by_another_call(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer), 0.01)) as server:
        replies: list[Reply] = []
        thread = threading.Thread(target=lambda: replies.append(ask(server, "long", max_output_tokens=400)))
        thread.start()
        wait_until(lambda: server.engine._engine.scheduler.num_running == 1)
        (request_id,) = server.engine._engine.unfinished_ids
        assert server.post(f"{PATH}/{request_id.removesuffix('-0')}/cancel", None).json["status"] == "cancelled"
        thread.join()
        assert replies[0].json["status"] == "cancelled"


def test_a_client_that_leaves_takes_its_response_with_it(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer), 0.01)) as server:
        for is_streamed in (False, True):
            connection = server.open(PATH, {"input": "long", "max_output_tokens": 400, "stream": is_streamed})
            wait_until(lambda: server.engine._engine.scheduler.num_running == 1)
            (request_id,) = server.engine._engine.unfinished_ids
            path = f"{PATH}/{request_id.removesuffix('-0')}"
            assert server.get(path).json["status"] == "in_progress"
            connection.close()
            server.left()
            wait_until(lambda: not server.engine._engine.has_work)
            wait_until(lambda gone=path: server.get(gone).status == 404)  # type: ignore[misc]


def test_a_failure_is_the_last_event(chat_tokenizer: Tokenizer) -> None:
    from tests.fakes import FailingRunner

    is_bad = False
    runner = FailingRunner(slowed(talker(chat_tokenizer), 0.005), without_id=lambda step, row: is_bad and row == 0)
    with live_server(chat_tokenizer, runner) as server:
        connection = server.stream_until(
            PATH, {"input": "fails", "max_output_tokens": 400, "stream": True}, lambda seen: seen.count(b"output_text.delta") >= 4
        )
        is_bad = True
        content = b""
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(65536)
        connection.close()
        server.counts[End.FAILED] += 1
        server.num_unsure += 1
        last = json.loads(content.rpartition(b"data: ")[2].partition(b"\n\n")[0])
        assert (last["type"], last["response"]["status"], last["response"]["error"]["code"]) == (
            "response.failed",
            "failed",
            "server_error",
        )
        assert errors("ResponseStreamEvent", last) == []
        assert server.get(f"{PATH}/{last['response']['id']}").json["status"] == "failed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": "x" * 600}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 512}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"model": "nobody"}, "model"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_is_refused(server: LiveServer, fields: dict[str, Any], param: str, is_streamed: bool) -> None:
    reply = ask(server, **{"given": "x", "stream": is_streamed, **fields})
    assert reply.status == (404 if param in ("previous_response_id", "model") else 400)
    assert reply.error["param"] == param
    assert ask(server, temperature=2).json["temperature"] == 2
    assert ask(server, include=[], tools=[], text={"format": {"type": "text"}}, tool_choice="auto").status == 200


def made(index: int, text: str = "") -> StoredResponse:
    response = ResponseObject(
        id=f"resp_{index}",
        created_at=0,
        status="completed",
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="m",
        previous_response_id=None,
        store=True,
        temperature=None,
        top_logprobs=0,
        top_p=None,
    )
    return StoredResponse(response, [], [Message(role="user", content=text)])


def test_the_store_forgets_the_oldest() -> None:
    store = ResponseStore(LimitsConfig(max_stored_responses=3))
    for index in range(5):
        store.put(made(index))
    assert len(store) == 3
    for index in range(5):
        if index < 2:
            with pytest.raises(NotFoundError, match="max_stored_responses"):
                store.get(f"resp_{index}")
        else:
            assert store.get(f"resp_{index}").response.id == f"resp_{index}"
    store.remove("resp_3")
    assert len(store) == 2


def test_the_store_is_bounded_in_bytes() -> None:
    store = ResponseStore(LimitsConfig(max_stored_size=10_000))
    for index in range(100):
        store.put(made(index, "x" * 1000))
        assert store.num_bytes == sum(store.get(f"resp_{i}").size for i in range(100) if f"resp_{i}" in store._stored) <= 10_000
    assert 4 <= len(store) <= 9
    store.put(made(100, "x" * 20_000))
    assert len(store) == 0
    assert store.num_bytes == 0
    none = ResponseStore(LimitsConfig(max_stored_responses=0))
    none.put(made(1))
    assert len(none) == 0


def test_a_response_that_grows_counts_once() -> None:
    store = ResponseStore(LimitsConfig())
    stored = made(1)
    store.put(stored)
    stored.response = msgspec.structs.replace(stored.response, metadata={"a": "b" * 500})
    store.put(stored)
    assert (len(store), store.num_bytes) == (1, stored.size)


def test_a_server_with_a_small_store(chat_tokenizer: Tokenizer) -> None:
    config = Config(log=LogConfig(level="error"), limits=LimitsConfig(max_stored_responses=2))
    with live_server(chat_tokenizer, config=config) as server:
        ids = [ask(server, f"{index}").json["id"] for index in range(3)]
        assert [server.get(f"{PATH}/{response_id}").status for response_id in ids] == [404, 200, 200]
