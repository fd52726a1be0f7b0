"""A real Chromium, driven by Playwright, and pages whose every error fails their test."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
from playwright.async_api import Browser, async_playwright

from tests.actors.gateway.node import without

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")


@pytest.fixture(scope="module", params=[pytest.param(("asyncio", {}), id="asyncio")])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run on asyncio alone: Playwright does, and the pages know nothing of the backend."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(scope="module")
async def browser(anyio_backend: object) -> AsyncIterator[Browser]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        without("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=[*OPTIONS])
        yield browser
        await browser.close()
