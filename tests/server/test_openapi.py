"""The server against its own description: whatever the description allows, the answer is as described, and no 5xx.

PAGEDKV_SCHEMATHESIS_CASES sets the number of cases, PAGEDKV_SCHEMATHESIS_SEED the seed.
"""

import os
from collections import Counter

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CASES = int(os.environ.get("PAGEDKV_SCHEMATHESIS_CASES", "300"))
SEED = int(os.environ.get("PAGEDKV_SCHEMATHESIS_SEED", "0"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
POSTS = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
GETS = ["/v1/models", "/v1/models/{model}", "/health", "/ready", "/version", "/metrics", "/debug/arena"]
GETS += ["/openapi.json"]


def test_the_description_names_every_route(small):
    document = small.http.get("/openapi.json").json()
    assert sorted(document["paths"]) == sorted(POSTS + GETS)
    served = {route.path for route in small.server.config.app.routes if hasattr(route, "endpoint")}
    described = {path.replace("{model}", "{model:path}") for path in document["paths"]}
    assert served - {"/"} == described
    completion = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {option.get("maximum") for option in completion["n"]["anyOf"]} == {4, None}


def test_nothing_the_description_allows_or_forbids_breaks_the_server(small):
    """Cases made from the description, good ones and bad ones, each route its share."""
    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    counts = Counter()
    share = -(-CASES // (2 * (3 * len(POSTS) + 1)))
    for path in POSTS:
        for mode in GenerationMode:
            run(schema[path]["POST"], mode, 3 * share, counts)
    for path in GETS:
        run(schema[path]["GET"], GenerationMode.POSITIVE, share if "{" in path else 1, counts)
    run(schema["/v1/models/{model}"]["GET"], GenerationMode.NEGATIVE, share, counts)
    small.wait_idle()
    assert small.llm.check() == []
    assert counts.total() > CASES / 2 and counts[200] > CASES / 20 and counts[400] > CASES / 8, counts


def run(operation, mode, n, counts):
    """n cases of one operation, answered as described."""

    @seed(SEED)
    @settings(max_examples=n, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=HealthCheck)
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        response = case.call()
        counts[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    check()
