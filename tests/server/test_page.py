"""The web page in headless Chromium: chat, stop, keyboard, contrast, narrow windows, keys, and what it is made of."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from page_scripts import ANSWERED, ASK, ENDLESS, SHOWN, Load, ask, configure, expected

STATIC = files("pagedkv.server") / "static"


# Chat


def test_a_question_is_answered(browser, crowded):
    """Typed and sent by keyboard; the text on the page is the engine's, character by character."""
    browser.open(crowded.url)
    configure(browser, temperature=0, max_tokens=24)
    browser.wait("return document.activeElement.id === 'message'")
    browser.keys("What is two plus two?", "\ue007")
    answer, line = browser.wait(ANSWERED, 1)
    asked = [{"role": "user", "content": "What is two plus two?"}]
    assert answer == expected(crowded, asked, temperature=0, max_tokens=24) and len(answer) > 10
    assert re.search(r"\d+ tokens", line)
    assert browser.text("#model") == crowded.service.names[0]

    answer_2, _ = ask(browser, "And three?", 2)
    asked += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And three?"}]
    assert answer_2 == expected(crowded, asked, temperature=0, max_tokens=24)


def test_a_suggestion_is_sent(browser, crowded):
    """By keyboard, which is then on the button that stops the answer, and at its end in the field."""
    browser.open(crowded.url)
    configure(browser, temperature=0, max_tokens=12)
    browser.script("document.querySelector('.suggestions button').focus()")
    browser.keys("\ue007")
    assert browser.focused() in ("stop", "message")
    asked = [{"role": "user", "content": browser.text("#log .user .text")}]
    assert browser.wait(ANSWERED, 1)[0] == expected(crowded, asked, temperature=0, max_tokens=12)
    assert browser.focused() == "message"


