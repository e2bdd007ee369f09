"""Carry data sets to ``data.train`` and ``data.eval``, by framework: files, and data sets by their names at a hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taut.io import files
from taut_tools.migrate.dialects import find_near
from taut_tools.migrate.draft import POLICY_METHODS, Draft, is_count, is_off, words_of
from taut_tools.migrate.frameworks import tables_of, words
from taut_tools.migrate.topics.evaluation import OFFLINE_EVAL

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Data files that taut reads."""
SELF_COGNITION = ("swift/self-cognition", "modelscope/self-cognition")
EMPTY_THINK = "<think>\n\n</think>\n\n"
"""Text before each answer in the subsets qwen3 and empty_think of self-cognition; qwen3 also asks for it."""
SELF_COGNITION_ROWS = 108
TAKEN = "has as many rows as are named, or more: the first are taken, where ms-swift draws them"
ALL_ROWS = 10**6
"""OpenRLHF's default of data.max_samples for sft, dpo and rm."""

Source = dict[str, Any]


def hub(path: str) -> Source:
    """The source for a file, a directory, or a data set of the Hugging Face hub."""
    is_path = "/" in path or Path(path).suffix in SUFFIXES
    return {"path": path if is_path else f"hf://{path}"}


def present(key: str, value: Any) -> Source:
    return {} if value is None else {key: value}


def carry_data(draft: Draft) -> None:
    """Carry training data and evaluation data."""
    {
        "swift": _carry_swift,
        "megatron": _carry_swift,
        "openrlhf": _carry_openrlhf,
        "llamafactory": _carry_llamafactory,
        "axolotl": _carry_axolotl,
    }.get(draft.framework, _carry_trl)(draft)


def _set_sources(draft: Draft, name: str, key: str, sources: list[Source], lacks: str = "") -> None:
    """Set ``key`` to the sources, or leave it to the user if taut cannot express them."""
    if draft.is_unknown(name):
        draft.leave_open(key, f"{name} is {draft.given[name].obstacle}")
        return
    if lacks or not sources:
        draft.lacking(name, lacks or "no data are named")
    if sources:
        is_one_path = len(sources) == 1 and set(sources[0]) == {"path"}
        draft.set(key, sources[0]["path"] if is_one_path else sources, name)
    else:
        draft.leave_open(key, lacks or "no data are named")


def _hold_out(draft: Draft, name: str, sources: list[Source]) -> None:
    """Hold out a share of the rows from training."""
    share = draft.value(name) or 0
    if draft.is_unknown(name):
        return
    if not sources or share == 0:
        draft.needless("nothing is held out", name)
        return
    if share >= 1:
        draft.lacking(
            name, "a number of rows is held out: name a share of them, in data.train and data.eval"
        )
        return
    cut = float(f"{1 - share:.6g}")
    held_out = []
    for source in sources:
        limit = source.pop("limit", None)
        source["share"] = [0.0, cut]
        held_out.append(source | {"share": [cut, 1.0]} | _limited(limit, share))
        source |= _limited(limit, cut)
    draft.set("data.train", sources, name, why="share, of rows by their hash")
    if draft.method in OFFLINE_EVAL:
        draft.set("data.eval", held_out, name, why="share, of rows by their hash")


def _limited(limit: int | None, share: float) -> Source:
    return {} if limit is None else {"limit": max(1, round(limit * share))}


# -- TRL and open-r1


def _carry_trl(draft: Draft) -> None:
    mixtures = [name for name in ("datasets", "dataset_mixture.datasets") if name in draft.given]
    if mixtures:
        _carry_mixture(draft, mixtures[0])
    else:
        _carry_trl_name(draft)
    text = draft.value("dataset_text_field")
    if text in (None, "text"):
        draft.needless("what taut reads in any case", "dataset_text_field")
    elif draft.method == "sft":
        draft.set("data.columns", {"text": text}, "dataset_text_field")
    prompt = draft.value("dataset_prompt_column")
    if prompt not in (None, "prompt"):
        draft.set("data.columns", {"instruction": prompt}, "dataset_prompt_column")
    else:
        draft.needless("what taut reads in any case", "dataset_prompt_column")


