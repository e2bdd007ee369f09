"""What mkdocs asks of us: links to files of the repository that are no page lead to the repository."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """A page with its links outside of docs/ as text, or as links to ``repo_url`` where that is set."""
    base = (config.get("repo_url") or "").rstrip("/")

    def link(found: re.Match[str]) -> str:
        path = f"{found[1]}{found[2] or ''}"
        return f"]({base}/blob/main/{path})" if base else "](#)"

    return OUTSIDE.sub(link, markdown)
