"""Carry the targets of rows, their length, and the template."""

from __future__ import annotations

from collections.abc import Mapping

from taut.data.render.template_files import is_template
from taut_tools.migrate.dialects import find_near
from taut_tools.migrate.draft import (
    POLICY_METHODS,
    Draft,
    is_count,
    is_number,
    is_off,
)
from taut_tools.migrate.recipe import read_text


def carry_targets(draft: Draft) -> None:
    """Carry the tokens that are learned."""
    if draft.framework in ("swift", "megatron"):
        _carry_loss_scale(draft)
        _carry_thoughts(draft)
    elif draft.framework in ("trl", "open-r1") and draft.method == "sft":
        _carry_trl_targets(draft)
    elif draft.framework == "llamafactory" and draft.method == "sft":
        if draft.recipe.method == "pt":
            draft.set("data.format", "text")
        prompts, last = draft.is_on("train_on_prompt"), draft.is_on("mask_history")
        targets = (
            "all" if prompts or draft.recipe.method == "pt" else "last" if last else "assistant"
        )
        draft.set("data.targets", targets, "train_on_prompt", "mask_history")
    draft.off("completion_only_loss", "assistant_only_loss")


BASES = {"default": "assistant", "last_round": "last", "all": "all"}
"""Values of data.targets, by ms-swift's words for the answers that are learned."""
THOUGHTLESS = (
    r"^\s*(<think>\s*)?</think>\s*|^<\|channel>thought\n<channel\|>|^</mm:think>\s*|^<seed:think><seed:cot_budget_reflect>"
    r"The current thinking budget is 0, so I will directly start answering the question.</seed:cot_budget_reflect>\n"
    r"</seed:think>\s*"
)
REACT_ENDS = r"(?=Action:|Action Input:|Thought:|Final Answer:|Observation:|\Z)"
TOKEN_WEIGHTS = {
    "ignore_empty_think": ((THOUGHTLESS, 0.0),),
    "ignore_think_prefix": ((r"^<think>\n?", 0.0),),
    "hermes": (("<tool_call>.+?</tool_call>", 2.0),),
    "react": (
        (f"(Action:|Action Input:).*?{REACT_ENDS}", 2.0),
        ("Observation:", 2.0),
        (f"(?<=Observation:).*?{REACT_ENDS}", 0.0),
    ),
}
"""Rules of data.token_weights, by ms-swift's names of patterns."""


def _carry_loss_scale(draft: Draft) -> None:
    """Carry ``loss_scale``, BASE+PATTERNS: the answers that are learned, and the weights of their parts."""
    name = "loss_scale"
    if draft.recipe.method == "pt" and not draft.value("use_chat_template"):
        draft.set("data.format", "text", "use_chat_template")
    elif draft.value("use_chat_template") is False:
        draft.lacking(
            "use_chat_template", "rows go through the model's own chat template, or are documents"
        )
    draft.needless("follows from loss_scale", "is_binary_loss_scale")
    if draft.is_unknown(name):
        draft.set("data.targets", None, name)
        return
    base, *patterns = str(draft.value(name)).split("+")
    if base not in BASES:
        base, patterns = "default", [base, *patterns]
    patterns = [pattern for pattern in patterns if pattern != "base"]
    if draft.method == "sft":
        draft.set("data.targets", BASES[base], name)
    elif base == "all":
        draft.lacking(name, "the prompts of answers that are compared are not learned")
    else:
        draft.needless("an answer is one turn", name)
    if draft.method == "reward":
        draft.needless("answers are given scores, not learned", "disable_ignore_empty_think")
        return
    ignores = "ignore_empty_think"
    if draft.is_on("disable_ignore_empty_think"):
        draft.needless("every part of an answer is learned", "disable_ignore_empty_think")
    else:
        draft.needless("data.token_weights", "disable_ignore_empty_think")
        thinks = draft.facts.answer("template_thinks").holds and draft.method == "sft"
        if thinks and base != "all" and ignores not in patterns:
            patterns.append(ignores)
    unknown = [pattern for pattern in patterns if pattern not in TOKEN_WEIGHTS]
    heavy = [pattern for pattern in patterns if not pattern.startswith("ignore_")]
    if unknown:
        draft.lacking(name, f"weights of tokens by the patterns {', '.join(unknown)}")
    elif patterns and (base == "all" or draft.method in POLICY_METHODS):
        draft.lacking(name, "weights of tokens by a pattern are those of answers in the data")
    elif len(patterns) - len(heavy) > 1 or len(heavy) > 1:
        draft.lacking(name, "patterns one after another in what others have found")
    elif heavy and draft.method != "sft":
        draft.lacking(name, "of answers that are compared ms-swift does not weigh tokens")
    elif patterns:
        rules = [
            {"pattern": regex, "weight": weight}
            for pattern in patterns
            for regex, weight in TOKEN_WEIGHTS[pattern]
        ]
        draft.set("data.token_weights", rules, name)
        if heavy:
            draft.lacking(
                name,
                "data.token_weights has it, and divides the loss by the sum of weights: ms-swift divides it by the "
                "number of tokens",
            )