def _carry_trl_name(draft: Draft) -> None:
    """Carry ``dataset_name`` with its configuration and splits."""
    path, parts = draft.value("dataset_name"), ("dataset_config", "dataset_train_split")
    if draft.is_unknown("dataset_name", *parts) or not isinstance(path, str):
        _set_sources(draft, "dataset_name", "data.train", [])
        draft.needless("part of dataset_name, which is not known", *parts, "dataset_test_split")
        return
    sources = [{"path": path}]
    if is_hub := Path(path).suffix not in SUFFIXES:
        split = {"split": draft.value("dataset_train_split", "train")}
        sources = [hub(path) | present("name", draft.value("dataset_config")) | split]
    else:
        draft.needless("a file has no splits", *parts, "dataset_test_split")
    _set_sources(draft, "dataset_name", "data.train", sources)
    draft.carried(parts, ["data.train"])
    _hold_out(draft, "test_split_size", [dict(source) for source in sources])
    # Evaluation rows are another split of the same data set; in Python also those of another one.
    names = ("eval_strategy", "dataset_test_split", "eval_dataset")
    given = draft.value("eval_dataset")
    if draft.value("eval_strategy", "no") in ("no", False) or draft.method not in OFFLINE_EVAL:
        draft.needless("nothing is evaluated", *names, "eval_steps")
        return
    if given:
        held_out = [source | hub(source["path"]) for source in given]
    else:
        held_out = [sources[0] | {"split": draft.value("dataset_test_split", "test")}]
    if (given or is_hub) and "test_split_size" not in draft.given:
        draft.set("data.eval", held_out, *names)
    draft.carried(names, ["data.eval"] if "data.eval" in draft.settings else [])


def _carry_mixture(draft: Draft, name: str) -> None:
    """Carry ``datasets`` of trl, and ``dataset_mixture`` of open-r1."""
    entries = draft.value(name)
    sources, lacks = list[Source](), list[str]()
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            lacks.append(f"{entry} is no data set")
            continue
        path = entry.get("path", entry.get("id"))
        source = hub(str(path)) | present("name", entry.get("name", entry.get("config")))
        source["split"] = entry.get("split") or "train"
        formats = {
            ("messages",): "messages",
            ("prompt", "completion"): "completion",
            ("text",): "text",
        }
        columns = entry.get("columns")
        if columns is not None and draft.method == "sft" and tuple(columns) in formats:
            source["format"] = formats[tuple(columns)]
        elif columns is not None and draft.method == "sft":
            lacks.append(f"columns {columns} of {path}")
        if entry.get("weight") not in (None, 1, 1.0):
            source["weight"] = entry["weight"]
            draft.assumed.append(
                f"of {path} other rows are drawn in each epoch, where {draft.framework} keeps the same ones"
            )
        lacks += [
            f"{part} of {path}"
            for part in ("data_dir", "data_files", "fraction")
            if entry.get(part)
        ]
        sources.append(source)
    _set_sources(draft, name, "data.train", sources, "; ".join(lacks))
    draft.needless("the mixture is in its place", "dataset_name")
    draft.needless("the order of rows follows from seed", "dataset_mixture.seed")
    draft.needless(
        "part of the mixture", "dataset_config", "dataset_train_split", "dataset_test_split"
    )
    _hold_out(draft, "dataset_mixture.test_split_size", sources)
    _hold_out(draft, "test_split_size", sources)


# -- ms-swift


def _carry_swift(draft: Draft) -> None:
    variable = draft.recipe.environment.get("USE_HF")
    is_set = variable is not None and variable.value in ("1", 1, "true")
    uses_hugging_face = draft.value("use_hf") in (True, 1) or is_set
    is_evaluated = not is_off(draft.value("val_dataset"))
    train: list[Source] = []
    for name, key in (("dataset", "data.train"), ("val_dataset", "data.eval")):
        if key == "data.eval" and not is_evaluated:
            draft.needless("off", name)
            continue
        if key == "data.eval" and draft.method not in OFFLINE_EVAL:
            draft.needless(
                "nothing that is generated has a held-out loss: eval.answers", name, "eval_steps"
            )
            continue
        value = draft.value(name)
        words = value if isinstance(value, list) else [] if value is None else [value]
        sources = [
            source
            for word in words
            for source in _swift_sources(draft, str(word), uses_hugging_face)
        ]
        _set_sources(draft, name, key, sources)
        if key == "data.eval":
            draft.carried(["eval_strategy"], ["data.eval"])
        else:
            train = sources
    if is_evaluated or draft.value("eval_strategy") == "no":
        draft.needless("nothing is held out", "split_dataset_ratio")
    else:
        _hold_out(draft, "split_dataset_ratio", train)
    _carry_swift_columns(draft)
    draft.needless("fills in rows of swift/self-cognition only", "model_name", "model_author")


