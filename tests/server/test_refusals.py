"""What a server refuses: with which status, in OpenAI's form, naming the field; and never with a 5xx."""

import json

import openai
import pytest
from conftest import MODEL, TINY, served
from pydantic import ValidationError

from pagedkv.server.errors import from_validation
from pagedkv.server.protocol import ChatRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def refusal(response, status=400):
    """The error object of a refused request, its form checked."""
    assert response.status_code == status, (response.status_code, response.text)
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"] and "\n" not in body["error"]["message"]
    return body["error"]


BAD_GENERATION = [
    ({"n": 0}, "n"), ({"n": 5}, "n"), ({"n": 10**30}, "n"), ({"n": 1.0}, "n"), ({"n": "1"}, "n"), ({"n": True}, "n"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": 1e7}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.01}, "top_p"),
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 2**31}, "max_tokens"), ({"max_tokens": 3.5}, "max_tokens"),
    ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop"), ({"stop": ["a"] * 257}, "stop"), ({"stop": [1]}, "stop.0"),
    ({"stream": "yes"}, "stream"), ({"stream": 1}, "stream"), ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"presence_penalty": 2.1}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"top_k": -2}, "top_k"), ({"min_p": 1.5}, "min_p"), ({"typical_p": 0}, "typical_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"), ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"prompt_logprobs": 6}, "prompt_logprobs"),
    ({"priority": 2**31}, "priority"), ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": 1}, "cache_salt"),
    ({"timeout": 0}, "timeout"), ({"timeout": -1}, "timeout"), ({"user": 3}, "user"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"structured_outputs": {}}, "structured_outputs"), ({"tempreature": 1}, "tempreature"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"), ({"model": 3}, "model"),
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fields, param", BAD_GENERATION, ids=lambda value: str(value)[:60])
def test_bad_values(small, path, fields, param):
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    error = refusal(small.post(path, {**body, **fields}))
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert param in error["message"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"), ({"prompt": ["a", ""]}, "prompt"), ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"), ({"prompt": [1, True]}, "prompt"), ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, 2.0]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [100_000]}, "prompt"),
        ({"prompt": "x" * 190_000}, "prompt"),
        ({"prompt": ["x"] * 9}, "prompt"), ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"), ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "logit_bias": {"01": 1, "1": 2}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": 1, "2": 2, "001": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"prompt": "x", "allowed_token_ids": [9999999]}, "allowed_token_ids"),
        ({"prompt": "x", "stop_token_ids": [9999999]}, "stop_token_ids"),
        ({"prompt": "x", "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "structured_outputs"),
        ({"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
            "type": "gibberish"}}}}, "response_format"),
        ({"prompt": "x", "messages": USER}, "messages"), ({"prompt": "x", "echo": "no"}, "echo"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_bad_completions(small, fields, param):
    error = refusal(small.post(COMPLETIONS, fields))
    assert error["param"] == param and (param in error["message"] or param == "response_format")


@pytest.mark.parametrize(
    "fields, part",
    [
        ({}, "messages"), ({"messages": []}, "messages"), ({"messages": "x"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [{"role": "user"}]}, "content"), ({"messages": [{"role": "king", "content": "x"}]}, "role"),
        ({"messages": [{"content": "x"}]}, "role"), ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "colour"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": USER, "logprobs": 3}, "logprobs"), ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ({"messages": USER, "max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"), ({"messages": USER, "echo": True}, "echo"),
        ({"messages": USER, "tool_choice": "required"}, "tools"), ({"messages": USER, "tools": []}, "tools"),
        ({"messages": USER, "tools": [TOOL, TOOL]}, "same name"), ({"messages": USER, "tools": [TOOL] * 9}, ""),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "'g'"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "'messages'"),
        ({"messages": USER, "chat_template_kwargs": {"self": 1}}, "'self'"),
        ({"messages": USER, "store": True}, "store"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]}, "arguments"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}]}]}, "arguments"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_bad_chats(small, fields, part):
    error = refusal(small.post(CHAT, fields))
    assert part in error["message"] and names_a_field(error, "ChatRequest", small)


