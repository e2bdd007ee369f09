"""docs/recipes.md: ``python -m tests.unit.migrate.page`` writes it from the table of traps, a test holds it to that."""

from __future__ import annotations

from pathlib import Path

from taut.migrate.carry import load_table
from taut.migrate.dialects import DIALECTS
from taut.migrate.traps import Trap, all_traps

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"

INTRODUCTION = """\
# Recipes of other frameworks

`taut check --recipe trl:recipe.yaml` reads a recipe of TRL, open-r1, ms-swift (`swift:`) or OpenRLHF (`openrlhf:`) and
says which known traps it walks into: what happens, why, in which releases, and what to set in that framework.
`--json` prints everything. Nothing is run and nothing is downloaded. The base installation is enough: without
transformers, what only the model's tokenizer can tell is listed as not decided.

A recipe is a YAML or JSON file of settings, or the shell script that starts the training:

| framework | what is read |
|---|---|
| `trl` | the file of `trl METHOD --config FILE`; scripts with `trl METHOD`, or METHOD.py under accelerate or torchrun |
| `open-r1` | recipes/MODEL/METHOD/config.yaml; scripts that start src/open_r1/METHOD.py |
| `swift` | the file of `swift sft FILE`; scripts with `swift sft`, `swift rlhf` or `swift pt` |
| `openrlhf` | scripts with openrlhf.cli.train_METHOD, in its dotted names of 0.11 and the flat ones before |

Of a script are read: assignments, lists, here-documents, quotes, continued lines, `$NAME`, `${NAME:-default}`, and the
files of settings it names. Arithmetic over known integers is computed (`$(expr 16 / $N)`, `$((16 / N))`). Another value
that would have to be computed (`$(nproc)`, `$1`) is listed under "Not read", and what depends on it under "Not
decided"; nothing is guessed. Options that the framework does not have are listed with the nearest one that it has.

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

## The same run in taut

A recipe for SFT is also written as a `taut sft` command of equal meaning. Every option of the recipe, every environment
variable that it sets and every option of its launcher has one outcome:

| outcome | meaning |
|---|---|
| carried | the command says it |
| needless | taut needs no setting for it, or it is off |
| machine | it concerns the machine, the logs or the saving, not what is learned |
| lacking | taut has nothing of equal meaning, or its value is not known; exit code 1 |

An option that is in none of the tables [below](#options-that-are-not-carried) and that taut does not read is lacking.
What the framework takes where the recipe is silent is in the command too, so that no default of taut's takes its place.
Where the task, the tuner, the optimizer or the loss is one that taut does not have, there is no command.

Some values only you know. They stand as a word in capitals, which taut refuses until you fill it in:

- `SAMPLES`, for `batch.samples_per_step`: TRL and ms-swift count a packed batch in packs of `max_length` tokens, taut
  in samples. It is the packs of a step times the samples that a pack holds; `taut show` says how long samples are.
- `TARGETS`, for `data.targets`: TRL learns all tokens of messages (`all`), and of prompts with completions the
  completions (`assistant`). taut cannot tell which they are where the first row is not here.
- `MODULES`, for `lora.targets`: TRL leaves the modules to peft, which goes by the model's type: q_proj and v_proj of
  most. They are named where the model is here.
- `ROWS.jsonl`, for `data.train`: data of ModelScope, or so many rows of a data set (`file#500`). Write them to a file.
- `TEMPLATE.jinja`, for `data.template`: a chat template that stands in the recipe. Write it to a file.

The batch is a product over the processes. How many there are is read from torchrun, accelerate, deepspeed, the files
that they name, `NPROC_PER_NODE`, `NNODES` and `CUDA_VISIBLE_DEVICES`. Where the recipe does not say it, the command is
for one process; `--processes 8` says it. What else the command rests on is listed under "Assumed".

## JSON

One object. `schema` is `taut.recipe/2`; the number is raised whenever a field changes its meaning or goes.

| field | what |
|---|---|
| `file`, `framework`, `library`, `version`, `version_reason` | what was read, and which release was assumed, and why |
| `method`, `method_reason`, `model`, `data` | what it trains |
| `outcome` | `failed` where it walks into a trap of severity wrong or an option is lacking, else `passed` |
| `traps` | all of the framework's for the method; each has the fields below |
| `traps[].id`, `severity`, `what`, `why`, `fix`, `taut` | the trap; `taut`: how taut does it |
| `traps[].versions`, `versions_note`, `classes`, `threads`, `source` | where it is known, and from where |
| `traps[].state` | `walks_in`, `clear`, `undecided` |
| `traps[].because` | the settings with their lines, or why it could not be decided |
| `traps[].seen` | how far we saw it: `source` (the files and releases named), `thread`, `run` |
| `unknown_keys` | `key, place, nearest` |
| `unread` | lines on what could not be resolved |
| `carried` | null for another method than sft, or where no model is named; else the fields below |
| `carried.command` | the command, or null where taut has no such task, tuner, optimizer or loss |
| `carried.settings` | taut's keys with their values |
| `carried.unfilled` | taut's keys that you have to fill in, with the word that stands in the command |
| `carried.assumed` | lines on what the recipe does not say and the command rests on |
| `carried.options` | all options, variables (`$NAME`) and options of the launcher (`--NAME`); secrets are `***` |
| `carried.options[].key`, `place`, `value` | the option; `place` is null where it is not set and that is lacking |
| `carried.options[].outcome`, `why`, `keys` | one of the four; the reason; the keys of taut that say it |

## An option

What becomes of an option is an entry in `src/taut/migrate/table/sft.toml`, where a name and a value decide; what takes
arithmetic or several options is in `src/taut/migrate/carry.py`.

## A new trap

One entry in `src/taut/migrate/table`, with a recipe that walks in and the change that makes it clear; the tests take
both from there. `src/taut/migrate/traps.py` says how its condition is written and what the fields mean,
`src/taut/migrate/facts.py` what it may ask beyond the settings.

"""


def page() -> str:
    """The whole page."""
    sections = "".join(_section(name) for name in ("trl", "open-r1", "swift", "openrlhf"))
    return f"{INTRODUCTION}{_options()}\n## The traps\n{sections}"


def _options() -> str:
    """The options of the table by outcome and reason."""
    table = load_table()
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, entry in table.lacking.items():
        outcome = "lacking, no command" if entry.refuses else "lacking"
        reasons.setdefault((outcome, entry.why), []).append(name)
    for name, judged in table.aside.items():
        reasons.setdefault((judged.outcome, judged.why), []).append(name)
    head = "## Options that are not carried\n\n| outcome | why | options |\n|---|---|---|\n"
    rows = (
        f"| {outcome} | {why} | {', '.join(f'`{name}`' for name in names)} |\n"
        for (outcome, why), names in reasons.items()
    )
    return head + "".join(rows)


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
