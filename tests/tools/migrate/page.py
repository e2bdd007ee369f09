"""docs/recipes.md: ``python -m tests.tools.migrate.page`` writes it from the table of traps, and a test holds it."""

from __future__ import annotations

from pathlib import Path

from tests.tools.migrate import coming

from taut.methods import METHODS
from taut_tools.migrate.dialects import DIALECTS
from taut_tools.migrate.frameworks import tables_of
from taut_tools.migrate.traps import Trap, all_traps

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"

ORDER = ("lacking, no run", "lacking", "lacking, same result", "needless", "machine")

INTRODUCTION = """\
# Recipes of other frameworks

How a recipe of another framework becomes a run of taut, what is carried over and what is not, and which known traps
the recipe walks into. Nothing of it is run and nothing is downloaded.

    taut import trl:run.sh > run.toml       the run of a recipe of TRL, as a file
    taut import train.py > run.toml         the same of a Python script of TRL or transformers
    taut check --recipe trl:run.sh          which known traps it walks into, and the same run as a command

Coming from [TRL](#coming-from-trl), [axolotl](#coming-from-axolotl), [LLaMA-Factory](#coming-from-llama-factory),
[ms-swift](#coming-from-ms-swift): their options and what becomes of them.

A recipe is a YAML or JSON file of settings, the shell script that starts the training, or for TRL the Python script
that calls the trainer. Without a framework before the file's name, the error says which fits it best.

| framework | what is read |
|---|---|
| `trl` | the file of `trl METHOD --config FILE`; scripts with `trl METHOD`, METHOD.py, or a script of its examples |
| `trl` or nothing | [Python scripts](#python-scripts) that call its trainers, or transformers' |
| `open-r1` | recipes/MODEL/METHOD/config.yaml; scripts that start src/open_r1/METHOD.py |
| `swift` | the file of `swift sft FILE`; scripts with `swift` or `megatron`, then `sft`, `rlhf` or `pt` |
| `openrlhf` | scripts with openrlhf.cli.train_METHOD, in its dotted names of 0.11 and the flat ones before |
| `llamafactory` | the file of `llamafactory-cli train FILE`; its `dataset_info.json` where it is here |
| `axolotl` | the file of `axolotl train FILE` |

Of a script are read: assignments, lists, here-documents, quotes, continued lines, `$NAME`, `${NAME:-default}`, what
`bash -c` runs, integer arithmetic, and the files of settings it names. Another value that would have to be computed
(`$(nproc)`, `$1`) is listed under "Not read", and what depends on it under "Not decided"; nothing is guessed. Options
that the framework does not have are listed with the nearest one that it has.

Traps belong to releases: the newest one known is meant, or one that you name, `trl==0.18.0:recipe.yaml`. A file that
may be for several methods needs `trl.dpo:recipe.yaml`. Traps that depend on the model or on the data's first row are
decided where these are on this machine.

| severity | meaning |
|---|---|
| wrong | the training silently differs from the recipe; exit code 1 |
| late | it shows only later: refused or broken under way, at evaluation or when served |
| slow | right, but it costs time, memory or learning |

## Python scripts

A script is read by its calls: the trainers of TRL or transformers' Trainer, their configurations, `LoraConfig`,
`BitsAndBytesConfig`, `from_pretrained`, `get_peft_model` (of Unsloth's FastLanguageModel too), `load_dataset` and
`train_test_split`.

- **What is known**: literals, names, arithmetic, f-strings, `os.path.join`, `torch.bfloat16`, `**table`, attributes
  of the script's own classes, and the defaults of argparse and HfArgumentParser.
- **What is not**: what other functions return, arguments of functions, variables of loops, names that are assigned
  under a condition. Each is left to you with its line: `# learning_rate = ?  # train.py:17: ...`.
- **Data** that `map` or `filter` changes are other rows than those of the hub: save them, and name the file.
- **Several trainers**: the first is read, the others are listed.
- **A reward function** is `train.py:NAME`, called as TRL calls it, if it has an argument `completions` and the script
  trains under `if __name__ == "__main__"`; it gets no `completion_ids`, `trainer_state`, `environments`, `log_extra`
  and `log_metric`. Another function is `own.py:NAME`: lacking, until you move it there.
- Callbacks, collators that choose targets, and other code are lacking, by their names.

## The same run in taut

The file that `taut import` writes has the recipe's line at each key, and the framework's own defaults, so that no
default of taut's takes their place:

```toml
[optim]
learning_rate = 1e-06  # run.sh:24 learning_rate
weight_decay = 0.1  # what swift does where nothing is set
```

Every option, every environment variable that the recipe sets and every option of its launcher has one outcome:

| outcome | meaning |
|---|---|
| carried | keys of taut have its meaning |
| needless | taut needs no setting for it, or it is off |
| machine | it concerns processes, memory, logs or saving, not what is learned |
| lacking | taut has nothing of equal meaning, or its value is not known |

Where something is lacking that changes what is learned, the exit code is 1, each is named, and the file is written
with `--force` alone. A method, a task, a tuner, an optimizer or a loss that taut does not have is refused by its
name. The objective comes first: `loss_type: simpo` of CPO becomes `taut simpo`, `gkd` with `lmbda: 0` `taut distill`.
These become runs:

{METHODS}

- **The batch** is a product over per-device batch, gradient accumulation and processes, which are read from torchrun,
  accelerate, deepspeed and the like; else it is for one process, as listed under assumed: `--processes 8` says it.
  GRPO counts prompts in taut and completions elsewhere.
- **Packs** become `batch.tokens_per_step`, the tokens of all packs of a step. Packs are seldom quite full, so a step
  here has a few more samples; no sample is cut.
- **Models** with pictures that taut refuses to open ([vision](vision.md)) are lacking.
- **Data** keep the names that hubs have for them; ModelScope's become `ms://owner/name`. `NAME#500` is `limit = 500`,
  a share that is held out is `share`. `swift/self-cognition` gets a `weight`, and `replace`, `prepend` and `append`.
- **Rewards** with names of TRL, open-r1 and ms-swift become [rewards](rewards.md) of taut's. A class of a plugin of
  ms-swift is `plugin.py:CLASS`, unchanged, as are OpenRLHF's `FILE.py` and an import path of TRL whose file is here.
- **Dropout** of adapters is in force in GRPO where each answer is trained on once, and left out where answers are
  compared; of frameworks that leave it on there, it is lacking.

Some values only you know. They are comments in the file, `# train = ?`, with the reason. Where torch is installed,
the classes of the configuration check the file.

## JSON

`taut check --recipe FILE --json` prints one object. `schema` is `taut.recipe/3`; the number is raised whenever a
field changes its meaning or goes.

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
| `carried.method` | the method of taut, or empty |
| `carried.command` | the command, or null where there is no such run in taut |
| `carried.settings` | taut's keys with their values |
| `carried.unfilled` | taut's keys that you have to fill in, with the reason |
| `carried.assumed` | lines on what the recipe does not say and the run rests on |
| `carried.options` | all options, variables (`$NAME`) and options of the launcher (`--NAME`); secrets are `***` |
| `carried.options[].key`, `place`, `value` | the option; `place` is null where it is not set and that is lacking |
| `carried.options[].outcome`, `why`, `keys` | one of the four; the reason; the keys of taut that say it |
| `carried.options[].changes_result` | whether what is learned is another model without it |

## An option

Names, defaults and outcomes of options are in `src/taut_tools/migrate/frameworks`, calls in Python in
`src/taut_tools/migrate/table/python.toml`, what takes several options in `src/taut_tools/migrate/topics`.
`python -m benchmarks.recipes_beside` runs recipes by their framework and as they are imported: the first losses are
equal to 1e-5 ([benchmarks](benchmarks.md#recipes-beside-their-framework)).

`python benchmarks/recipes.py swift:DIR` counts outcomes of the recipes in a directory. Over the frameworks' own
repositories, in November 2026; exact: nothing that changes what is learned is left out; offered: what is left out is
named; refused: the option that says why there is no such run is named:

| | recipes | exact | offered | refused |
|---|---|---|---|---|
| open-r1 | 21 | 12 | 6 | 3 |
| OpenRLHF | 23 | 12 | 7 | 4 |
| ms-swift, Megatron-SWIFT | 400 | 197 | 136 | 65, and 2 that name no teacher |
| TRL | 146 | 82 | 30 | 34 |
| LLaMA-Factory | 105 | 35 | 28 | 40, and 2 files of data |
| axolotl | 327 | 85 | 198 | 41, and 3 files that are no recipes |

Most often lacking of axolotl's are prompts that it writes itself (`type: alpaca` and the like, 108): taut takes the
model's chat template. Models whose pictures taut does not read count as offered.

## A new trap

One entry in `src/taut_tools/migrate/table`, with a recipe that walks in and the change that makes it clear; the tests
take both from there. `src/taut_tools/migrate/traps.py` says how its condition is written, and
`src/taut_tools/migrate/facts.py` what it may ask.

"""


