"""The model card of a run: README.md for the hub, written from the run's records.

    card = write_card(out, directory, "org/name")
    card.text        metadata in YAML (base model, license, data sets, tags, evaluations), and the page
    card.untold      facts that are left out, and why

Everything on a card is read from resolved.json, events.jsonl, the model's contract, best.json, and the reports of
``taut eval`` in ``out/evals``; nothing is guessed. A base model or a data set from the hub is linked. A path on this
machine is shown by its last name, and an address not at all. Secrets were hidden when the run began.

A card has the evaluations at the step of the model's weights. The metadata have no field for an interval, which is in
the metric's name instead.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taut.config import describe, home_path, written
from taut.errors import redacted, redacted_in
from taut.evals.contract import FILE as CONTRACT
from taut.evals.contract import Contract, read_contract
from taut.io import files, hub
from taut.methods import METHODS
from taut.train.log import Event, read_events
from taut.train.run_dir import ADAPTER, BEST, BEST_FILE, EVENTS, read_resolved

MARK = "<!-- Written by taut push."
"""Beginning of the line that marks a card as taut's."""
EVALS = "evals"
"""Folder in ``out`` with directories that ``taut eval`` wrote."""
REPORT = "report.json"
ALWAYS = (
    *("steps", "seed", "dtype", "optim.name", "optim.learning_rate", "optim.schedule"),
    *("batch.samples_per_step", "data.max_length", "quantize"),
)
"""Settings on every card."""
ADAPTERS = ("lora.rank", "lora.alpha", "lora.targets")
SHOWN_ELSEWHERE = ("model", "data.train", "data.eval")
MACHINE = (
    *("out", "resume", "overwrite", "device", "check", "cpu_matmul", "attention", "method"),
    *("log", "checkpoint", "data.cache", "reference.file", "rollout.server", "rollout.engine"),
)
"""Keys and tables of keys about the place and the means of a computation, which do not change its result."""
_CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_ADDRESS = re.compile(r"\b(?!hf://)[a-z][a-z0-9+.-]*://[^\s\"']+", re.IGNORECASE)


@dataclass(frozen=True)
class Card:
    """A model card."""

    text: str
    untold: list[str]
    """Facts that are left out, with the reason of each."""


@dataclass(frozen=True)
class Base:
    """The model that a run began with."""

    shown: str
    name: str | None
    """Name at the hub, or None."""
    commit: str | None
    digests: Mapping[str, str]
    """SHA-256 of each file, if it was read from a directory."""
    license: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """A data set, for training or held out."""

    shown: str
    name: str | None
    """Name at the hub, or None."""
    use: str
    weight: float
    revision: str | None
    digest: str | None
    license: str | None


@dataclass(frozen=True)
class Evaluation:
    """A value of a metric on some data."""

    data: str
    metric: str
    value: float
    low: float | None
    high: float | None

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return f"{self.low:.4g} to {self.high:.4g}"


def write_card(out: Path, directory: Path, name: str, base: str | None = None) -> Card:
    """Write the card of the model in ``directory``, which the run in ``out`` saved. ``name`` is owner/name at the hub;
    ``base`` is the hub's name of a base model that was read from a directory.
    """
    # Collect the facts, and the gaps.
    resolved = redacted_in(read_resolved(out))
    config = resolved["config"]
    events = read_events(out / EVENTS)
    untold: list[str] = []
    began_with = _base(resolved, base, untold)
    data = list(_data(resolved, untold))
    evaluations = [*_during(directory, config, events), *_reports(out, directory, untold)]
    if config["method"] not in METHODS:
        untold.append(
            f"settings: the method {config['method']} is not one of taut's own, or not registered here"
        )
    # Write the page, section by section.
    contract = read_contract(directory) if (directory / CONTRACT).is_file() else None
    parts = [
        _metadata(directory, name, config, began_with, data, evaluations),
        f"# {name.partition('/')[2] or name}\n\n{MARK} A card that does not have this line is left as it is. -->",
        _summary(directory, config, began_with),
        _use(directory, name, began_with, contract),
        _data_section(data),
        _training(resolved, events),
        _evaluation_section(evaluations),
    ]
    return Card(redacted("\n\n".join(filter(None, parts))) + "\n", untold)