def _swift_sources(draft: Draft, word: str, uses_hugging_face: bool) -> list[Source]:
    """Read ``[HF::]ID:SUBSET/SUBSET#COUNT``, or a file."""
    house, has_house, rest = word.partition("::")
    if not has_house:
        rest = word
    rest, has_count, count = rest.rpartition("#") if "#" in rest else (rest, "", "")
    limit = {"limit": int(count)} if has_count and count.isdigit() and int(count) else {}
    if Path(rest).suffix in SUFFIXES:
        if limit:
            draft.assumed.append(f"{rest} {TAKEN}")
        return [{"path": rest} | limit]
    path, _, subsets = rest.partition(":")
    is_directory = path.startswith((".", "/", "~", "<")) or path.endswith("/")
    is_hugging_face = house.lower() == "hf" if has_house else uses_hugging_face
    if not is_directory and not is_hugging_face:
        path = f"ms://{path}"
    source = hub(path) if is_hugging_face else {"path": path.rstrip("/") if is_directory else path}
    if not is_directory:
        source["split"] = "train"
    if path.partition("://")[2] in SELF_COGNITION or path in SELF_COGNITION:
        return [_self_cognition(draft, source, subset, limit) for subset in subsets.split("/")]
    if limit:
        draft.assumed.append(f"{rest} {TAKEN}")
    return [
        source | present("name", subset.strip() or None) | limit for subset in subsets.split("/")
    ]


def _self_cognition(draft: Draft, source: Source, subset: str, limit: Source) -> Source:
    """Carry questions about the model itself, where names are filled in, and rows repeated to the requested number."""
    source = source | {"columns": {"instruction": "query", "output": "response"}}
    if subset.strip() == "qwen3":
        source["append"] = {"query": " /no_think"}
    if subset.strip() in ("qwen3", "empty_think"):
        source["prepend"] = {"response": EMPTY_THINK}
        if "deepseek-r1" in str(draft.value("model")).lower():
            draft.lacking(
                "dataset", "an empty thought before answers, which its chat template takes away"
            )
    elif subset.strip() not in ("", "default"):
        draft.lacking("dataset", f"the subset {subset}, which is not known")
    if limit:
        source["weight"] = float(f"{limit['limit'] / SELF_COGNITION_ROWS:.6g}")
    texts = {}
    for name, mark in (("model_name", "{{NAME}}"), ("model_author", "{{AUTHOR}}")):
        words = draft.value(name)
        words = words if isinstance(words, list) else [] if words is None else [words]
        if draft.is_unknown(name):
            continue
        if len(set(words)) > 1:
            draft.lacking(name, "another one in Chinese than in English: write them into the rows")
        elif words:
            texts[mark] = str(words[0])
            draft.carried([name], ["data.train"], f"data.train: replace {mark}")
    return source | ({"replace": texts} if texts else {})


def _carry_swift_columns(draft: Draft) -> None:
    columns = draft.value("columns")
    if not isinstance(columns, dict):
        return
    right = next((theirs for theirs, ours in columns.items() if ours == "solution"), None)
    if draft.method in POLICY_METHODS and right is not None:
        draft.set("rollout.reference", str(right), "columns")
        columns = {theirs: ours for theirs, ours in columns.items() if ours != "solution"}
        if not columns:
            return
    known = draft.tables.columns
    if draft.method in ("dpo", "orpo", "cpo", "simpo", "reward"):
        known = known | {"response": "chosen"}
    if set(map(str, columns.values())) <= known.keys():
        ours = {known[ours]: theirs for theirs, ours in columns.items()}
        draft.set("data.columns", ours, "columns")
    else:
        draft.lacking("columns", "columns that taut has no name for")