def _carry_thoughts(draft: Draft) -> None:
    """Carry the empty thought that ms-swift puts before answers without one, for models that can think."""
    name = "add_non_thinking_prefix"
    why = "swift puts an empty thought before answers without one"
    thinks = draft.facts.answer("template_thinks").holds
    if draft.is_unknown(name) or draft.method != "sft":
        draft.needless("nothing is put before answers", name)
        return
    if draft.value(name, True) is not False and thinks is not False:
        if thinks:
            draft.lacking(name, f"{why}: put it into the rows")
            return
        draft.assumed.append(
            f"the model's template has no switch for thinking: of one that has, {why}, and does not learn it"
        )
    draft.needless("nothing is put before answers", name)


def _carry_trl_targets(draft: Draft) -> None:
    """Carry the targets of trl: all tokens of messages; for prompts with completions the completions."""
    names = ("assistant_only_loss", "completion_only_loss")
    row = draft.facts.first_row
    if any(draft.is_on(name) for name in names):
        draft.set("data.targets", "assistant", *names)
        return
    targets = "all"
    if draft.is_unknown(*names):
        targets = "assistant"
    elif draft.value("completion_only_loss") is False or "data.columns" in draft.settings:
        pass
    elif isinstance(row, Mapping):
        targets = "assistant" if {"prompt", "completion"} <= row.keys() else "all"
    else:
        draft.assumed.append(
            "rows are conversations or texts, of which trl learns all tokens: of prompts with completions set "
            "data.targets=assistant"
        )
    draft.set("data.targets", targets, *names)


