"""The table of docs/models.md, made from the zoo: ``python -m tests.models.page`` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.models.registry import LAYOUTS, Model
from tests.models.zoo import ZOO

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = (
    "| model | from | cut in | train, eval, other shapes | condition |",
    "|---|---|---|---|---|",
)


def row(name: str, model: Model) -> str:
    """What the tests show of a model."""
    words = (model.make.__doc__ or "").strip().splitlines()
    what = f"`{name}`: {words[0].rstrip('.')}" if words else f"`{name}`"
    if model.refusal:
        result, stages = "refused", "-"
        condition = model.condition or f"“{model.refusal}”"
    else:
        result = "same" if model.separable else "same as accumulated"
        stages = ", ".join(str(count) for count in LAYOUTS)
        condition = model.condition
    return f"| {what} | {model.library} | {stages} | {result} | {condition} |"


def table() -> list[str]:
    """Lines of the table: by library, then by file, then as they stand there.

    The zoo's own order is that in which its files happened to be imported.
    """
    order = ["transformers", "timm", "torch"]
    items = sorted(
        ZOO.items(), key=lambda item: (order.index(item[1].library), item[1].make.__module__)
    )
    return [*HEAD, *(row(name, model) for name, model in items)]


def main() -> None:
    """Writes the table in place of the one that is on the page."""
    lines = PAGE.read_text().splitlines()
    start = lines.index(HEAD[0])
    end = next(i for i in range(start, len(lines) + 1) if not "".join(lines[i : i + 1]))
    PAGE.write_text("\n".join([*lines[:start], *table(), *lines[end:]]) + "\n")


if __name__ == "__main__":
    main()
