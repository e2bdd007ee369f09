"""One contender of ``benchmarks/tokenization.py``, in a process of its own: ``python tokenization.py JOB``, JSON.

The functions of TRL and LLaMA-Factory are theirs for rows of messages, as published, without what other rows need:
TRL's ``tokenize_fn`` of SFTTrainer (prompt and completion), which is mapped row by row, and LLaMA-Factory's
``SupervisedDatasetProcessor`` with ``Template.encode_multiturn`` for ChatML, mapped in batches of 1,000.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

Job = dict[str, Any]
IGNORED = -100


def trl_row(row: Job, tokenizer: Any) -> Job:
    prompt = tokenizer.apply_chat_template(
        row["messages"][:-1], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)[
        "input_ids"
    ]
    return {"input_ids": ids, "completion_mask": [0] * len(prompt) + [1] * (len(ids) - len(prompt))}


def llamafactory_batch(rows: Job, tokenizer: Any) -> Job:
    found: Job = {"input_ids": [], "attention_mask": [], "labels": []}
    for messages in rows["messages"]:
        ids, labels = [], []
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            source = f"<|im_start|>user\n{question['content']}<|im_end|>\n<|im_start|>assistant\n"
            source_ids = tokenizer.encode(source, add_special_tokens=False)
            target_ids = tokenizer.encode(
                f"{answer['content']}<|im_end|>\n", add_special_tokens=False
            )
            ids += source_ids + target_ids
            labels += [IGNORED] * len(source_ids) + target_ids
        found["input_ids"].append(ids)
        found["attention_mask"].append([1] * len(ids))
        found["labels"].append(labels)
    return found


def mapped(job: Job, tokenizer: Any) -> int:
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "json", data_files=job["rows"], split="train", cache_dir=job["cache"]
    )
    is_batched = job["contender"] == "llamafactory"
    processes = job["processes"] if job["processes"] > 1 else None
    done = rows.map(
        llamafactory_batch if is_batched else trl_row,
        fn_kwargs={"tokenizer": tokenizer},
        batched=is_batched,
        num_proc=processes,
        remove_columns=["messages"],
    )
    return len(done)


def taut(job: Job, tokenizer: Any) -> int:
    from taut.data.dataset import load_dataset
    from taut.data.render.render import Renderer
    from taut.data.settings import DataConfig
    from taut.data.store import shards

    shards.SHARD_BYTES = job.get("shard_mib", 256) * 2**20
    config = DataConfig(train=job["rows"], cache=job["cache"], workers=job["processes"])
    return len(load_dataset(config, "train", Renderer(tokenizer), 4096))


def main() -> None:
    from transformers import AutoTokenizer

    from taut.io import limited_call

    job = json.loads(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    with tempfile.TemporaryDirectory(dir=Path(job["rows"]).parent) as cache:
        job = {"cache": cache, **job}
        began, before = time.perf_counter(), time.process_time()
        num_rows = (taut if job["contender"] == "taut" else mapped)(job, tokenizer)
        seconds = time.perf_counter() - began
        limited_call._helper.end()  # the template's process: its processor time counts too
    own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = sum(used.ru_utime + used.ru_stime for used in (own, children)) - before
    found = {"seconds": seconds, "rows": num_rows, "peak_mib": own.ru_maxrss / 1024}
    print(json.dumps({**found, "cpu_seconds": cpu}))


if __name__ == "__main__":
    main()