def names_a_field(error, model, live):
    """Whether `param` begins with a field of the model in the server's own description, or is one it does not know."""
    fields = live.http.get("/openapi.json").json()["components"]["schemas"][model]["properties"]
    return error["param"].split(".")[0] in fields or error["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    "path, fields, part",
    [
        ("/v1/embeddings", {}, "input"), ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": ["x"] * 9}, "input"),
        ("/v1/embeddings", {"input": [300_000]}, "300000"), ("/v1/embeddings", {"input": "x" * 300}, "300 tokens"),
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"), ("/detokenize", {"tokens": [1, -1]}, "tokens"),
    ],
)  # fmt: skip
def test_bad_requests_of_other_routes(small, path, fields, part):
    error = refusal(small.post(path, fields))
    model = {"/v1/embeddings": "EmbeddingRequest"}.get(path, f"{path[1:].title()}Request")
    assert part in error["message"] and names_a_field(error, model, small)


def test_what_is_too_long_is_blamed_on_its_field(small):
    long = "x" * 600
    for path, field, body in (
        (COMPLETIONS, "prompt", {"prompt": long}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/embeddings", "input", {"input": long}),
    ):
        error = refusal(small.post(path, {**body}))
        assert error["param"] == field and error["code"] == "context_length_exceeded", path


MANY = 5000


@pytest.mark.parametrize(
    "path, body, param",
    [
        (CHAT, {"messages": USER, **{f"a{i}": 1 for i in range(MANY)}}, "a0"),
        (CHAT, {"messages": [{"role": "user", "content": "x", **{f"a{i}": 1 for i in range(MANY)}}]}, "messages.0.a0"),
        (CHAT, {"messages": [1] * MANY}, "messages.0"),
        (CHAT, {"messages": [{"role": "user"}] * MANY}, "messages.0.content"),
        (CHAT, {"messages": USER, "tools": [{}] * MANY}, "tools.0.type"),
        (CHAT, {"messages": USER, "metadata": {str(i): i for i in range(MANY)}}, "metadata.0"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]}, "messages.0.content.0.text"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": ["a"] * MANY}, "stop_token_ids.0"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": ["a"] * MANY}, "allowed_token_ids.0"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): "a" for i in range(MANY)}}, "logit_bias.0"),
        (COMPLETIONS, {"prompt": "x", "stop": [1] * MANY}, "stop.0"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"choice": [1] * MANY}}, "structured_outputs.choice.0"),
        ("/detokenize", {"tokens": ["a"] * MANY}, "tokens.0"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_of_many_faults_the_first_is_told_and_no_other_looked_for(small, monkeypatch, path, body, param):
    """Bodies full of faults would hold up everybody else for seconds if each of them were found."""
    from pagedkv.server import answering

    found = []
    from_validation = answering.from_validation

    def counted(error, value):
        found.append(error.error_count())
        return from_validation(error, value)

    monkeypatch.setattr(answering, "from_validation", counted)
    assert refusal(small.post(path, body))["param"] == param
    assert found and found[0] <= 8


def test_a_key_that_comes_twice_is_found_in_one_pass(small):
    """The last of very many keys: a search from the start for each of them would take hours."""
    raw = b"{" + b",".join(b'"%d":1' % i for i in range(15_000)) + b',"14999":1}'
    error = refusal(small.http.post("/tokenize", content=raw, headers={"Content-Type": "application/json"}))
    assert "'14999' comes twice" in error["message"] and error["param"] == "14999"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"a": 1, "a": 2}', b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\u0000"}',
        b'{"n": 1e999}', b'{"n": ' + b"9" * 10_000 + b"}", b'{"prompt": ' + b"[" * 100_000, b'\xff\xfe{\x00}\x00',
        b'{"prompt": ' + b"[" * 70 + b"1" + b"]" * 70 + b"}", b"\x00" * 100, b'{"prompt": "\xc0\xaf"}',
    ],
    ids=lambda raw: raw[:24].decode("latin-1"),
)  # fmt: skip
def test_bodies_that_are_no_json(small, path, raw):
    refusal(small.http.post(path, content=raw, headers={"Content-Type": "application/json"}))


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/x-www-form-urlencoded"}, 415), ({}, 415),
        ({"Content-Type": "application/json; charset=latin-1"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json"}, 200), ({"Content-Type": "application/JSON; charset=UTF-8"}, 200),
    ],
)  # fmt: skip
def test_what_bodies_may_say_they_are(small, headers, status):
    response = small.http.post("/tokenize", content=b'{"prompt": "hello"}', headers=headers)
    assert response.status_code == status
    if status != 200:
        assert refusal(response, status)["code"] == "unsupported_media_type"