# -- OpenRLHF


def _carry_openrlhf(draft: Draft) -> None:
    is_policy = draft.recipe.method == "ppo"
    train = (
        ("data.prompt_dataset", "data.prompt_split")
        if is_policy
        else ("data.dataset", "data.dataset_split")
    )
    for name, split_name, key in (
        (*train, "data.train"),
        ("eval.dataset", "eval.split", "data.eval"),
    ):
        if key == "data.eval" and (not draft.is_on(name) or draft.method not in OFFLINE_EVAL):
            why = (
                "nothing is evaluated"
                if not draft.is_on(name)
                else "nothing that is generated has a held-out loss"
            )
            draft.needless(why, name, split_name, "eval_steps")
            continue
        paths = [path.strip() for path in str(draft.value(name) or "").split(",") if path.strip()]
        lacks = "; ".join(f"a directory in a data set ({path})" for path in paths if "@" in path)
        split = {"split": draft.value(split_name, "train")}
        sources = [
            {"path": path} if Path(path).suffix in SUFFIXES else hub(path) | split for path in paths
        ]
        most = draft.value("data.max_samples")
        if key == "data.train" and is_count(most):
            if most < ALL_ROWS:
                sources = [source | {"limit": most} for source in sources]
                if len(sources) > 1:
                    why = "at most so many rows of all data sets together: limit is of each"
                    draft.lacking("data.max_samples", why)
            draft.carried(["data.max_samples"], ["data.train"])
        _set_sources(draft, name, key, sources, lacks)
        draft.carried([split_name], [key])
    _carry_openrlhf_columns(draft)


def _carry_openrlhf_columns(draft: Draft) -> None:
    """Carry columns, targets and template, which depend on each other."""
    value, keys = draft.value, ("data.input_key", "data.output_key")
    question, answer = value(keys[0]), value(keys[1])
    if draft.method in ("dpo", "reward", "kto"):
        names = {
            "prompt": "data.prompt_key",
            "chosen": "data.chosen_key",
            "rejected": "data.rejected_key",
        }
        columns = {ours: value(name) for ours, name in names.items() if value(name)}
        if any(ours != theirs for ours, theirs in columns.items()):
            draft.set("data.columns", columns, *names.values())
        else:
            draft.needless("what taut reads in any case", *names.values())
        _carry_openrlhf_template(draft, is_text=False)
        return
    if draft.method != "sft":
        image, label = value("data.image_key", "images"), value("data.label_key")
        columns = {"prompt": question} | ({} if image == "images" else {"images": image})
        draft.set("data.columns", columns, keys[0], "data.image_key")
        if label:
            draft.set("rollout.reference", label, "data.label_key")
        _carry_openrlhf_template(draft, is_text=not value("data.apply_chat_template"))
        return
    if value("model.pretrain_mode_enable"):
        draft.set("data.format", "text", "model.pretrain_mode_enable")
        draft.set("data.columns", {"text": question}, keys[0])
        draft.needless(
            "text alone is read", keys[1], "data.apply_chat_template", "data.input_template"
        )
        draft.needless("text alone is read", "data.multiturn", "data.tokenizer_chat_template")
        return
    draft.needless("off", "model.pretrain_mode_enable")
    if value("data.apply_chat_template"):
        if answer is None:
            draft.set("data.columns", {"messages": question}, *keys)
        else:
            draft.set("data.columns", {"instruction": question, "output": answer}, *keys)
            draft.assumed.append(f"{question} and {answer} are texts, not lists of messages")
    else:
        draft.set("data.columns", {"prompt": question} | present("completion", answer), *keys)
        if answer is None and not draft.is_unknown(keys[1]):
            draft.lacking(keys[1], "not set: which column holds the answers is not known")
    _carry_openrlhf_template(draft, is_text=not value("data.apply_chat_template"))
    draft.set("data.targets", "assistant" if value("data.multiturn") else "last", "data.multiturn")


