"""The memory that is a rank's own while it reads a model, and while the model is saved.

    python tests/helpers/rank_memory.py MODEL FOLDER DTYPE narrow|wide

Every rank writes FOLDER/RANK, in bytes: the most above the level before reading, above that before saving, and above
that before comparing what was saved; the model's size, its largest tensor, and in float32 its largest group of tensors
that are saved together, and all outside its layers. Pages of mapped files are the machine's, not the rank's (RssAnon
leaves them out).
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.forked_processes import run

LIMIT = 900.0
"""Seconds that the ranks may take: a slow machine reads and writes a billion weights at 10 MB/s."""


def memory_of_ranks(
    model: Path, place: Path, num_ranks: int, dtype: str = "float32", *, is_narrow: bool = False
) -> list[dict[str, int]]:
    """What each rank wrote. ``is_narrow``: the weights themselves are in ``dtype``, not in float32."""
    words = (Path(__file__), model, place, dtype, "narrow" if is_narrow else "wide")
    done = run(*words, num_ranks=num_ranks, seconds=LIMIT)
    assert done.returncode == 0, done.stderr
    return [json.loads((place / str(rank)).read_text()) for rank in range(num_ranks)]


def save_random_llama(directory: Path, **sizes: int) -> Path:
    """A model in bfloat16 whose tensors of one shape are one tensor: making it takes as long as writing it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from taut.models import weight_files

    with torch.device("meta"):
        skeleton = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).bfloat16()
    shapes = {tensor.shape for tensor in skeleton.state_dict().values()}
    contents = {shape: 0.02 * torch.randn(shape, dtype=torch.bfloat16) for shape in shapes}
    names = dict(skeleton.named_parameters())
    weight_files.save(skeleton, ({name: contents[p.shape]} for name, p in names.items()), directory)
    return directory


@contextmanager
def most_above_before() -> Iterator[list[int]]:
    """Afterwards the one number in the list is the most memory above the level before the block."""
    before, seen, is_over, found = held(), [0], threading.Event(), list[int]()

    def look() -> None:
        while not is_over.wait(0.001):
            seen.append(held() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        found.append(max(seen))


def held() -> int:
    """The bytes of memory that are this process's own."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def main(path: str, folder: str, dtype_name: str, kind: str) -> None:
    import torch

    from taut.evals.round_trip import Room, Trained, compare_saved, every_token, load_anew, score
    from taut.models import architecture, weight_files
    from taut.models.load import load_model, quiet_library
    from taut.models.lora.merge import plain_groups, plain_skeleton
    from taut.models.scorer import Scorer
    from taut.train import distributed

    dtype = getattr(torch, dtype_name)
    ranks = distributed.start("cpu")
    with most_above_before() as reading:
        model = load_model(
            path,
            dtype=dtype,
            device=ranks.device,
            attention="taut_reference",
            is_narrow=kind == "narrow",
            shard=distributed.layer_sharding(ranks, dtype),
        )
        sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
        scorer = Scorer(model)
        distributed.shard(scorer, ranks, dtype)
    skeleton = plain_skeleton(model).to(torch.bfloat16)
    groups = [
        4 * sum(p.numel() for name, p in model.named_parameters() if _group(name) == group)
        for group in {_group(name) for name in sizes}
    ]
    ranks.barrier()
    with (
        most_above_before() as saving,
        quiet_library(),
        distributed.whole_tensors(model, ranks) as whole,
    ):
        if whole is not None:
            weight_files.save(skeleton, plain_groups(model, whole), Path(folder) / "saved")
    samples = [every_token("a", list(range(3, 40))), every_token("b", [5, 7, 5, 9])]
    logps = score(scorer, samples)
    ranks.barrier()
    with most_above_before() as comparing, distributed.whole_tensors(model, ranks) as whole:
        if whole is not None:
            room = Room(torch.device("cpu"), is_streamed=True)
            trained = Trained(model, whole, samples, logps, torch.bfloat16)
            result = compare_saved(trained, load_anew(f"{folder}/saved", room))
            assert all(comparison.is_sound for comparison in result), result
    inside = sum(p.numel() for p in architecture.layers(model).parameters())
    found = {
        "reading": reading[0],
        "saving": saving[0],
        "comparing": comparing[0],
        "outside": 4 * (architecture.num_weights(model) - inside),
        "all": sum(sizes.values()),
        "largest": max(sizes.values()),
        "group": max(groups),
    }
    Path(folder, str(ranks.rank)).write_text(json.dumps(found))
    distributed.stop(ranks)


def _group(name: str) -> str:
    before, layers, after = name.partition(".layers.")
    return f"{before}{layers}{after.partition('.')[0]}" if layers else name


if __name__ == "__main__":
    main(*sys.argv[1:])