def test_large_bodies(small):
    limit = small.service.settings.max_body
    fits = json.dumps({"prompt": "x"}).encode()
    fits += b" " * (limit - len(fits))
    headers = {"Content-Type": "application/json"}
    assert small.http.post("/tokenize", content=fits, headers=headers).status_code == 200
    for content in (fits + b" ", b" " * 5_000_000, iter([fits, b" "])):  # the last one without a length
        refusal(small.http.post("/tokenize", content=content, headers=headers), 413)


def test_long_prompts_are_refused_with_the_numbers(small):
    for path, body in (
        (COMPLETIONS, {"prompt": "x" * 300}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}),
    ):
        error = refusal(small.post(path, body))
        assert error["code"] == "context_length_exceeded" and "context of 256" in error["message"]
    error = refusal(small.post(COMPLETIONS, {"prompt": ["x", "x" * 300]}))
    assert error["code"] == "context_length_exceeded"
    assert not small.llm.engine.has_unfinished()


def test_texts_too_long_for_any_tokens_are_never_tokenized(small, monkeypatch):
    """Their number of characters is enough; what is refused by it costs others nothing."""
    tokenizer, text = small.llm.tokenizer, "x" * 150_000
    monkeypatch.setattr(tokenizer, "max_token_chars", 100)
    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(tokenizer, name, lambda *_, **__: pytest.fail("tokenized"))
    user = [{"role": "user", "content": text}]
    for path, body, param in (
        (COMPLETIONS, {"prompt": text}, "prompt"),
        ("/v1/embeddings", {"input": text}, "input"),
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", {"messages": user}, "messages"),
        (CHAT, {"messages": user}, "messages"),
    ):
        error = refusal(small.post(path, body))
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert "150000 characters" in error["message"]


def test_lists_are_bounded_before_their_items_are_looked_at(small):
    """One error and not one for each of a hundred thousand items."""
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": USER * 60_000})
    error = from_validation(caught.value, {"messages": USER * 60_000})
    assert error.param == "messages" and "at most 8192" in error.message
    error = refusal(small.post(COMPLETIONS, {"prompt": [1] * 90_000}))
    assert error["code"] == "context_length_exceeded" and "90000 tokens" in error["message"]


def test_routes_and_methods(small):
    assert refusal(small.http.get("/v1/nothing"), 404)["type"] == "not_found_error"
    assert refusal(small.http.get(COMPLETIONS), 405)
    assert small.http.get(COMPLETIONS).headers["allow"] == "POST"
    for method, path in (("DELETE", "/v1/models"), ("PUT", CHAT), ("PATCH", "/health"), ("OPTIONS", COMPLETIONS)):
        refusal(small.http.request(method, path), 405)
    for path in ("/v1/models/", "/v1/completions/", "/static/../app.py", "/v1/%2e%2e/health", "/%00"):
        refusal(small.http.get(path), 404)
    assert refusal(small.post(COMPLETIONS, {"model": "gpt-17", "prompt": "x"}), 404)["code"] == "model_not_found"
    for path in ("/v1/models/gpt-17", "/v1/models/a/b"):
        assert refusal(small.http.get(path), 404)["param"] == "model"
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        refusal(small.post(path, {**body, "model": "gpt-17"}), 404)
        assert small.post(path, {**body, "model": TINY}).status_code == 200


