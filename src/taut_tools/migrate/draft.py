"""A run of taut under construction, and the outcome of every option of a recipe.

An option, an environment variable that the recipe sets (``$NAME``) and an option of the launcher (``--NAME``) have one
of four outcomes:

    carried    keys of taut have its meaning
    needless   taut needs no setting for it, or it is off
    machine    it concerns processes, memory, logs or saving, not what is learned
    lacking    taut has nothing of equal meaning, or its value is not known

``Draft`` reads options under one name for all frameworks (``frameworks/``), and the framework's default for options
that the recipe does not set. An option that no topic has read is judged by the framework's tables, and is lacking if
they do not have it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from taut_tools.migrate.dialects import DIALECTS
from taut_tools.migrate.dialects import options as options_of
from taut_tools.migrate.facts import Facts, Processes, launcher_options
from taut_tools.migrate.frameworks import VARIABLES, Lacking, Tables, words
from taut_tools.migrate.recipe import Recipe, Setting

Outcome = Literal["carried", "needless", "machine", "lacking"]
NO_OPTION = "no option of"
WHOLE = ("columns", "chat_template_kwargs", "generation_kwargs")
"""Tables that are read as one value."""


class Option(NamedTuple):
    """An option of a recipe and its outcome."""

    key: str
    """Name in the recipe: the option's, ``$NAME`` of an environment variable, or ``--NAME`` of the launcher."""
    place: str
    """``FILE:LINE``, or empty for the framework's default of an option that the recipe does not set."""
    value: Any
    outcome: Outcome
    why: str
    keys: tuple[str, ...] = ()
    """Keys of taut that carry the option."""
    changes: bool = False
    """Whether the option is lacking and another model is learned without it."""
    refuses: bool = False
    """Whether the option is lacking and taut has no such run."""


@dataclass(frozen=True)
class Carried:
    """A run of taut, and every option of the recipe with its outcome."""

    method: str
    """A method in ``METHODS``, or empty for one that taut does not have."""
    settings: Mapping[str, Any]
    """Keys of the run with their values."""
    sources: Mapping[str, str]
    """Options from which each key follows, with their places, or the word that it is the framework's default."""
    unfilled: Mapping[str, str]
    """Keys whose value only the user knows, with the reason."""
    options: tuple[Option, ...]
    assumed: tuple[str, ...]
    """Assumptions of the run that the recipe does not state."""
    processes: int | None
    """Number of training processes of the recipe, or None if unknown."""

    def having(self, outcome: Outcome) -> list[Option]:
        """Options with an outcome."""
        return [option for option in self.options if option.outcome == outcome]

    @property
    def refusals(self) -> list[Option]:
        """Options with which taut has no such run."""
        return [option for option in self.options if option.refuses]

    @property
    def is_exact(self) -> bool:
        """Whether the run learns what the recipe does: no option that changes this is left out."""
        return not any(option.changes or option.refuses for option in self.options)