def carry_length(draft: Draft) -> None:
    """Carry the maximum length of rows, and the treatment of longer ones."""
    # The treatment of longer rows.
    length, too_long = draft.value("max_length"), "drop"
    framework, strategy = draft.framework, draft.value("truncation_strategy")
    is_policy = draft.method in POLICY_METHODS
    if framework in ("trl", "open-r1", "openrlhf", "llamafactory"):
        too_long = "error" if length is None and framework != "openrlhf" else "truncate"
        if is_policy and too_long == "truncate":
            too_long = "drop"
            if framework != "openrlhf":
                draft.assumed.append(
                    "no prompt is longer than max_length, which the framework would cut"
                )
        elif length is None and not is_policy:
            draft.assumed.append(
                "no row is longer than the model's context, which would be trained on"
            )
        if framework == "llamafactory" and not is_policy:
            draft.assumed.append(
                "no row is longer than cutoff_len, where LLaMA-Factory cuts questions and answers in proportion"
            )
    elif strategy in ("right", "truncate") and not is_policy:
        too_long = "truncate"
    elif strategy == "split" and not is_policy:
        too_long = "split"
    elif strategy == "raise":
        too_long = "error"
    elif strategy == "left" and is_policy:
        draft.assumed.append(
            "no prompt is longer than max_length, whose beginning ms-swift would cut"
        )
        if "truncation_strategy" in draft.given:
            draft.lacking(
                "truncation_strategy",
                "the prompt's beginning is not cut: longer ones are dropped",
                changes=False,
            )
    elif strategy not in ("delete", "drop", None):
        draft.lacking(
            "truncation_strategy", "data.too_long cuts at the end, drops, splits, or refuses"
        )
    # The maximum length. OpenRLHF's counts prompt and answer: the prompt may have the rest.
    if draft.is_unknown("max_length") or length is not None:
        limit = length
        if framework == "openrlhf" and is_policy and is_number(length):
            limit, new = int(length), draft.value("max_completion_length")
            limit -= new if is_count(new) and new < limit else 0
        draft.set("data.max_length", limit, "max_length")
    elif "max_length" in draft.given:
        draft.carried(["max_length"], ["data.max_length"], "the model's context")
    draft.set("data.too_long", too_long, "truncation_strategy")
    if draft.value("truncation_mode", "keep_start") == "keep_start":
        draft.carried(["truncation_mode"], ["data.too_long"])
    else:
        draft.lacking("truncation_mode", "data.too_long=truncate keeps the start")
    cut = draft.value("max_prompt_length")
    if is_number(cut) and not is_policy:
        draft.lacking(
            "max_prompt_length",
            "prompts of data with answers are not cut or dropped apart from the answers",
        )
    elif is_number(cut):
        why = "longer prompts are dropped, where their beginning would be cut"
        draft.set("data.max_length", cut, "max_prompt_length", why=why)
        draft.set("data.too_long", "drop", "max_prompt_length", why=why)
        draft.assumed.append(f"no prompt has more than {cut} tokens: {why}")
    if is_count(draft.value("min_sample_len")):
        draft.set("data.min_length", draft.value("min_sample_len"), "min_sample_len")


def carry_template(draft: Draft) -> None:
    """Carry the chat template, its variables, and the system message."""
    for name in ("chat_template", "chat_template_path"):
        template = draft.value(name)
        if is_off(template) or (draft.framework == "axolotl" and template == "tokenizer_default"):
            draft.off(name)
            draft.needless("the tokenizer's own", name)
        elif str(template).endswith(".jinja") or is_template(str(template)):
            draft.set("data.template", str(template), name)
        elif draft.framework == "axolotl":
            draft.assumed.append(f"the model's own chat template is axolotl's {template}")
            draft.needless("the model's own, by its name", name)
        else:
            draft.lacking(name, "write the template to a file: data.template")
            draft.leave_open("data.template", f"a file with the template of {name}")
    template = draft.value("template")
    if draft.framework == "llamafactory" and not is_off(template) and template != "empty":
        draft.assumed.append(f"the model's own chat template is LLaMA-Factory's {template}")
        draft.needless("the model's own, by its name", "template")
    name = "system" if draft.is_on("system") else "system_prompt"
    system = draft.value(name)
    if is_off(system):
        draft.off("system", "system_prompt")
    elif str(system).endswith(".txt"):
        path = find_near(draft.facts.directory / "recipe", str(system))
        if path is None:
            draft.lacking(name, f"the text is in {system}, which is not here: data.system")
            draft.leave_open("data.system", f"the text of {system}")
        else:
            draft.set("data.system", read_text(path).strip(), name)
    else:
        draft.set("data.system", str(system), name)
    values = {}
    if (thinking := draft.value("enable_thinking")) is not None:
        values["enable_thinking"] = thinking
    if isinstance(given := draft.value("chat_template_kwargs"), dict):
        values |= given
    if values:
        draft.set("data.chat_template_kwargs", values, "enable_thinking", "chat_template_kwargs")