def write_plain_card(directory: Path, name: str, base: str | None = None) -> Card:
    """Write the card of a model without a run: one that ``taut merge`` wrote, or GGUF files. ``base`` is the hub's name
    of the model that it was made from.
    """
    from huggingface_hub import ModelCardData

    # Collect the facts, and the gaps.
    untold = [
        f"training: {directory} has no record of a run; push the run's directory to say how it was trained"
    ]
    found: dict[str, Any] | str = "none is named"
    if base is None:
        untold.append(
            "base_model: not known; base=OWNER/NAME says which model of the hub it was made from"
        )
    else:
        found = _read_card(base)
    license = {} if isinstance(found, str) else _license(found)
    if not license:
        why = found if isinstance(found, str) else "its card names none"
        untold.append(f"license: that of the base model is not known: {why}")
    # Write the metadata and the page.
    quantized = sorted(directory.glob("*.gguf"))
    known: dict[str, Any] = {}
    if base is not None:
        relation = "quantized" if quantized else "finetune"
        known = {"base_model": base, "base_model_relation": relation}
    metadata = ModelCardData(
        library_name=None if quantized else "transformers",
        pipeline_tag="text-classification" if _is_reward(directory) else "text-generation",
        tags=["taut", *(["gguf"] if quantized else [])],
        **license,
        **known,
    )
    contract = read_contract(directory) if (directory / CONTRACT).is_file() else None
    about = f"[{base}](https://huggingface.co/{base})" if base else "a model that is not named here"
    what = "As GGUF files for llama.cpp, made" if quantized else "Made"
    summary = f"{what} with taut from {about}. How it was trained is not said here."
    sizes = [
        (path.name, f"{path.stat().st_size:,}", f"`{files.digest(path)}`") for path in quantized
    ]
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {name.partition('/')[2] or name}\n\n{MARK} A card that does not have this line is left as it is. -->",
        summary,
        "\n".join(_table(("file", "bytes", "SHA-256"), sizes)) if quantized else "",
        "" if quantized else _use(directory, name, Base(about, base, None, {}), contract),
    ]
    return Card(redacted("\n\n".join(filter(None, parts))) + "\n", untold)


def base_of_run(out: Path, base: str | None) -> str:
    """The name of a run's base model on its card: at the hub, or the last name of its path."""
    return _base(read_resolved(out), base, []).shown


def _base(resolved: Mapping[str, Any], named: str | None, untold: list[str]) -> Base:
    """Find the name, commit and license of a run's base model; ``named`` is its name at the hub if the user gave it."""
    model = str(resolved["config"]["model"])
    hashes = dict(resolved.get("identity", {}).get("model", {}))
    commit = hashes.pop("commit", None)
    place = Path(resolved.get("directory", ".")) / home_path(model)
    cached = _CACHED.search(str(place))
    name = named
    if named is None and commit is not None:
        name, _ = hub.named(model)
    elif named is None and cached is not None:
        name, commit = f"{cached[1]}/{cached[2]}", cached[3]
    if name is None:
        untold.append(
            f"base_model: the run read it from a directory ({model}); base=OWNER/NAME says which model of the hub it is"
        )
    found = _read_card(str(place) if place.is_dir() and cached is None else name or str(place))
    license = {} if isinstance(found, str) else _license(found)
    if not license:
        why = found if isinstance(found, str) else "its card names none"
        untold.append(f"license: that of the base model {name or model} is not known: {why}")
    commit = None if commit == "None" else commit
    return Base(name or place.name, name, commit, hashes, license)


