"""Makes links that work in the repository work in the built pages, too."""

from __future__ import annotations

import re
from typing import Any

REPOSITORY = re.compile(r"\]\(\.\./((?!#)[^)]+)\)")
"""Links to what stands beside docs/, which the site does not hold."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave of such a link its text, and its target as a name."""
    return REPOSITORY.sub(r"] (`\1`)", markdown).replace("\n[] (", "\n(")
