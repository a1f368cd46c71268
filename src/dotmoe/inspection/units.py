"""Sizes and durations as people read them."""


def in_bytes(amount: int) -> str:
    """A size in binary units.

    Example:
        >>> in_bytes(3 * 2**30)
        '3.00 GiB'
    """
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1_024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1_024
    return f"{value:.2f} TiB"


def in_time(hours: float) -> str:
    """A duration in the unit that keeps its number small.

    Example:
        >>> [in_time(hours) for hours in (0.005, 0.5, 12.345, 100, 20_000)]
        ['18 s', '30 min', '12.3 h', '4.2 days', '2 years']
    """
    for size, unit, most in ((1 / 3_600, "s", 100), (1 / 60, "min", 100)):
        if hours < most * size:
            return f"{hours / size:.0f} {unit}"
    for size, unit, most in ((1, "h", 48), (24, "days", 730)):
        if hours < most * size:
            return f"{hours / size:.1f} {unit}"
    return f"{hours / (24 * 365.25):,.0f} years"