class Draft:
    """A run under construction."""

    def __init__(
        self, recipe: Recipe, facts: Facts, tables: Tables, processes: Processes, method: str
    ) -> None:
        """Begin a run of taut's ``method``, and judge options whose values are not known."""
        self.recipe, self.facts, self.tables = recipe, facts, tables
        self.processes, self.method = processes, method
        self.framework = recipe.framework
        self.defaults = tables.defaults_of(recipe.method)
        self.is_vision = facts.answer("is_vision").holds
        """Whether the model takes pictures, or None if unknown."""
        self.settings: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.unfilled: dict[str, str] = {}
        self.assumed = list(recipe.assumed)
        self.outcomes: dict[str, Option] = {}
        # Collect the options that are set, under one name for all frameworks.
        self.given: dict[str, Setting] = {}
        names = tables.names_of(recipe.method)
        for key, setting in recipe.settings.items():
            table, _, entry = key.rpartition(".")
            if table in WHOLE and entry:
                continue
            if isinstance(setting.value, dict) and setting.value and key not in WHOLE:
                continue
            if setting.value is None and not setting.obstacle and tables.none_is_unset:
                self._record(setting, "needless", "not set")
            else:
                self.given[names.get(key, key)] = setting
        model = str(recipe.model)
        if self.is_vision is None and re.search(TAKES_PICTURES, model.lower()):
            self.is_vision = True
            self.assumed.append(f"by its name {model} takes pictures")
        for name, setting in recipe.environment.items():
            self.given[f"${name}"] = setting._replace(key=f"${name}")
        self.given |= launcher_options(recipe)
        # Mark numbers that are none as unknown, and record unknown values that the tables do not excuse.
        for name, option in self.given.items():
            if option.obstacle:
                continue
            if isinstance(option.value, float) and not math.isfinite(option.value):
                self.given[name] = option._replace(obstacle="not a finite number")
            elif name in NUMBERS and not (option.value is None or is_number(option.value)):
                self.given[name] = option._replace(obstacle="not a number")
        for name, option in self.given.items():
            is_lacking = name == "config" or self.judge(name, option).outcome == "lacking"
            if option.obstacle and is_lacking:
                why = f"the value is not known ({option.obstacle})"
                self._record(option, "lacking", why, changes=name not in PLACES)

    # -- values

    def value(self, name: str, default: Any = None) -> Any:
        """An option's value, else the framework's default, else ``default``; None for an unknown value."""
        option = self.given.get(name)
        if option is None:
            return self.defaults.get(name, default)
        word = option.value if isinstance(option.value, str) else ""
        return None if option.obstacle else BOOLEANS.get(word.lower(), option.value)

    def is_unknown(self, *names: str) -> bool:
        """Whether one of the options is set to a value that is not known."""
        return any(name in self.given and bool(self.given[name].obstacle) for name in names)

    def is_on(self, name: str) -> bool:
        """Whether an option is set to a value that switches it on."""
        return not is_off(self.value(name))

    # -- outcomes

    def _record(
        self,
        option: Setting,
        outcome: Outcome,
        why: str,
        keys: Sequence[str] = (),
        changes: bool = False,
        refuses: bool = False,
    ) -> None:
        """Record an outcome. The first one of an option stays, but ``lacking`` replaces others, and further keys that
        carry the option are added.
        """
        before = self.outcomes.get(option.key)
        if before is not None and before.outcome == outcome == "carried":
            keys = tuple(dict.fromkeys((*before.keys, *keys)))
            why = before.why if why in before.why else f"{before.why}; {why}"
        elif before is not None and (outcome != "lacking" or before.outcome == "lacking"):
            return
        entry = Option(
            option.key, option.place, option.value, outcome, why, tuple(keys), changes, refuses
        )
        self.outcomes[option.key] = entry

    def carried(self, names: Sequence[str], keys: Sequence[str], why: str = "") -> None:
        """Record options that keys of taut carry."""
        for name in names:
            if name in self.given:
                self._record(self.given[name], "carried", why or ", ".join(keys), keys)

    def set(self, key: str, value: Any, *names: str, why: str = "") -> None:
        """Give a key of taut a value that follows from the options ``names``, or from their defaults."""
        unknown = [self.given[name] for name in names if self.is_unknown(name)]
        if unknown:
            self.settings.pop(key, None)
            self.unfilled[key] = f"{unknown[0].place}: {unknown[0].key} is {unknown[0].obstacle}"
            return
        self.unfilled.pop(key, None)
        self.settings[key] = value
        given = [self.given[name] for name in names if name in self.given]
        places = ", ".join(f"{option.place} {option.key}" for option in given)
        self.sources[key] = places or f"what {self.framework} does where nothing is set"
        self.carried(names, [key], why)

    def needless(self, why: str, *names: str) -> None:
        """Record options for which taut needs no setting."""
        for name in names:
            if name in self.given:
                self._record(self.given[name], "needless", why)

    def off(self, *names: str) -> None:
        """Record options as needless that are off."""
        self.needless(
            "off", *(name for name in names if not self.is_unknown(name) and not self.is_on(name))
        )

    def machine(self, why: str, *names: str) -> None:
        """Record options that do not concern what is learned."""
        for name in names:
            if name in self.given:
                self._record(self.given[name], "machine", why)

    def lacking(self, name: str, why: str, changes: bool = True, refuses: bool = False) -> None:
        """Record an option, or its default, for which taut has nothing."""
        option = self.given.get(name) or Setting(name, self.defaults.get(name), "")
        self._record(option, "lacking", why, changes=changes, refuses=refuses)

    def leave_open(self, key: str, why: str) -> None:
        """Leave a key of taut to the user, who alone knows its value."""
        self.settings.pop(key, None)
        self.unfilled[key] = why

    def judge(self, name: str, option: Setting) -> Option:
        """Judge an option that no topic has read, by the framework's tables."""

        def judged(
            outcome: Outcome, why: str, changes: bool = False, refuses: bool = False
        ) -> Option:
            return Option(
                option.key, option.place, option.value, outcome, why, (), changes, refuses
            )

        tables = self.tables
        if name == "config":
            return judged("needless", "the settings of the file are read")
        if name.startswith("--"):
            return judged("machine", "how the processes are started")
        if name.startswith("$") and name[1:] in tables.variables_elsewhere:
            return judged("lacking", tables.variables_elsewhere[name[1:]], True)
        if name.startswith("$"):
            if any(fnmatchcase(name[1:], pattern) for pattern in VARIABLES):
                return judged("machine", "how processes and memory are organized")
            if name[1:] in self.recipe.expanded:
                return judged("needless", "the script puts it into its options")
            return judged("lacking", "an environment variable that is not known here", True)
        stems = (name, option.key, name.partition(".")[0], option.key.partition(".")[0])
        refused = next((tables.lacking[stem] for stem in stems if stem in tables.lacking), None)
        if refused is not None and refused.refuses and not is_off(option.value, refused.off):
            return judged("lacking", refused.why, refuses=True)
        is_python = ".py:" in self.recipe.place
        known = options_of(self.framework, self.recipe.method, is_python=is_python)
        is_option = not known or any(
            stem in known or stem.removeprefix("no_") in known for stem in stems
        )
        if is_option or option.key in DIALECTS[self.framework].aliases.values():
            for stem in stems:
                if stem in tables.needless:
                    return judged("needless", tables.needless[stem])
                if stem in tables.machine:
                    return judged("machine", tables.machine[stem])
                if stem in tables.lacking:
                    entry: Lacking = tables.lacking[stem]
                    if not option.obstacle and is_off(option.value, entry.off):
                        return judged("needless", "off, or what taut does in any case")
                    return judged("lacking", entry.why, entry.changes, entry.refuses)
            if is_off(option.value) and not option.obstacle:
                return judged("needless", "off")
            return judged("lacking", "nothing in taut is known to mean the same", True)
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else ""
        return judged("lacking", f"{NO_OPTION} {self.recipe.options_of}{hint}", True)

    def finish(self) -> Carried:
        """Finish the run, and judge the remaining options by the framework's tables."""
        for name, option in self.given.items():
            judged, before = self.judge(name, option), self.outcomes.get(option.key)
            is_foreign = judged.why.startswith(NO_OPTION) and name not in ("script", "sampler_type")
            if before is None or (
                is_foreign and not before.refuses and before.outcome == "carried"
            ):
                self.outcomes[option.key] = judged
        return Carried(
            self.method,
            self.settings,
            self.sources,
            self.unfilled,
            tuple(self.outcomes.values()),
            tuple(dict.fromkeys(self.assumed)),
            self.processes.number,
        )