def _license(card: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a card that name its license; none without one."""
    keys = ("license", "license_name", "license_link")
    found = {key: card[key] for key in keys if isinstance(card.get(key), str)}
    return found if "license" in found else {}


def _data(resolved: Mapping[str, Any], untold: list[str]) -> Iterator[Trained]:
    """List the data sets of a run."""
    digests = resolved.get("identity", {}).get("data", {})
    for use in ("train", "eval"):
        given = _at(resolved["config"], f"data.{use}")
        for source in given if isinstance(given, list) else [given]:
            if source is None:
                continue
            source = {"path": source} if isinstance(source, str) else dict(source)
            path = str(source["path"])
            place = Path(resolved.get("directory", ".")) / home_path(path)
            plain = path.removeprefix("hf://")
            is_hub = path.startswith("hf://") or (
                not place.exists() and re.fullmatch(r"[\w.-]+/[\w-]+", path) is not None
            )
            shown, license = (plain if is_hub else place.name), None
            if is_hub or place.is_dir():
                card = _read_card(
                    plain if is_hub else str(place), "dataset", source.get("revision")
                )
                license = None if isinstance(card, str) else card.get("license")
                if license is None:
                    why = card if isinstance(card, str) else "its card names none"
                    untold.append(f"license of {shown}: not known: {why}")
            digest = digests.get(path, {})
            yield Trained(
                shown=shown,
                name=plain if is_hub else None,
                use="training" if use == "train" else "held out",
                weight=float(source.get("weight", 1.0)),
                revision=source.get("revision"),
                digest=digest.get("content") if isinstance(digest, dict) else None,
                license=None if license is None else str(license),
            )


def _during(
    directory: Path, config: Mapping[str, Any], events: Sequence[Event]
) -> Iterator[Evaluation]:
    """Evaluations during training, at the step of the weights in ``directory``."""
    evals = [event for event in events if event["kind"] == "eval"]
    steps = [event["step"] for event in evals]
    if directory.name == BEST:
        steps = [files.read_json(directory / BEST_FILE)["step"]]
    elif steps and (ends := [e["step"] for e in events if e["kind"] == "step"]):
        steps = [step for step in steps if step == ends[-1]]
    of_data = _at(config, "eval.answers.data") or _at(config, "data.eval")
    data = ", ".join(_names(of_data)) or "held-out rows"
    for event in evals:
        if event["step"] not in steps[-1:]:
            continue
        for name, value in event.items():
            is_answer = "num_prompts" in event and f"{name}_low" in event
            if (
                (is_answer or name in ("loss", "stopped"))
                and isinstance(value, int | float)
                and value is not None
            ):
                low, high = event.get(f"{name}_low"), event.get(f"{name}_high")
                yield Evaluation(data, name, float(value), low, high)


def _names(data: Any) -> list[str]:
    """Names of data sets that may be shown: at the hub, or the last name of a path."""
    entries = data if isinstance(data, list) else [] if data is None else [data]
    paths = [entry if isinstance(entry, str) else str(entry["path"]) for entry in entries]
    return [path.removeprefix("hf://") if "hf://" in path else Path(path).name for path in paths]


def _reports(out: Path, directory: Path, untold: list[str]) -> Iterator[Evaluation]:
    """Results of ``taut eval`` in ``out/evals`` about this model."""
    for file in sorted((out / EVALS).glob(f"*/{REPORT}")):
        report = files.read_json(file)
        judged = home_path(report["config"]["model"]).resolve()
        if judged != directory.resolve():
            untold.append(f"{file}: it is about {judged}, and not about {directory}")
            continue
        data = ", ".join(_names(report["config"].get("data")))
        for metric in report["metrics"]:
            if metric["mean"] is not None:
                yield Evaluation(
                    metric.get("task") or data,
                    metric["name"],
                    float(metric["mean"]),
                    metric["low"],
                    metric["high"],
                )


def _metadata(
    directory: Path,
    name: str,
    config: Mapping[str, Any],
    base: Base,
    data: Sequence[Trained],
    evaluations: Sequence[Evaluation],
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    is_adapter = directory.name == ADAPTER
    is_reward = _is_reward(directory)
    relation = "adapter" if is_adapter else "finetune"
    if not is_adapter and "quantization_config" in files.read_json(directory / "config.json"):
        relation = "quantized"
    results = [
        EvalResult(
            task_type="text-classification" if is_reward else "text-generation",
            dataset_type=one.data,
            dataset_name=one.data,
            metric_type=one.metric,
            metric_value=one.value,
            metric_name=f"{one.metric} (95% interval {one.interval})" if one.interval else None,
        )
        for one in evaluations
    ]
    known: dict[str, Any] = {}
    if base.name:
        known = {"base_model": base.name, "base_model_relation": relation}
    metadata = ModelCardData(
        model_name=name.partition("/")[2] or name if results else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if is_reward else "text-generation",
        tags=["taut", str(config["method"]).replace("_", "-"), *(["lora"] if is_adapter else [])],
        datasets=sorted({one.name for one in data if one.name}) or None,
        eval_results=results or None,
        **base.license,
        **known,
    )
    return f"---\n{metadata.to_yaml()}\n---"


def _is_reward(directory: Path) -> bool:
    if not (directory / "config.json").is_file():
        return False
    kinds = files.read_json(directory / "config.json").get("architectures") or [""]
    return str(kinds[0]).endswith(("ForSequenceClassification", "ForTokenClassification"))


def _summary(directory: Path, config: Mapping[str, Any], base: Base) -> str:
    method = str(config["method"])
    about = METHODS.entries[method].about if method in METHODS.entries else "train a model"
    what = "A LoRA adapter for" if directory.name == ADAPTER else "A model trained from"
    link = f"[{base.name}](https://huggingface.co/{base.name})" if base.name else base.shown
    at = f", at commit `{base.commit}`" if base.commit else ""
    lines = [f"{what} {link}{at}, with `taut {method.replace('_', '-')}`: {about}."]
    if base.name is None and base.digests:
        lines.append("\nThe files it began with:\n")
        lines += _table(("file", "SHA-256"), [(n, f"`{d}`") for n, d in base.digests.items()])
    return "\n".join(lines)


def _use(directory: Path, name: str, base: Base, contract: Contract | None) -> str:
    """The section on how to load or serve the model, and where it stops."""
    lines = ["## Use", ""]
    if directory.name == ADAPTER:
        lines += [
            "```python",
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")',
            "```",
            "",
            f"It belongs on {base.shown} and on no other base.",
        ]
    elif not _is_reward(directory):
        lines += ["```", f"vllm serve {name}", "```"]
    if contract is not None and contract.stops:
        lines += ["", "An answer ends at one of these tokens, which the saved files name:", ""]
        lines += _table(
            ("token", "id", "why"),
            [(f"`{stop.token}`", str(stop.id), stop.reason) for stop in contract.stops],
        )
    if contract is not None:
        lines += [
            "",
            f"`contract.json` says what the model does: {len(contract.goldens)} prompts with its greedy answers and "
            f"their logprobs, in {contract.facts.dtype} weights. `taut verify DIR engine=server urls=URL` asks whether "
            "a server does the same.",
        ]
    return "\n".join(lines) if len(lines) > 2 else ""


def _data_section(data: Sequence[Trained]) -> str:
    rows = [
        (
            f"[{one.name}](https://huggingface.co/datasets/{one.name})" if one.name else one.shown,
            one.use,
            f"{one.weight:g}",
            one.revision or "",
            f"`{one.digest}`" if one.digest else "",
            one.license or "",
        )
        for one in data
    ]
    heads = ("data set", "use", "weight", "revision", "SHA-256", "license")
    return "\n".join(["## Data", "", *_table(heads, rows)]) if rows else ""


def _training(resolved: Mapping[str, Any], events: Sequence[Event]) -> str:
    """The section on settings, the command, and versions."""
    # Settings: the common ones, and others that differ from their defaults, except for keys of the machine.
    config = resolved["config"]
    decided = {entry["name"]: entry["value"] for entry in resolved.get("decisions", [])}
    method = str(config["method"])
    changed: dict[str, Any] = {}
    for row in describe(METHODS[method]) if method in METHODS else ():
        is_machine = any(row.key == key or row.key.startswith(f"{key}.") for key in MACHINE)
        value = _at(config, row.key)
        if not is_machine and value is not None and written(value) != row.default:
            changed[row.key] = value
    adapters = ADAPTERS if _at(config, "lora.rank") else ()
    rows: dict[str, str] = {}
    for key in (*ALWAYS, *adapters, *changed):
        if key == "batch.samples_per_step" and _at(config, "batch.tokens_per_step"):
            continue
        value = _at(config, key)
        if value in (None, "auto"):
            value = resolved.get("num_steps") if key == "steps" else decided.get(key, value)
        if value is not None and key not in SHOWN_ELSEWHERE:
            rows[key] = _shown(value, resolved)
    # The command that gives them, and the versions of libraries.
    words = [f"taut {method.replace('_', '-')}"]
    words += [shlex.quote(f"{key}={_shown(value, resolved)}") for key, value in changed.items()]
    words.append("out=DIR")
    start = next((event for event in reversed(events) if event["kind"] == "start"), {})
    names = ("python", "torch", "transformers", "peft", "tokenizers")
    found = start.get("versions", {})
    versions = ", ".join(f"{name} {found[name]}" for name in names if name in found)
    lines = ["## Training", ""]
    lines += _table(("setting", "value"), [(f"`{k}`", f"`{v}`") for k, v in rows.items()])
    lines += ["", "Again, with the data and the base model where the words point to:", ""]
    lines += ["```", " \\\n    ".join(words), "```", ""]
    lines += [f"taut {resolved.get('taut', '')}{', ' if versions else ''}{versions}."]
    return "\n".join(lines)


def _at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, or None where a run of another version lacks it."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any, resolved: Mapping[str, Any]) -> str:
    """Write a value as the command line takes it, without places of this machine."""
    value = _without_places(value, Path(resolved.get("directory", ".")))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _without_places(value: Any, directory: Path) -> Any:
    """Replace paths by their last names, and addresses of servers by ``URL``."""
    if isinstance(value, Mapping):
        return {key: _without_places(item, directory) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_places(item, directory) for item in value]
    if not isinstance(value, str):
        return value
    cached = _CACHED.search(value)
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    if "://" in value:
        return _ADDRESS.sub("URL", value)
    file = value.partition(":")[0]  # FILE.py:function
    is_path = file.startswith(("/", "~", ".")) or ("/" in file and (directory / file).exists())
    return Path(file).name + value[len(file) :] if is_path else value


def _evaluation_section(evaluations: Sequence[Evaluation]) -> str:
    if not evaluations:
        return ""
    rows = [(one.data, one.metric, f"{one.value:.4g}", one.interval) for one in evaluations]
    return "\n".join(
        ["## Evaluation", "", *_table(("data", "metric", "value", "95% interval"), rows)]
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown, without empty columns."""
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    lines = [[heads[at] for at in kept], ["---"] * len(kept)]
    lines += [[row[at].replace("|", "\\|").replace("\n", " ") for at in kept] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _read_card(name: str, kind: str = "model", revision: str | None = None) -> dict[str, Any] | str:
    """The metadata of a card: of a directory, or of a repository at the hub. A text: why there are none."""
    import yaml
    from huggingface_hub import hf_hub_download, metadata_load

    file = Path(name) / "README.md"
    if not Path(name).is_dir():
        hub.settle()
        try:
            file = Path(hf_hub_download(name, "README.md", repo_type=kind, revision=revision))
        except (OSError, ValueError) as error:
            return (
                hub.explain(name, error, kind) or f"{name} has no card that can be read ({error})"
            )
    if not file.is_file():
        return "it has no README.md"
    try:
        return metadata_load(file) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        return f"its README.md cannot be read: {' '.join(str(error).split())[:200]}"