def page() -> str:
    """The whole page."""
    sections = "".join(_section(name) for name in ("trl", "open-r1", "swift", "openrlhf"))
    introduction = INTRODUCTION.replace("{METHODS}", _methods())
    return (
        f"{introduction}## Coming from\n{coming.tables()}\n{_options()}\n## The traps\n{sections}"
    )


def _methods() -> str:
    """What becomes of each framework's methods."""
    head = "| framework | methods |\n|---|---|\n"
    rows = (
        f"| {tables.title} | {', '.join(name for name in tables.methods if tables.methods[name] in METHODS)} |\n"
        for tables in map(tables_of, DIALECTS)
    )
    return (head + "".join(rows)).rstrip()


def _options() -> str:
    """The options of the tables by outcome and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for tables in map(tables_of, DIALECTS):
        for name, entry in tables.lacking.items():
            outcome = (
                "lacking, no run"
                if entry.refuses
                else "lacking"
                if entry.changes
                else "lacking, same result"
            )
            reasons.setdefault((outcome, entry.why), []).append(name)
        for outcome, table in (("needless", tables.needless), ("machine", tables.machine)):
            for name, why in table.items():
                reasons.setdefault((outcome, why), []).append(name)
    head = "## Options that are not carried\n\n| outcome | why | options |\n|---|---|---|\n"
    rows = (
        f"| {outcome} | {why} | {', '.join(f'`{name}`' for name in dict.fromkeys(names))} |\n"
        for (outcome, why), names in sorted(
            reasons.items(), key=lambda item: ORDER.index(item[0][0])
        )
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