def test_the_official_client_raises_its_own_errors(real):
    client = real.client()
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.chat.completions.create(model="gpt-17", messages=USER)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a " * 20_000, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_a_full_queue(tiny_path):
    from pagedkv import LLM

    with LLM(tiny_path, threads=1, max_num_seqs=1, max_waiting=1) as llm, served(llm, max_prompts=16) as live:
        client = live.client()
        body = {"model": live.service.names[0], "prompt": ["x"] * 8, "max_tokens": 4}
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**body)
        assert int(caught.value.response.headers["retry-after"]) >= 1 and caught.value.code == "queue_full"
        live.wait_idle()
        assert llm.engine.stats()["pages_in_use"] == 0 and llm.check() == []
        assert client.completions.create(**{**body, "prompt": "x"}).choices


# Keys and origins

KEYS = ("first-key", "second")


@pytest.fixture(scope="module")
def locked(tiny_path):
    from pagedkv import LLM

    with (
        LLM(tiny_path, threads=1, kv_pages=40) as llm,
        served(llm, api_keys=KEYS, cors_origins=("https://app.example",)) as live,
    ):
        yield live


def test_keys(locked):
    routes = {route["path"] if isinstance(route, dict) else route for route in locked.http.get(
        "/openapi.json", headers={"Authorization": "Bearer second"}).json()["paths"]}  # fmt: skip
    assert len(routes) > 10
    for route in [*routes, "/", "/static/app.js", "/nothing"]:
        path = route.replace("{model}", locked.service.names[0])
        response = locked.http.get(path)
        if route in ("/health", "/ready"):
            assert response.status_code == 200
            continue
        assert refusal(response, 401)["type"] == "authentication_error" and response.headers["www-authenticate"]
        assert refusal(locked.http.post(path, json={}), 401)
        for key in KEYS:
            headers = {"Authorization": f"Bearer {key}"}
            assert locked.http.get(path, headers=headers).status_code in (200, 404, 405), path
    assert locked.http.get("/").headers["www-authenticate"].startswith("Basic ")


@pytest.mark.parametrize(
    "header",
    [
        "", "Bearer", "Bearer wrong", "Bearer first-ke", "Bearer first-key2", "first-key", "Basic first-key",
        "Bearer first-key second", "Basic !!!", "Basic Zmlyc3Qta2V5", "Digest first-key", b"Bearer \xff\xfe",
    ],
)  # fmt: skip
def test_wrong_keys(locked, header):
    refusal(locked.http.get("/version", headers={"Authorization": header}), 401)
    refusal(locked.http.get("/version", headers={"X-Api-Key": "first-key"}), 401)


def test_keys_in_both_forms(locked):
    for headers in ({"Authorization": "bearer first-key"}, {"Authorization": "Bearer  second"}):
        assert locked.http.get("/version", headers=headers).status_code == 200
    assert locked.http.get("/version", auth=("anybody", "second")).status_code == 200
    assert [*map(str, locked.client().with_options(api_key="second").models.list())]
    with pytest.raises(openai.AuthenticationError):
        locked.client().models.list()
    twice = [("Authorization", "Bearer second"), ("Authorization", "Bearer wrong")]
    refusal(locked.http.get("/version", headers=twice), 401)


def test_origins(locked, small):
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    preflight = locked.http.options(CHAT, headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    refused = locked.http.get("/version", headers={"Origin": "https://app.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://app.example"
    for other in ("https://evil.example", "null"):
        response = locked.http.get("/health", headers={"Origin": other})
        assert "access-control-allow-origin" not in response.headers
    response = small.http.get("/health", headers={"Origin": "https://app.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]
