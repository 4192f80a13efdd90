"""How many examples hypothesis tries, where a test wants other than the usual number."""

from hypothesis import settings


def examples(thorough: int) -> int:
    """So many with `--soak`, a quarter of them without: the profiles of conftest.py differ by as much."""
    return thorough * settings().max_examples // settings.get_profile("soak").max_examples