def _carry_openrlhf_template(draft: Draft, is_text: bool) -> None:
    """Carry ``input_template``, which writes prompts without a chat template and puts a space and the end token after
    an answer.
    """
    name, template = "data.input_template", draft.value("data.input_template")
    if not is_text or template is None or "{}" not in str(template):
        draft.needless("rows go through the chat template", "data.apply_chat_template", name)
    else:
        before, after = (json.dumps(part) for part in str(template).split("{}", 1))
        answer = "{{ m.content.rstrip('\\n') + ' ' + eos_token }}"
        text = (
            f"{{% for m in messages %}}{{% if m.role == 'user' %}}{{{{ {before} + m.content + {after} }}}}"
            f"{{% else %}}{answer}{{% endif %}}{{% endfor %}}"
        )
        draft.set("data.template", text, name)
        draft.set("data.apply_chat_template", True, "data.apply_chat_template")
    if is_text:
        draft.needless(
            "no chat template is used", "data.apply_chat_template", "data.tokenizer_chat_template"
        )
    elif draft.is_on("data.tokenizer_chat_template"):
        draft.set(
            "data.template",
            str(draft.value("data.tokenizer_chat_template")),
            "data.tokenizer_chat_template",
        )
    else:
        draft.off("data.tokenizer_chat_template")


# -- LLaMA-Factory


def _carry_llamafactory(draft: Draft) -> None:
    directory = str(draft.value("dataset_dir", "data"))
    path = find_near(draft.facts.directory / "recipe", f"{directory}/dataset_info.json")
    info = None
    if path is not None:
        info = files.read_json(path)
    train: list[Source] = []
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        if key == "data.eval" and (not draft.is_on(name) or draft.method not in OFFLINE_EVAL):
            draft.needless("nothing is evaluated", name)
            continue
        sources, lacks = list[Source](), list[str]()
        for word in words_of(draft.value(name)):
            entry = info.get(word) if isinstance(info, Mapping) else None
            if not isinstance(entry, Mapping):
                lacks.append(f"{word}: dataset_info.json, which says what it is, is not here")
                continue
            is_text = draft.recipe.method == "pt"
            source, missing = _factory_source(word, entry, directory, is_text=is_text)
            sources.append(source)
            lacks += missing
        if is_count(most := draft.value("max_samples")) and key == "data.train":
            sources = [
                source | {"limit": min(most, source.get("limit", most))} for source in sources
            ]
            draft.carried(["max_samples"], ["data.train"])
        _set_sources(draft, name, key, sources, "; ".join(lacks))
        train = sources if key == "data.train" else train
    if draft.method in OFFLINE_EVAL:
        _hold_out(draft, "split_dataset_ratio", train)
    else:
        draft.needless("nothing is held out", "split_dataset_ratio")
    draft.carried(["dataset_dir"], ["data.train"])
    draft.needless("pictures are next to the rows, or in data.images.folder", "media_dir")


def _factory_source(
    name: str, entry: Mapping[str, Any], directory: str, *, is_text: bool
) -> tuple[Source, list[str]]:
    """Read an entry of dataset_info.json, with ``is_text`` one of documents; the source, and what taut lacks."""
    lacks = []
    known = tables_of("llamafactory").columns | ({"prompt": "text"} if is_text else {})
    if entry.get("hf_hub_url"):
        source = hub(str(entry["hf_hub_url"])) | {"split": entry.get("split", "train")}
    elif entry.get("ms_hub_url"):
        source = {"path": f"ms://{entry['ms_hub_url']}", "split": entry.get("split", "train")}
    elif entry.get("file_name"):
        source = {"path": f"{directory}/{entry['file_name']}"}
    else:
        source = {"path": name}
        lacks.append(f"{name} is loaded by a script of its own")
    source |= present("name", entry.get("subset")) | present("limit", entry.get("num_samples"))
    columns = {
        known[ours]: theirs
        for ours, theirs in (entry.get("columns") or {}).items()
        if ours in known and known[ours] != theirs
    }
    lacks += [
        f"column {ours} of {name}" for ours in entry.get("columns") or {} if ours not in known
    ]
    if columns.get("conversations") == "messages":
        del columns["conversations"]
    return source | ({"columns": columns} if columns else {}), lacks


# -- axolotl


