"""A tab of the browser on the page, and all that went on in it."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.tools.page.browser.hand_made import RUN

VIEWS = {
    "overview": f"#/run/{RUN}/overview?open=train,rollout,engine",
    "checks": f"#/run/{RUN}/checks",
    "samples": f"#/run/{RUN}/samples?step=40&id=q1%230&color=advantage",
    "samples by loss": f"#/run/{RUN}/samples?step=40",
    "samples by weight": f"#/run/{RUN}/samples?step=40&color=weight",
    "rollouts": f"#/run/{RUN}/rollouts?step=40",
    "group": f"#/run/{RUN}/rollouts?step=40&group=0",
    "tokens of a group": f"#/run/{RUN}/rollouts?step=40&group=0&show=tokens",
    "prompt": f"#/run/{RUN}/prompt?id=q1",
    "data": f"#/run/{RUN}/data",
    "model": f"#/run/{RUN}/model",
}
"""Places of the run made by hand."""
SOON = 20_000
"""Milliseconds in which anything has to be there."""


class Looking:
    """A tab. ``said``: what the console said, and what failed; ``requests``: all but those for its own address."""

    def __init__(self, context: Any, address: str) -> None:
        self.address = address
        self.said: list[str] = []
        self.requests: list[str] = []
        self.may_say: tuple[str, ...] = ()
        """Parts of messages that a test expects."""
        self._context = context
        self.tab = context.new_page()
        self.tab.set_default_timeout(SOON)
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("dialog", self._refuse)
        self.tab.on("request", self._note)

    def _refuse(self, dialog: Any) -> None:
        self.said.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _note(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:")):
            self.requests.append(request.url)

    def go(self, fragment: str) -> Any:
        """Open a place of the page from nothing, and wait until all of it is drawn."""
        self.tab.goto("about:blank")
        self.tab.goto(self.address + fragment)
        return self.settle()

    def settle(self) -> Any:
        """Wait until what the fragment names is drawn."""
        self.tab.wait_for_selector("#main[aria-busy=false] h1, #main .error")
        self.until(
            """() => [...document.querySelectorAll(".chart-plot")].every((plot) => {
                const box = plot.getBoundingClientRect();
                return box.bottom < 0 || box.top > innerHeight || plot.childElementCount > 0;
            })"""
        )
        return self.tab

    def until(self, expression: str) -> None:
        """Wait until an expression is true. The page's policy forbids the browser's own way to wait, which is eval."""
        end = time.monotonic() + SOON / 1000
        while not self.tab.evaluate(expression):
            assert time.monotonic() < end, expression
            self.tab.wait_for_timeout(20)

    def text(self) -> str:
        """All that can be read in the view, and what its controls say."""
        values = self.tab.eval_on_selector_all(
            "main input, main select",
            "all => all.map(one => one.type === 'checkbox' ? one.checked : one.value)",
        )
        return f"{self.tab.inner_text('main')}\n{json.dumps(values)}"

    def violations(self) -> list[str]:
        """What axe-core finds wrong."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.tab, options={"resultTypes": ["violations"]}).response["violations"]
        return [
            f"{rule['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for rule in found
            for node in rule["nodes"][:3]
        ]

    def close(self) -> None:
        said = [line for line in self.said if not any(part in line for part in self.may_say)]
        self._context.close()
        assert said == []
