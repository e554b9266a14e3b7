"""The live map of the arena in headless Chromium: its counts, cells, holders and charts."""

import re
import time

import pytest
from page_scripts import SHOWN, Load

from pagedkv import SamplingParams

KINDS = ["free", "cached", "used", "shared2", "shared3", "shared5"]


def test_counts_equal_the_metrics_when_idle(browser, crowded):
    crowded.llm.generate("A few cached pages. " * 20, SamplingParams(max_tokens=2))
    browser.open(crowded.url)
    metrics = crowded.metrics()
    shown = browser.wait(SHOWN)
    states = {name: metrics[f'pagedkv:pages{{state="{name}"}}'] for name in ("free", "cached", "in_use")}
    assert states["cached"] > 0 and states["in_use"] == 0
    assert shown["counts"] == dict.fromkeys(KINDS, 0) | {"free": states["free"], "cached": states["cached"]}
    assert shown["label"] == (
        f"Map of {crowded.llm.kv.n_pages} pages: 0 in use, {states['cached']:.0f} cached, {states['free']:.0f} free"
    )
    assert shown["queue"] == "0 + 0" and shown["chips"] == []


def test_counts_equal_the_metrics_of_the_same_step(browser, crowded):
    """With requests in flight: what the page shows at a step is what /metrics says at that step."""
    by_step, seen = {}, {}
    browser.open(crowded.url)
    with Load(crowded, 5):
        deadline = time.monotonic() + 60
        while (stats := crowded.llm.engine.stats())["running"] + stats[
            "waiting"
        ] < 10:  # until nobody comes amid a step
            assert time.monotonic() < deadline, stats
        while len(set(by_step) & set(seen)) < 5:
            assert time.monotonic() < deadline, (len(by_step), len(seen))
            metrics = crowded.metrics()
            by_step[metrics["pagedkv:engine_steps_total"]] = metrics
            shown = browser.script(SHOWN)
            if shown:
                seen[shown["step"]] = shown
    crowded = 0
    for step in set(by_step) & set(seen):
        metrics, shown = by_step[step], seen[step]
        counts = shown["counts"]
        in_use = sum(counts[kind] for kind in KINDS[2:])
        assert in_use == metrics['pagedkv:pages{state="in_use"}'] == shown["occupancy"]["used"]
        assert counts["cached"] == metrics['pagedkv:pages{state="cached"}'] == shown["occupancy"]["cached"]
        assert counts["free"] == metrics['pagedkv:pages{state="free"}'] == shown["occupancy"]["free"]
        running, waiting = metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]
        assert shown["queue"] == f"{running:.0f} + {waiting:.0f}"
        crowded += counts["shared5"] > 0 and counts["used"] > 0
    assert crowded
    assert any(shown["tokens"] != "–" and float(shown["tokens"]) > 0 for shown in seen.values())


def test_a_page_tells_whose_it_is(browser, crowded):
    """By pointer and by keyboard: the readout names state and holders, and their pages alone stay bright."""
    browser.open(crowded.url)
    with Load(crowded, 2):
        browser.wait(
            "return document.querySelector('#legend [data-kind=shared3] b').textContent > 0 &&"
            " document.querySelectorAll('#requests button').length == 2"
        )
        browser.script("document.getElementById('map').focus()")
        browser.keys("\ue010")  # End
        assert re.match(r"Page 255: (free|cached: nobody holds it)", browser.wait(TOLD, "Page 255:"))
        arena = crowded.http.get("/debug/arena").json()
        page = arena["owners"][0]["pages"][0]  # begins the prompts of both
        browser.keys("\ue011", *["\ue014"] * page)  # Home, right
        told = browser.wait(TOLD, f"Page {page}:")
        assert "in use, shared by 4 outputs" in told and told.count("text ") == 2
        browser.keys("\ue015", "\ue013", "\ue014", "\ue012")  # down, up, right, left: there again
        assert browser.wait(TOLD, f"Page {page}:")
        browser.keys("\ue007")  # Enter keeps both marked
        assert browser.script(PRESSED) == 2
        browser.keys("\ue00c")
        assert browser.script(PRESSED) == 0
        browser.click("#requests button")
        assert browser.script(PRESSED) == 1
        browser.script("document.activeElement.blur()")
        assert re.match(r"text [0-9a-f]{8}: \d+ pages, \d+ tokens in 2 outputs\.$", browser.text("#readout"))


TOLD = "const text = document.getElementById('readout').textContent; return text.startsWith(arguments[0]) && text"
PRESSED = "return document.querySelectorAll('#requests [aria-pressed=true]').length"


DRAWN = """
    const [n, width] = args;
    const frame = document.createElement("div"), canvas = document.createElement("canvas");
    frame.style.width = `${width}px`;
    frame.append(canvas);
    document.body.append(frame);
    await new Promise((done) => setTimeout(done, 50));
    const map = new m.PageMap(canvas, { onPoint() {}, onPin() {} });
    const states = new Uint8Array(n), refs = new Uint8Array(n);
    map.update(states, refs);
    const later = states.map((_, i) => i % 3), held = later.map((state, i) => state === 2 ? 1 + i % 7 : 0);
    map.update(later, held);
    const begin = performance.now();
    while (map.fading && performance.now() - begin < 5000) await new Promise(requestAnimationFrame);
    const { pitch, columns } = map.cell;
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const wrong = [];
    const style = getComputedStyle(document.documentElement);
    const names = ["free", "cached", "used", "used", "shared2", "shared3", "shared3", "shared5", "shared5", "shared5"];
    for (let i = 0; i < n; i++) {
        const name = later[i] < 2 ? names[later[i]] : names[2 + held[i]];
        const middle = Math.floor((pitch - 1) / 2);
        const at = 4 * ((Math.floor(i / columns) * pitch + middle) * canvas.width + (i % columns) * pitch + middle);
        const colour = "#" + [0, 1, 2].map((k) => pixels[at + k].toString(16).padStart(2, "0")).join("");
        if (colour !== style.getPropertyValue(`--page-${name}`).trim()) wrong.push([i, name, colour]);
    }
    const size = [canvas.width, canvas.height];
    frame.remove();
    return { wrong: wrong.slice(0, 5), size };
"""


