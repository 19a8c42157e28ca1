"""Write the reference page of the configuration from the schema.

`python -m megatron_distill.config.reference docs/configuration.md`
"""

import json
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from pydantic.fields import FieldInfo

from megatron_distill.config.messages import Key, field_key
from megatron_distill.config.schema import CaptureConfig, RunConfig, Section

__all__ = ["reference_page", "write_reference"]

# A vertical bar inside a cell of a Markdown table.
_BAR = "\\|"

_OPENING = """\
# Configuration

Generated from the schema by `make docs`; do not edit.

           A run is one YAML file. Unknown keys, values out of range and contradictions are errors,
           all reported at once. A setting without effect is a warning, logged at the start. On the
           command line `key=value` overrides the file: `parallel.tensor=2`,
           `data.sources.0.weight=2`, `teacher=null`; the value is YAML. `--print-config` prints the
           resolved configuration. A key without a default is required. The file of a capture
           (`launch/cache_teacher.py`) has additional sections, at the end of this page; the other
           sections are the same.
"""


def reference_page() -> str:
    """Return the whole page as Markdown: one table per section, in the order of the file."""
    return "\n".join([_OPENING, *_tables()])


def write_reference(path: Path) -> None:
    """Write the page to `path` and make its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference_page(), encoding="utf-8")


def _tables() -> Iterator[str]:
    yield _table("Top level", [], RunConfig)
    of_run = _sections(RunConfig)
    for section, names in of_run.items():
        yield _table(", ".join(f"`{name}`" for name in names), names, section)
    yield _table("Top level of a capture", [], CaptureConfig)
    for section, names in _sections(CaptureConfig).items():
        if section not in of_run:
            yield _table(", ".join(f"`{name}`" for name in names), names, section)


def _sections(root: type[Section]) -> dict[type[Section], list[str]]:
    """Map every section class to the dotted names of its sections, in file order."""
    places: dict[type[Section], list[str]] = {}

    def visit(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            below, mark = _below(field_key(field))
            if below is not None:
                places.setdefault(below, []).append(f"{prefix}{name}{mark}")
                visit(below, f"{prefix}{name}{mark}.")

    visit(root, "")
    return places


def _below(key: Key) -> tuple[type[Section] | None, str]:
    """Return the section class of a key, or of its entries with their place in its name."""
    if key.named is not None:
        return key.named.section, ".<name>"
    return (key.section, "") if key.entry is None else (key.entry.section, "[]")


def _table(title: str, names: list[str], section: type[Section]) -> str:
    about = "" if not names else f"{cleandoc(section.__doc__ or '')}\n\n"
    rows = "".join(_row(name, field) for name, field in section.model_fields.items())
    return (
        f"## {title}\n\n{about}"
        f"| key | type | default | range | description |\n|---|---|---|---|---|\n{rows}"
    )


def _row(name: str, field: FieldInfo) -> str:
    key = field_key(field)
    cells = (f"`{name}`", key.type_name, _default(field), key.range_name, field.description or "")
    return f"| {' | '.join(cell.replace('|', _BAR) for cell in cells)} |\n"


def _default(field: FieldInfo) -> str:
    key = field_key(field)
    leads_on = _below(key)[0] is not None
    if key.required:
        return "required" if leads_on else f"required, e.g. `{json.dumps(key.example)}`"
    if leads_on and field.default:
        return "its defaults"
    return f"`{json.dumps(field.get_default(call_default_factory=True))}`"


if __name__ == "__main__":
    write_reference(Path(sys.argv[1]))
