"""What the site does with links to files of the repository that are no pages: a hook of mkdocs, named in mkdocs.yml.

On a code host `[examples/01_first_plan.py](../examples/01_first_plan.py)` leads to the file. The site does not hold it, so that
there the words remain. A link to a file that does not exist is a warning, which ends a strict build.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)\)")

log = logging.getLogger("mkdocs.hooks.links")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page's text, with the words alone in the place of each link that leads out of the folder of pages."""
    pages = Path(config["docs_dir"]).resolve()

    def words(link: re.Match[str]) -> str:
        text, path = link.groups()
        file = (pages / page.file.src_uri).parent.joinpath(path).resolve()
        if file.is_relative_to(pages):
            return link.group()
        if not file.exists():
            log.warning("%s: the link to %s leads nowhere", page.file.src_uri, path)
        return f"`{text}`" if text == path.removeprefix("../") else text

    return _LINK.sub(words, markdown)
