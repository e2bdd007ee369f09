"""docs/recipes.md: ``python -m tests.unit.compat.page`` writes it from the table of traps, a test holds it to that."""

from __future__ import annotations

from pathlib import Path

from taut.compat.examine import DIALECTS
from taut.compat.traps import Trap, all_traps

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"

INTRODUCTION = """\
# Recipes of other frameworks

`taut check --recipe trl:recipe.yaml` reads a recipe of TRL, open-r1, ms-swift (`swift:`) or OpenRLHF (`openrlhf:`) and
says which known traps it walks into: what happens, why, in which releases, and what to set in that framework.
`--json` prints everything. Nothing is run and nothing is downloaded.

A recipe is a YAML or JSON file of settings, or the shell script that starts the training:

| framework | what is read |
|---|---|
| `trl` | the file of `trl METHOD --config FILE`; scripts with `trl METHOD`, or METHOD.py under accelerate or torchrun |
| `open-r1` | recipes/MODEL/METHOD/config.yaml; scripts that start src/open_r1/METHOD.py |
| `swift` | the file of `swift sft FILE`; scripts with `swift sft`, `swift rlhf` or `swift pt` |
| `openrlhf` | scripts with openrlhf.cli.train_METHOD, in its dotted names of 0.11 and the flat ones before |

Of a script are read: assignments, lists, here-documents, quotes, continued lines, `$NAME`, `${NAME:-default}`, and the
files of settings it names. A value that would have to be computed (`$(expr 16 / 2)`, `$1`) is told under "Not read",
and what depends on it under "Not decided"; nothing is guessed. Options that the framework does not have are listed with
the nearest one that it has.

Traps belong to releases. Without a word the newest release known is meant, for open-r1 the trl that it pins; another is
said as `trl==0.18.0:recipe.yaml`. A file of settings that may be for several methods is refused until the method is
said: `trl.dpo:recipe.yaml`.

Some traps depend on the model: which token its template ends turns with, whether pad is eos, whether layers carry state
across tokens. They are decided where the model is a directory here or lies in the Hugging Face cache, and are "not
decided" otherwise. The same holds of the data's first row.

| severity | meaning |
|---|---|
| wrong | what is trained is not what the recipe says, and nothing tells; exit code 1 |
| late | it shows only later: refused or broken under way, at evaluation or when served |
| slow | right, but it costs time, memory or learning |

A recipe for SFT is also written as a `taut sft` command of equal meaning, with a list of what is not carried over.

## JSON

One object. `schema` is `taut.recipe/1`; the number is raised whenever a field changes its meaning or goes.

| field | what |
|---|---|
| `file`, `framework`, `library`, `version`, `version_reason` | what was read, and which release was assumed, and why |
| `method`, `method_reason`, `model`, `data` | what it trains |
| `outcome` | `failed` where it walks into a trap of severity wrong, else `passed` |
| `traps` | all of the framework's for the method; each has the fields below |
| `traps[].id`, `severity`, `what`, `why`, `fix`, `taut` | the trap; `taut`: how taut does it |
| `traps[].versions`, `versions_note`, `classes`, `threads`, `source` | where it is known, and from where |
| `traps[].state` | `walks_in`, `clear`, `undecided` |
| `traps[].because` | the settings with their lines, or why it could not be decided |
| `traps[].seen` | how far we saw it: `source` (the files and releases named), `thread`, `run` |
| `unknown_keys` | `key, place, nearest` |
| `unread` | lines on what could not be resolved |
| `carried` | null, or `settings, command, left, needless` |

## A new trap

One entry in `src/taut/compat/table`, with a recipe that walks in and the change that makes it clear; the tests take
both from there. `src/taut/compat/conditions.py` says how its condition is written, `src/taut/compat/facts.py` what it
may ask beyond the settings, `src/taut/compat/traps.py` what the fields mean.

## The traps
"""


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(
        _section(name) for name in ("trl", "open-r1", "swift", "openrlhf")
    )


def _section(framework: str) -> str:
    traps = [trap for trap in all_traps() if framework in trap.frameworks]
    head = f"\n### {framework}\n\n| trap | methods | severity | what happens | releases |\n|---|---|---|---|---|\n"
    return head + "".join(_row(trap, DIALECTS[framework].methods) for trap in traps)


def _row(trap: Trap, methods: tuple[str, ...]) -> str:
    cells = (
        f"`{trap.id}`",
        " ".join(method for method in trap.methods if method in methods),
        trap.severity,
        " ".join(trap.what.split()),
        trap.affected,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
