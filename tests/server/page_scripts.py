"""What the tests of the page share: the page's server, the parts of it that scripts read, and load."""

import threading

import httpx

from pagedkv import SamplingParams

ASK = """
    const field = document.getElementById("message");
    field.value = arguments[0];
    document.getElementById("composer").requestSubmit();
"""
ANSWERED = """
    const items = document.querySelectorAll("#log .assistant");
    const last = items[arguments[0] - 1];
    return last && !last.classList.contains("streaming") && last.querySelector(".meta").textContent &&
        [last.querySelector(".text").textContent, last.querySelector(".meta").textContent];
"""
# Answers of exactly as many tokens as may be.
ENDLESS = """
    const real = window.fetch;
    window.fetch = (url, options) => {
        if (options?.body) options.body = JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true });
        return real(url, options);
    };
"""
# What the page shows of the pool, all of it written in one go.
SHOWN = """
    const step = document.getElementById("pages").dataset.step;
    return step && {
        step: Number(step),
        counts: Object.fromEntries([...document.querySelectorAll("#legend li")].map((li) =>
            [li.dataset.kind, Number(li.querySelector("b").textContent.replaceAll(",", ""))])),
        occupancy: Object.fromEntries(["used", "cached", "free"].map((name) =>
            [name, Number(document.querySelector(`#occupancy .${name}`).style.flexGrow)])),
        label: document.getElementById("map").getAttribute("aria-label"),
        chips: [...document.querySelectorAll("#requests button")].map((b) => b.textContent),
        requests: document.getElementById("requests-count").textContent,
        tokens: document.querySelector('[data-chart="tokens"] b').textContent,
        queue: document.querySelector('[data-chart="queue"] b').textContent,
    };
"""


def configure(browser, **settings):
    """Set fields of the settings form as typing would."""
    browser.script(
        """
        const form = document.getElementById("settings");
        for (const [name, value] of Object.entries(arguments[0])) form.elements[name].value = value;
        form.dispatchEvent(new Event("input", { bubbles: true }));
        """,
        {name: str(value) for name, value in settings.items()},
    )


def ask(browser, text, number=1):
    """(answer, line under it) of the number-th message of the conversation."""
    browser.script(ASK, text)
    return browser.wait(ANSWERED, number, what=f"an answer to {text!r}")


def expected(live, messages, **params):
    """What the engine says by itself."""
    return live.llm.chat(messages, SamplingParams(**params))[0].outputs[0].text


class Load:
    """Requests in flight until the block ends: `n` of two outputs each and a beginning that all share."""

    def __init__(self, live, n):
        self._live, self._going = live, True
        beginning = "A page table maps positions to pages. " * 8
        self._threads = [threading.Thread(target=self._run, args=(f"{beginning}{i}",)) for i in range(n)]

    def _run(self, prompt):
        body = {"prompt": prompt, "n": 2, "max_tokens": 700, "ignore_eos": True, "seed": 1, "stream": True}
        with httpx.stream("POST", f"{self._live.url}/v1/completions", json=body, timeout=300) as response:
            for _ in response.iter_raw():
                if not self._going:
                    return

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._going = False
        for thread in self._threads:
            thread.join()
        self._live.wait_idle()
