"""What the log calls a source of samples."""

import re
from typing import Final

__all__ = ["SOURCE_NAME", "name_of_path"]

SOURCE_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


def name_of_path(path: str) -> str:
    """The file's name without its endings; a pattern's is that of the folder that holds it."""
    for part in reversed(re.split(r"[/\\]", path)):
        name = re.sub(r"[^A-Za-z0-9_-]", "_", part.split(".")[0])
        if not re.search(r"[*?\[]", part) and re.match(SOURCE_NAME, name):
            return name
    return "source"