@pytest.mark.parametrize("n", [1, 7, 1000, 32768, 100_000])
def test_every_page_is_a_cell_of_its_colour(browser, crowded, n):
    browser.open(crowded.url)
    result = browser.module("map.js", DRAWN, n, 600)
    assert result["wrong"] == []
    assert result["size"][0] <= 600 and result["size"][0] * result["size"][1] >= n


def test_layout_of_cells(browser, crowded):
    """All cells fit the width, and the height if whole pixels allow; cells are as large as can be."""
    browser.open(crowded.url)
    sizes = [
        (n, width, height)
        for n in (1, 2, 63, 64, 1000, 4096, 100_000)
        for width in (1, 300, 601)
        for height in (150, 400)
    ]
    for (n, width, height), cell in zip(
        sizes, browser.module("map.js", "return args[0].map((s) => m.layout(...s, 20))", sizes), strict=True
    ):
        pitch, columns, rows = cell["pitch"], cell["columns"], cell["rows"]
        assert 1 <= pitch <= 20 and columns * (rows - 1) < n <= columns * rows
        assert columns * pitch <= max(width, pitch)
        if pitch > 1:
            assert rows * pitch <= height
        if pitch < 20 and width > 1:
            larger = pitch + 1
            assert -(-n // max(1, width // larger)) * larger > height


def test_rates_are_counted_over_time_and_not_over_gaps(browser, crowded):
    browser.open(crowded.url)
    result = browser.module(
        "charts.js",
        """
        const history = new m.History();
        const stats = (n) => ({
            generation_tokens: 10 * n, preemptions: n > 4 ? 2 : 0, running: n, waiting: 2 * n, steps: n,
            prefix_query_tokens: n > 2 ? 100 : 0, prefix_hit_tokens: n > 2 ? 25 : 0,
        });
        for (const n of [0, 1, 2, 3]) history.add(n, stats(n));
        history.pause();
        history.add(100, stats(103));
        history.add(101, stats(104));
        const values = (points) => points.map((point) => point.value);
        const names = ["tokens", "running", "waiting", "hits", "preemptions"];
        const out = Object.fromEntries(names.map((name) => [name, values(history[name])]));
        history.add(102, { ...stats(0), steps: 0 });
        return { ...out, after: history.samples.length };
        """,
    )
    assert result["tokens"] == [None, 10, 10, 10, None, None, 10]
    assert result["running"] == [0, 1, 2, 3, None, 103, 104]
    assert result["waiting"] == [0, 2, 4, 6, None, 206, 208]
    assert result["hits"] == [None, None, None, 0.25, None, None, None]
    assert result["preemptions"] == [None, 0, 0, 0, None, None, 0]
    assert result["after"] == 1  # a server that counts anew
    tops = browser.module("charts.js", "return args[0].map(m.niceCeiling)", [0, 0.3, 1, 1.01, 7, 99, 101, 12345])
    assert tops == [1, pytest.approx(0.3), 1, 2, 8, 100, 200, 20000]


def test_a_hidden_tab_asks_nothing(browser, crowded):
    browser.open(crowded.url)
    browser.wait("return document.getElementById('connection').dataset.state === 'live'")
    asked = "return performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/debug/arena')).length"
    browser.driver.minimize_window()
    try:
        browser.wait("return document.hidden && document.getElementById('connection').textContent === 'paused'")
        before = browser.script(asked)
        time.sleep(2)
        assert browser.script(asked) == before
    finally:
        browser.driver.set_window_rect(0, 0, 1280, 800)
    browser.wait("return document.getElementById('connection').textContent === 'live'")
    assert browser.script(asked) > before


def test_a_large_map_is_compressed_for_who_takes_it(vast):
    kinds = ("identity", "gzip, br")
    plain, packed = (vast.http.get("/debug/arena", headers={"Accept-Encoding": kind}) for kind in kinds)
    assert plain.headers.get("content-encoding") is None and packed.headers["content-encoding"] == "gzip"
    assert [plain.json()[key] for key in ("states", "refs")] == [packed.json()[key] for key in ("states", "refs")]
    assert int(packed.headers["content-length"]) < 0.05 * int(plain.headers["content-length"])


def test_a_vast_pool_is_shown_whole(browser, vast):
    """20,000 pages from the server to the canvas; hiding the free end makes room for the others."""
    browser.open(vast.url)
    browser.wait(SHOWN)
    assert browser.text('#legend [data-kind="free"] b') == "20,000"
    size = "const c = document.getElementById('map'); return [c.width, c.height, c.getBoundingClientRect().height]"
    whole = browser.script(size)
    assert whole[0] * whole[1] >= 20_000
    browser.click("#crop")
    cropped = browser.script(size)
    assert cropped[2] < whole[2]
    browser.script("document.getElementById('map').focus()")
    browser.keys("\ue010")
    assert browser.wait("return document.getElementById('readout').textContent").startswith("Page 255: free")
    browser.driver.refresh()  # the choice is remembered
    browser.wait(SHOWN)
    assert browser.script("return document.getElementById('crop').checked")
    assert browser.wait(f"{size.replace('return', 'const size =')}; return size[2] > 50 && size") == cropped
