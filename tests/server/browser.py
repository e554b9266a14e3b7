"""Headless Chromium for the tests of the page, driven through its WebDriver."""

import os
import shutil
import time
from contextlib import contextmanager

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
WAIT = 120  # seconds; only a failure takes that long


def programs():
    """Paths of Chromium and its driver. Where one is missing: a skip, but a failure in CI."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        why = "the page is tested in Chromium: apt install chromium chromium-driver"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return found


class Browser:
    """One tab. Everything is asked of the page by script, so that an answer is of one moment."""

    def __init__(self, driver):
        self.driver = driver
        self.expected = []  # parts of console errors that the test provokes

    def open(self, url, width=1280, height=800, dark=False, headers=None):
        """Load a page afresh, without what earlier ones left behind. headers: for the page, not for what it asks."""
        self.driver.get("about:blank")
        self.errors()
        self.cdp("Storage.clearDataForOrigin", origin=url, storageTypes="all")
        self.cdp("Network.enable")
        self.cdp("Network.setExtraHTTPHeaders", headers=headers or {})
        self.look(width, height, dark)
        self.driver.get(url)
        self.cdp("Network.setExtraHTTPHeaders", headers={})

    def look(self, width, height, dark=False, motion="no-preference"):
        """Size of the window in CSS pixels and what the person prefers."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def cdp(self, command, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def script(self, body, *arguments):
        return self.driver.execute_script(body, *arguments)

    def module(self, name, body, *arguments):
        """The result of an async function body in which `m` is a module of the page and `args` the arguments."""
        code = f"""
            const done = arguments[arguments.length - 1], args = [...arguments].slice(0, -1);
            import(new URL("static/{name}", location.href)).then(async (m) => {{ {body} }})
                .then((value) => done({{value}}), (error) => done({{error: String(error.stack || error)}}));"""
        result = self.driver.execute_async_script(code, *arguments)
        assert "error" not in result, result["error"]
        return result.get("value")

    def wait(self, body, *arguments, what=None):
        """The first truthy result of a script."""
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            value = self.script(body, *arguments)
            if value:
                return value
            time.sleep(0.02)
        pytest.fail(f"not within {WAIT} s: {what or body}")

    def keys(self, *keys):
        """Press keys wherever the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def click(self, selector):
        self.driver.find_element("css selector", selector).click()

    def text(self, selector):
        return self.script("return document.querySelector(arguments[0]).textContent", selector)

    def errors(self):
        """Errors and warnings on the console since the last call, but for those expected."""
        lines = [
            entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
        ]
        return [line for line in lines if not any(part in line for part in self.expected)]

    def focused(self):
        """Id of the element that has the focus, or its text."""
        return self.script("const e = document.activeElement; return e.id || e.textContent")


@contextmanager
def chromium(profile):
    """A Browser on a fresh profile directory, ended behind the block."""
    from selenium import webdriver

    binary, driver_path = programs()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        driver.set_script_timeout(WAIT)
        yield Browser(driver)
    finally:
        driver.quit()