def _carry_axolotl(draft: Draft) -> None:
    name = "pretraining_dataset" if draft.recipe.method == "pt" else "datasets"
    sources, lacks, targets = _axolotl_sources(draft, name)
    _set_sources(draft, name, "data.train", sources, "; ".join(dict.fromkeys(lacks)))
    if draft.method == "sft":
        everything = bool(draft.value("train_on_inputs")) or targets == {"all"}
        if targets == {"all", "assistant"} and not draft.value("train_on_inputs"):
            draft.lacking(
                name,
                "whole texts next to conversations whose answers alone are learned: two runs, or mark them",
            )
        draft.set("data.targets", "all" if everything else "assistant", "train_on_inputs")
    if draft.is_on("test_datasets"):
        held_out, missing, _ = _axolotl_sources(draft, "test_datasets")
        if draft.method in OFFLINE_EVAL:
            _set_sources(draft, "test_datasets", "data.eval", held_out, "; ".join(missing))
        else:
            draft.needless("nothing that is generated has a held-out loss", "test_datasets")
    _hold_out(draft, "split_dataset_ratio", sources)


def _axolotl_sources(draft: Draft, name: str) -> tuple[list[Source], list[str], set[str]]:
    """Read data sets of axolotl; the sources, what taut lacks, and the targets of the rows."""
    value = draft.value(name)
    sources, lacks, targets = list[Source](), list[str](), set[str]()
    for entry in value if isinstance(value, list) else [value] if isinstance(value, dict) else []:
        if not isinstance(entry, dict) or not entry.get("path"):
            lacks.append(f"{entry} is no data set")
            continue
        path, kind = str(entry["path"]), entry.get("type")
        if entry.get("data_files"):
            names = (
                entry["data_files"]
                if isinstance(entry["data_files"], list)
                else [entry["data_files"]]
            )
            is_local = path.lower() in ("json", "csv", "parquet", "text", "arrow")
            paths = [str(file) if is_local else f"hf://datasets/{path}/{file}" for file in names]
            new = [{"path": file} for file in paths]
        elif Path(path).suffix in SUFFIXES:
            new = [{"path": path}]
        else:
            new = [hub(path) | {"split": entry.get("split") or "train"}]
        extra = present("name", entry.get("name")) | present("revision", entry.get("revision"))
        columns: dict[str, str] = {}
        kind_name = str(kind).partition(":")[0].partition(".")[0] if isinstance(kind, str) else ""
        if draft.recipe.method == "pt" or kind_name in ("completion", "pretrain"):
            field = entry.get("field") or entry.get("text_column") or "text"
            columns = {} if field == "text" else {"text": field}
            extra["format"] = "text"
            targets.add("all")
        elif kind is None or kind_name in ("chat_template", "alpaca", "sharegpt", "alpaca_chat"):
            targets.add("assistant")
            if kind_name == "alpaca" and draft.method == "sft" and kind != "alpaca_chat.load":
                lacks.append(
                    f"{path}: prompts written by axolotl's {kind}, not with the model's chat "
                    "template: put it into the rows"
                )
            field = entry.get("field_messages")
            if field not in (None, "messages", "conversations"):
                columns["messages"] = field
            given = entry.get("message_property_mappings")
            mapping = given if isinstance(given, dict) else {}
            keys = [
                str(entry.get(f"message_field_{part}") or mapping.get(part) or part)
                for part in ("role", "content")
            ]
            if keys not in (["role", "content"], ["from", "value"]):
                lacks.append(f"{path}: messages with the keys {', '.join(keys)}")
            roles = entry.get("roles_to_train")
            if roles not in (
                None,
                ["assistant"],
                ["gpt", "assistant"],
                ["assistant", "gpt"],
                ["gpt"],
            ):
                lacks.append(f"{path}: learns the turns of {roles}")
        else:
            lacks.append(
                f"{path}: rows of the type {kind if isinstance(kind, str) else 'that the recipe describes'}"
            )
        known = words(
            "path type name split revision data_files ds_type field text_column field_messages "
            "message_field_role message_field_content message_property_mappings roles_to_train roles "
            "chat_template trust_remote_code train_on_eos conversation"
        )
        lacks += [
            f"{path}: {key}"
            for key, given in entry.items()
            if key not in known and not is_off(given)
        ]
        sources += [source | extra | ({"columns": columns} if columns else {}) for source in new]
    return sources, lacks, targets
