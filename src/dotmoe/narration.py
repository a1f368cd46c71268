"""Old name of `dotmoe.progress`, until its last caller is gone."""

from dotmoe.progress import Progress, Update

__all__ = ["Narrator", "Update"]


class Narrator(Progress):
    """A `Progress` under its old name."""

    def say(self, text: str) -> None:
        """One line."""
        self.log(text)
