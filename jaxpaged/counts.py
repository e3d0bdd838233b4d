"""Numbers of things in messages: 1 page, 2 pages."""


def counted(number: int, thing: str) -> str:
    """The number with its noun, in the plural unless there is one."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