def test_settings_reach_the_model_and_survive_a_reload(browser, crowded):
    browser.open(crowded.url)
    settings = {"system": "You are a pirate.", "temperature": 1.25, "max_tokens": 24, "seed": 11}
    configure(browser, **settings)
    browser.driver.refresh()
    kept = browser.script("return Object.fromEntries(new FormData(document.getElementById('settings')))")
    assert kept == {name: str(value) for name, value in settings.items()}
    answer, line = ask(browser, "Who are you?")
    asked = [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Who are you?"}]
    assert answer == expected(crowded, asked, temperature=1.25, max_tokens=24, seed=11)
    assert line.startswith("24 tokens, as many as allowed · ")


@pytest.mark.parametrize("how", ["button", "escape", "new chat"])
def test_stop_gives_the_pages_back(browser, crowded, how, caplog):
    browser.open(crowded.url)
    configure(browser, temperature=0, max_tokens=900)
    browser.script(ENDLESS)
    browser.script(ASK, "Count from 1 to 1000, one number a line.")
    browser.wait("return document.querySelector('#log .assistant .text')?.textContent.length > 20")
    assert crowded.llm.engine.stats()["pages_in_use"] > 0
    if how == "escape":
        browser.keys("\ue00c")
    else:
        browser.click("#stop" if how == "button" else "#new-chat")
    assert crowded.wait_idle(10)["pages_in_use"] == 0
    if how == "new chat":
        assert browser.script("return document.getElementById('log').children.length") == 0
        assert not browser.script("return document.getElementById('welcome').hidden")
    else:
        answer, line = browser.wait(ANSWERED, 1)
        assert line.startswith("stopped") and len(answer) > 20
        configure(browser, max_tokens=8)
        told = [{"role": "user", "content": "Count from 1 to 1000, one number a line."},
                {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]  # fmt: skip
        assert ask(browser, "Go on.", 2)[0] == expected(crowded, told, temperature=0, max_tokens=8, ignore_eos=True)
    assert browser.focused() == "message"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []  # the server takes it for granted


def test_a_refused_message_comes_back(browser, crowded):
    """The server's reason is shown, the text returns to the field, and the conversation goes on without it."""
    browser.expected = ["400"]
    browser.open(crowded.url)
    configure(browser, temperature=0, max_tokens=8)
    text = "word " * 3000
    browser.script(ASK, text)
    line = browser.wait("return document.querySelector('#log .failed')?.textContent")
    assert "1024" in line
    assert browser.script("return document.getElementById('message').value") == text.strip()
    assert browser.script("return document.querySelectorAll('#log .user').length") == 0
    answer = ask(browser, "Hi.", 2)[0]
    assert answer == expected(crowded, [{"role": "user", "content": "Hi."}], temperature=0, max_tokens=8)


def test_a_setting_out_of_range_is_not_sent(browser, crowded):
    browser.open(crowded.url)
    configure(browser, temperature=7)
    browser.script(ASK, "Hi.")
    assert not browser.script("return document.getElementById('settings').hidden")
    assert browser.script("return document.querySelector('#settings :invalid').name") == "temperature"
    assert browser.script("return document.getElementById('message').value") == "Hi."
    assert browser.script("return document.getElementById('log').children.length") == 0


SCRIPTED = """
    const [pieces, status] = arguments;
    const real = window.fetch;
    window.fetch = async (url, options) => {
        if (!String(url).endsWith("v1/chat/completions")) return real(url, options);
        window.fetch = real;
        const body = new ReadableStream({ async start(controller) {
            for (const piece of pieces) controller.enqueue(new TextEncoder().encode(piece));
            controller.close();
        } });
        return new Response(body, { status });
    };
"""


def event(text):
    return f"data: {json.dumps({'id': 'x', 'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"


def test_what_is_said_is_text(browser, crowded):
    wild = "<img src=x onerror=alert(1)><script>document.title = 'taken'</script> &amp; \u202e <b>bold</b>\n\n  x"
    browser.open(crowded.url)
    browser.script(SCRIPTED, [event(wild[:30]), event(wild[30:]), "data: [DONE]\n\n"], 200)
    browser.script(ASK, wild)
    browser.wait("return document.querySelector('#log .assistant:not(.streaming)')")
    assert browser.text("#log .user .text") == wild and browser.text("#log .assistant .text") == wild
    assert browser.script("return document.querySelectorAll('#log img, #log script, #log b').length") == 0
    assert "taken" not in browser.driver.title


@pytest.mark.parametrize(
    ("pieces", "status", "told", "kept"),
    [
        ([event("Half"), 'data: {"error": {"message": "the model failed"}}\n\n'], 200, "the model failed", "Half"),
        ([event("Half")], 200, "the connection ended before the answer did", "Half"),
        (['{"error": {"message": "6 requests are waiting"}}'], 429, "6 requests are waiting", ""),
        (["<html>Bad Gateway"], 502, "<html>Bad Gateway", ""),
        ([""], 500, "the server answered 500", ""),
    ],
)
def test_failures_are_told(browser, crowded, pieces, status, told, kept):
    browser.open(crowded.url)
    browser.script(SCRIPTED, pieces, status)
    browser.script(ASK, "Hello?")
    assert browser.wait("return document.querySelector('#log .failed')?.textContent") == told
    assert browser.text("#log .assistant .text") == kept
    assert browser.script("return document.getElementById('message').value") == ("" if kept else "Hello?")
    browser.wait("return !document.getElementById('send').hidden")


def test_events_are_cut_anywhere(browser, crowded):
    """Every way to cut a stream in two, and byte by byte: the same events."""
    browser.open(crowded.url)
    stream = 'data: {"a": 1}\r\n\r\n: comment\ndata:first\r\ndata: second\r\n\r\n'
    stream += "event: x\nid: 3\rdata: \u4e16\r\rdata: [DONE]\n\n"
    found = browser.module(
        "api.js",
        """
        const [text] = args, found = [];
        const cut = (pieces) => { const c = new m.EventCutter(); return pieces.flatMap((piece) => c.push(piece)); };
        for (let i = 0; i <= text.length; i++) found.push(cut([text.slice(0, i), text.slice(i)]));
        found.push(cut([...text]));
        return found;
        """,
        stream,
    )
    assert len(found) == len(stream) + 2
    assert all(events == ['{"a": 1}', "first\nsecond", "\u4e16", "[DONE]"] for events in found)


def test_your_own_answer_is_named(browser, crowded):
    browser.open(crowded.url)
    configure(browser, max_tokens=600, temperature=0)
    browser.script(ENDLESS)
    browser.script(ASK, "Count from 1 to 1000, one number a line.")
    assert browser.wait("return document.querySelector('#requests .mine button')?.textContent").startswith(
        "your answer"
    )
    browser.keys("\ue00c")
    crowded.wait_idle()


# For everybody


def test_keyboard_alone_reaches_everything(browser, crowded):
    """Tab from the top: each control once, in the order of reading, each with a name and a visible focus."""
    browser.open(crowded.url)
    browser.wait(SHOWN)
    browser.script("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    reached = []
    for _ in range(30):
        browser.keys("\ue004")
        name = browser.focused()
        if name in reached or browser.script("return document.activeElement === document.body"):
            break
        reached.append(name)
        outline = browser.script(
            "const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]"
        )
        assert outline[0] != "none" and float(outline[1][:-2]) >= 2, name
    assert reached == [
        "Skip to the message field", "open-settings", "new-chat", "scroller", "Why is the sky blue?",
        "Write a short poem about a lighthouse.", "Explain a page table to a child.", "message", "send", "crop", "map",
    ]  # fmt: skip
    unnamed = """
        return [...document.querySelectorAll("button, input, textarea, canvas[tabindex], dialog, section, ul, ol")]
            .filter((e) => !e.textContent.trim() && !e.ariaLabel && !e.getAttribute("aria-labelledby") &&
                !e.labels?.length && !e.hidden).map((e) => e.outerHTML);
    """
    assert browser.script(unnamed) == []


CONTRASTS = """
    const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const behind = (e) => {
        for (; e; e = e.parentElement) {
            const colour = parse(getComputedStyle(e).backgroundColor);
            if (colour.length < 4 || colour[3] === 1) return colour;
            if (colour[3] !== 0) throw new Error(`${e.outerHTML} is half transparent`);
        }
        return [255, 255, 255];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const e = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest("noscript, .hidden")) continue;
        const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
        found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data.trim().slice(0, 30)]);
    }
    return found;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_and_scheme(browser, crowded, dark):
    """AA for every text on the page, with settings and an answer open; dark means dark."""
    browser.expected = ["400"]
    browser.open(crowded.url, dark=dark)
    configure(browser, max_tokens=10)
    browser.click("#open-settings")
    ask(browser, "Hi.")
    with Load(crowded, 2):
        browser.wait("return document.querySelectorAll('#requests button').length == 2")
        browser.click("#requests button")
        found = browser.script(CONTRASTS)
    browser.script(ASK, "word " * 3000)
    browser.wait("return document.querySelector('#log .failed')")
    found += browser.script(CONTRASTS)
    assert len(found) > 50 and [pair for pair in found if pair[0] < 4.5] == []
    background = browser.script("return getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", background))) < 50) == dark


@pytest.mark.parametrize("width", [400, 320])
def test_narrow(browser, crowded, width):
    """One view at a time, and nothing to scroll sideways for, whatever was said."""
    browser.open(crowded.url, width=width, height=700)
    configure(browser, max_tokens=8)
    browser.click("#open-settings")
    ask(browser, "word" * 200 + " https://example.org/" + "a" * 300)
    wide = """
        const most = document.documentElement.clientWidth;
        return [document.documentElement.scrollWidth - most, ...[...document.querySelectorAll("body *")]
            .filter((e) => e.checkVisibility() && !e.closest(".hidden") && e.getBoundingClientRect().right > most + 0.5)
            .map((e) => e.outerHTML.slice(0, 80))];
    """
    assert browser.script(wide) == [0]
    visible = "return ['chat', 'pages'].map((id) => document.getElementById(id).checkVisibility())"
    assert browser.script(visible) == [True, False]
    browser.click(".views [data-view=pages]")
    assert browser.script(visible) == [False, True]
    with Load(crowded, 3):
        browser.wait("return document.querySelectorAll('#requests button').length == 3")
        assert browser.script(wide) == [0]
        box = browser.script(
            "const b = document.getElementById('map').getBoundingClientRect(); return [b.width, b.height]"
        )
        assert box[0] > width * 0.6 and box[1] > 100
    browser.click(".views [data-view=chat]")
    assert browser.script(visible) == [True, False]


def test_less_motion(browser, crowded):
    """Who prefers it gets no animation anywhere."""
    browser.open(crowded.url)
    browser.look(1280, 800, motion="reduce")
    moving = """
        return [...document.querySelectorAll("*")].filter((e) => {
            const s = getComputedStyle(e);
            return s.animationName !== "none" || s.transitionDuration.split(",").some((d) => parseFloat(d) > 0);
        }).length + document.getAnimations().length;
    """
    assert browser.script(moving) == 0
    browser.look(1280, 800)
    assert browser.script(moving) > 0


# Keys and packaging


def test_a_key_is_asked_for(browser, locked):
    """401 opens the dialog; a wrong key is said to be wrong, the right one is kept for the tab."""
    browser.expected = ["401"]
    browser.open(locked.url, headers={"Authorization": "Bearer right"})
    browser.wait("return document.getElementById('key-dialog').open")
    assert browser.focused() == "key"
    browser.keys("wrong", "\ue007")
    browser.wait("return document.getElementById('key-why').textContent.includes('does not accept')")
    browser.keys("right", "\ue007")
    browser.wait("return document.getElementById('connection').dataset.state === 'live'")
    assert not browser.script("return document.getElementById('key-dialog').open")
    configure(browser, max_tokens=4)
    assert ask(browser, "Hi.")[0]
    assert browser.script("return Object.values(localStorage).some((v) => v.includes('right'))") is False


class Links(HTMLParser):
    """What a page loads, and what its policy would refuse."""

    def __init__(self):
        super().__init__()
        self.loads, self.inline = [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.loads += [values[name] for name in ("src", "href") if name in values]
        self.inline += [name for name in values if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in values):
            self.inline.append(tag)


def test_nothing_from_elsewhere_and_nothing_inline():
    links = Links()
    links.feed((STATIC / "index.html").read_text())
    assert links.inline == []
    names = {path.name for path in STATIC.iterdir()}
    assert {link for link in links.loads if not link.startswith("#")} <= {f"static/{name}" for name in names}
    for name in names:
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"//[^\n]*$|://?\.\./", "", text, flags=re.MULTILINE) or "http" not in text, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )


def test_the_policy_is_strict(crowded):
    policy = crowded.http.get("/").headers["content-security-policy"]
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert set(rules.values()) == {"'self'", "'none'"}
    assert {rules[name] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    types = {
        "index.html": "text/html",
        "app.js": "text/javascript",
        "style.css": "text/css",
        "icon.svg": "image/svg+xml",
    }
    for name, kind in types.items():
        response = crowded.http.get(f"/static/{name}")
        assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
        assert (
            response.headers["x-content-type-options"] == "nosniff" and "no-cache" in response.headers["cache-control"]
        )
        again = crowded.http.get(f"/static/{name}", headers={"If-None-Match": response.headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert crowded.http.get("/static/../app.py").status_code == 404
    assert crowded.http.get("/static/%2e%2e/app.py").status_code == 404
