"""Numbers in reasons."""


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "device"), counted(2, "device")
    ('1 device', '2 devices')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
