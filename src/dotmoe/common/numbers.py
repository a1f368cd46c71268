"""Arithmetic of whole numbers."""


def ceil_div(total: int, size: int) -> int:
    """Number of parts of `size` that hold `total`: the quotient, rounded up.

    Exact for numbers of any size, where `math.ceil(total / size)` goes through a float.
    """
    return -(-total // size)
