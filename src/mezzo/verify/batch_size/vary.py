"""Vary: where in a script's command line its batch size stands."""

from __future__ import annotations

from dataclasses import dataclass

from mezzo.core.errors import UsageError

PLACE = "{}"


@dataclass(frozen=True)
class Vary:
    """How the script is told its batch size, as the script itself spells it.

    ======================  ==========================================================
    ``--batch-size``        an option whose value is the next word: ``--batch-size 32``
    ``--batch-size=``       the same in one word: ``--batch-size=32``
    ``train.batch=``        a setting as Hydra has them: ``train.batch=32``
    ``{}``                  wherever the arguments hold ``{}``, as for a positional one
    ======================  ==========================================================

    Raises:
        UsageError: none of these.
    """

    spelling: str

    def __post_init__(self) -> None:
        word = self.spelling
        if not (word == PLACE or (word.endswith("=") and word.strip("-=")) or _is_option(word)):
            near = f" Did you mean --vary={word}= or --vary=--{word}?" if word.strip("-= ") else ""
            raise UsageError(
                f"--vary={word}: write what holds the batch size as the script spells it: --vary=--batch-size for an "
                "option, --vary=batch_size= for key=value, or --vary={} where {} stands for it in the script's "
                f"arguments.{near}"
            )

    def argv(self, given: tuple[str, ...], size: int) -> tuple[str, ...]:
        """The script's arguments with this batch size: in place of the one that they hold, else at the end.

        >>> Vary("--batch").argv(("--batch", "8", "--lr", "1"), 32)
        ('--batch', '32', '--lr', '1')
        >>> Vary("data.batch=").argv(("model=big",), 32)
        ('model=big', 'data.batch=32')

        Raises:
            UsageError: ``{}`` stands nowhere in the arguments.
        """
        if self.spelling == PLACE:
            if not any(PLACE in word for word in given):
                raise UsageError(
                    "--vary={}: no argument of the script holds {}. Write it where the batch size belongs, after --, "
                    "such as: mezzo batch-size train.py --vary={} -- config.yaml {}"
                )
            return tuple(word.replace(PLACE, str(size)) for word in given)
        joined = self.spelling if self.spelling.endswith("=") else f"{self.spelling}="
        new = [f"{joined}{size}"] if self.spelling.endswith("=") else [self.spelling, str(size)]
        kept: list[str] = []
        words = iter(given)
        for word in words:
            if word == joined[:-1] and word.startswith("-"):
                next(words, None)
            elif not word.startswith(joined):
                kept.append(word)
                continue
            kept += new
            new = []
        return (*kept, *new)

    def written(self, size: int) -> str:
        """The words that give the script this size."""
        if self.spelling == PLACE:
            return str(size)
        return f"{self.spelling}{size}" if self.spelling.endswith("=") else f"{self.spelling} {size}"


def _is_option(word: str) -> bool:
    return word.startswith("-") and bool(word.strip("-")) and not any(c.isspace() or c == "=" for c in word)