NUMBERS = frozenset(
    words(
        "per_device_train_batch_size gradient_accumulation_steps sequence_parallel_size max_steps "
        "max_epochs num_train_epochs warmup_steps warmup_ratio learning_rate "
        "lr_scheduler_kwargs.min_lr lr_scheduler_kwargs.min_lr_rate min_lr min_lr_ratio lora_r "
        "lora_alpha lora_dropout vit_lr aligner_lr max_length global_batch_size num_generations "
        "max_completion_length temperature epsilon epsilon_high beta delta num_iterations "
        "steps_per_generation generation_batch_size simpo_gamma cpo_alpha rpo_alpha lmbda seed "
        "weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm rollout_batch_size "
        "num_mini_batches num_ppo_epochs kl_coef critic_learning_rate split_dataset_ratio "
        "f_alpha_divergence_coef rollout_batch_size total_episodes test_split_size"
    )
)
"""Options that enter arithmetic. A value that is not a number counts as unknown."""
TAKES_PICTURES = (
    r"\bvl\b|[-_\d]vl\b|vision|omni|llava|internvl|ovis|minicpm-v|pixtral|paligemma|smolvlm|qvq|qwen-?3\.\d|"
    r"gemma-?3-(4|12|27)b|gemma-?4"
)
"""Names of models that take pictures, for a model whose files are not here."""
BOOLEANS = {"yes": True, "no": False}
"""Further words for true and false in the frameworks' parsers of options."""
PLACES = ("output_dir", "logging_dir", "hub_token", "run_name")
"""Options that name a directory, a token or the run, and do not change what is learned."""
ADAMW = words(
    "adam adamw adamw_hf adamw_torch adamw_torch_fused adamw_apex_fused adamw_torch_npu_fused "
    "paged_adamw paged_adamw_32bit default multimodal"
)
"""Names of AdamW in float32, of transformers and of the frameworks. Paging does not change what is learned."""
ADAMW_8BIT = words("adamw_8bit adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit")
PREFERENCE_METHODS = ("dpo", "kto", "orpo", "cpo", "simpo", "reward")
POLICY_METHODS = ("grpo", "ppo", "online_dpo", "gkd")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def is_off(value: Any, off: tuple[Any, ...] = ()) -> bool:
    """Whether a value switches an option off; ``off`` has further values that do."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value is None or value in (False, "", "none", "no", [], {}, *off)


def words_of(value: Any) -> list[str]:
    """Names in a value: a list, or words that spaces or commas separate."""
    words = value if isinstance(value, list) else [] if is_off(value) else [value]
    return [name for word in words for name in str(word).replace(",", " ").split()]
