"""Counts, sizes and times as people read them."""

from __future__ import annotations


def short_count(value: float) -> str:
    """Return a number of up to three digits with k, M or G."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.0f}"


def size(count: float) -> str:
    """Return a number of bytes in the unit that fits it."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} bytes"


def gigabytes(count: float) -> str:
    """Return a number of bytes in gigabytes."""
    return f"{count / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    """Return minutes and seconds, with hours in front where there are some."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
