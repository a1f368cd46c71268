"""Numbers as a person says them."""


def percent(share: float) -> str:
    """A share as percent, one decimal where it is small."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def millions(number: float) -> str:
    """A count in millions or billions."""
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"
