"""What the site of the documentation changes in a page."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with links to files outside docs/, which the site does not have, as their text and path."""
    return re.sub(r"\[([^]]+)\]\(\.\./([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)
