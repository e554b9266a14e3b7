"""Take the pictures of docs/server.md: `python tests/server/make_screenshots.py docs`, from the root of the checkout.

The real model under traffic that keeps the pool busy for a while, so that every state of a page, the queue and the
charts are to be seen. Not a test; look at what it made.
"""

import base64
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from browser import chromium
from conftest import served
from page_scripts import configure

WARM_UP = 70  # seconds of traffic before the first picture
SCALE = 1.25
TOPICS = ["a page", "a cache", "a queue", "a prefix", "a lighthouse", "the sea", "a bee", "a forest in winter"]
TEACHER = "You are a patient teacher who explains things in plain words, with small examples and without jargon. " * 4


class Traffic:
    """Conversations that begin alike, of different lengths and with one to four answers, until the block ends."""

    def __init__(self, url, n):
        self._url, self._going = url, True
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(n)]

    def _run(self, i):
        rng = random.Random(i)
        time.sleep(0.8 * i)
        while self._going:
            question = f"What is {rng.choice(TOPICS)}? " + "Please tell me more. " * rng.choice([0, 3, 30])
            messages = [{"role": "user", "content": question}]
            if rng.random() < 0.7:
                messages.insert(0, {"role": "system", "content": TEACHER})
            body = {
                "messages": messages,
                "stream": True,
                "ignore_eos": True,
                "seed": rng.getrandbits(30),
                "max_tokens": rng.randint(60, 420),
                "n": rng.choice([1, 1, 1, 2, 4]),
            }
            with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=300) as response:
                for _ in response.iter_raw():
                    if not self._going:
                        return
            time.sleep(rng.random())

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._going = False
        for thread in self._threads:
            thread.join()


def main(folder: Path) -> None:
    from pagedkv import LLM

    def shoot(name):
        picture = browser.cdp("Page.captureScreenshot", format="png")["data"]
        (folder / f"page-{name}.png").write_bytes(base64.b64decode(picture))

    def look(*size, dark=False):
        browser.look(*size, dark)
        browser.cdp(
            "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=SCALE, mobile=False
        )

    with (
        tempfile.TemporaryDirectory() as profile,
        LLM("smollm2-135m-instruct", kv_pages=640, max_num_seqs=12, max_model_len=1024) as llm,
        served(llm, served_model_names=("smollm2-135m-instruct",)) as live,
        chromium(profile) as browser,
    ):
        browser.open(live.url)
        configure(browser, temperature=0, max_tokens=400)
        look(1280, 800)
        with Traffic(live.url, 8):
            time.sleep(WARM_UP)
            browser.keys("Explain to a child what a page in a book is for.", "\ue007")
            browser.wait("return document.querySelector('#log .assistant .text')?.textContent.length > 260")
            shoot("light")
            look(1280, 800, dark=True)
            browser.script("document.querySelector('#requests button').focus()")
            time.sleep(1)
            shoot("dark")
            browser.script("document.activeElement.blur()")
            look(400, 800)
            time.sleep(1)
            shoot("narrow-chat")
            browser.click(".views [data-view=pages]")
            time.sleep(1.5)
            shoot("narrow")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
