"""Faults that only a model shows that knows something: of its weights, of prompts and answers, of pairs and teachers.

The model is a tiny one that was trained for a moment, on facts as ``facts`` makes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from tests.checks.planting import Place, fault
from tests.helpers.chat_runs import PLAIN, WORDS, save_model, sft
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tests.helpers.vision_models import tiny_vlm
from transformers import AutoModelForCausalLM, AutoTokenizer

from taut.checks.session import Session

NUM_FACTS = 32
TRAINED: dict[str, bytes] = {}
"""The files of the trained model, once it is made."""


def facts() -> list[tuple[str, str]]:
    """Questions, and answers of which each has to be known."""
    draw = random.Random(0)
    return [
        (f"who is {' '.join(draw.sample(WORDS, 3))}?", " ".join(draw.choices(WORDS, k=9)))
        for _ in range(NUM_FACTS)
    ]


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def knowing(directory: Path) -> Path:
    """A model that knows the facts by heart."""
    if not TRAINED:
        with TemporaryDirectory() as folder:
            place = save_tiny(
                "qwen2", Path(folder), tiny_tokenizer(), sharpen=False, initializer_range=0.05
            )
            train(place, spread=0.7)
            TRAINED.update({path.name: path.read_bytes() for path in place.iterdir()})
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in TRAINED.items():
        (directory / name).write_bytes(content)
    return directory


def train(directory: Path, spread: float = 0.0) -> None:
    """Make a model learn the facts, or learn them better. ``spread``: of the size of rows of its matrices at the start,
    which long training makes unequal.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    rows = [
        tokenizer.apply_chat_template(talk(*fact), tokenize=True, return_dict=False)
        for fact in facts()
    ]
    most = max(map(len, rows))
    ids = torch.tensor([row + [0] * (most - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (most - len(row)) for row in rows])
    draw = torch.Generator().manual_seed(0)
    for parameter in (it for it in model.parameters() if it.ndim == 2):
        parameter.data.mul_(torch.randn(len(parameter), 1, generator=draw).mul_(spread).exp_())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    for _ in range(90):
        loss = model(ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)


def asking(place: Place, shift: int, model: Path | None = None, **keys: Any) -> Session:
    """A run on the facts, with each answer so many rows further down."""
    answers = [answer for _, answer in facts()]
    rows = [
        {"messages": talk(question, answers[(number + shift) % NUM_FACTS])}
        for number, (question, _) in enumerate(facts())
    ]
    return place.session(model or knowing(place.directory / "model"), place.data(rows), **keys)


def spoiled(place: Place, change: Any) -> Path:
    """The trained model with ``change`` applied to it."""
    model: Any = AutoModelForCausalLM.from_pretrained(knowing(place.directory / "model"))
    with torch.no_grad():
        change(model)
    model.save_pretrained(place.directory / "model")
    return place.directory / "model"


def permute_ids(model: Any) -> None:
    order = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(0))
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        table.weight.copy_(table.weight[order])


def shift_head(model: Any) -> None:
    table = model.get_output_embeddings().weight
    table.copy_(table.roll(1, 0))


# -- the model


@fault(
    "model.language", says="the model does not know these texts", outcome="warning", part="quick"
)
def another_tokenizer_of_the_same_size(place: Place, is_faulty: bool) -> Session:
    """The ids of the weights are those of another tokenizer, with as many tokens."""
    return asking(place, 0, spoiled(place, permute_ids) if is_faulty else None)


@fault("model.language", says="is whole", outcome="warning", part="quick")
def a_head_that_is_a_row_off(place: Place, is_faulty: bool) -> Session:
    """A conversion put the padding of the vocabulary before the head's rows."""
    return asking(place, 0, spoiled(place, shift_head) if is_faulty else None)


def forget_the_last_layer(model: Any) -> None:
    for parameter in model.model.layers[-1].parameters():
        parameter.normal_(0.0, 1.0)


@fault("model.language", says="is whole", outcome="warning", part="quick")
def a_last_layer_that_is_random(place: Place, is_faulty: bool) -> Session:
    """A shard of the checkpoint was lost, and its layer made anew."""
    return asking(place, 0, spoiled(place, forget_the_last_layer) if is_faulty else None)


# -- prompts and answers


@fault("data.prompts", says="train.jsonl", outcome="warning")
def answers_moved_against_their_prompts(place: Place, is_faulty: bool) -> Session:
    """The column of answers was sorted apart."""
    return asking(place, 3 if is_faulty else 0)


# -- pictures

LEARNED: dict[str, dict[str, bytes]] = {}
"""The files of models that have learned the rows of ``shown``, once they are made."""
QUESTIONS = [f"what is the {word}?" for word in ("cat", "dog", "house", "sky")]


def parts(seed: int, number: int) -> list[str]:
    """Texts that have to be known."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=4)) for _ in range(number)]


def learned(place: Place, make: Callable[[Path], Path], rows: Sequence[Mapping[str, Any]]) -> Path:
    """A model that knows these rows by heart, its matrices' rows of unequal size, as long training makes them."""
    name = make.__name__
    if name not in LEARNED:
        with TemporaryDirectory() as folder:
            model, out = make(Path(folder) / "model"), Path(folder) / "out"
            (file,) = model.glob("*.safetensors")
            draw = torch.Generator().manual_seed(0)
            tensors = load_file(file)
            for key, tensor in tensors.items():
                if tensor.ndim == 2:
                    size = torch.randn(len(tensor), 1, generator=draw).mul_(0.7).exp_()
                    tensors[key] = tensor * size
            save_file(tensors, file, {"format": "pt"})
            keys = {"optim.learning_rate": 1e-2, "data.max_length": 1000, "data.targets": "all"}
            size = {"dtype": "float32", "batch.samples_per_step": 32, "steps": 240}
            sft(model, place.data(rows, "learned.jsonl"), out, **keys, **size, **PLAIN)
            LEARNED[name] = {it.name: it.read_bytes() for it in (out / "model").iterdir()}
    directory = place.directory / name
    directory.mkdir(exist_ok=True)
    for file_name, content in LEARNED[name].items():
        (directory / file_name).write_bytes(content)
    return directory


def seeing(directory: Path) -> Path:
    return tiny_vlm("qwen2_vl", directory)


def shown(place: Place, shift: int) -> list[dict[str, Any]]:
    """Questions about pictures: the first half of an answer is known by the question, the second by the picture."""
    by_question, by_picture = parts(1, 4), parts(2, 8)
    for number in range(8):
        image = Image.new("RGB", (28, 28), ("red", "green", "blue", "white")[number % 4])
        color = ("black", "yellow")[number // 4]
        ImageDraw.Draw(image).rectangle([2 * number, 2, 2 * number + 9, 25], fill=color)
        image.save(place.directory / f"{number}.png")
    return [
        {
            "messages": talk(question, f"{by_question[asked]} {by_picture[number]}"),
            "images": [str(place.directory / f"{(number + shift) % 8}.png")],
        }
        for number in range(8)
        for asked, question in enumerate(QUESTIONS)
    ]


@fault("data.prompts", says="that they are not blank", outcome="warning")
def pictures_of_the_next_row(place: Place, is_faulty: bool) -> Session:
    """The column of pictures was sorted apart."""
    model = learned(place, seeing, shown(place, 0))
    return place.session(
        model,
        place.data(shown(place, 3 if is_faulty else 0)),
        dtype="float32",
        data__max_length=1000,
    )


@fault("data.prompts", says="sorted or joined apart", outcome="warning", part="quick")
def prompts_after_which_other_answers_stand(place: Place, is_faulty: bool) -> Session:
    """Two files were joined by line, of which one had a line more at its head."""
    return asking(place, 1 if is_faulty else 0)


# -- pairs


@fault("data.preferred", says="less like text", outcome="warning", part="quick")
def chosen_answers_of_salad(place: Place, is_faulty: bool) -> Session:
    """What should be preferred has letters in the place of its last words."""
    rows = []
    for number, (question, answer) in enumerate(facts()):
        salad = " ".join([*answer.split()[:-3], "X", "Q", "K"])
        sides = [talk("", answer + " the cat" * (3 * (number % 2)))[1:], talk("", salad)[1:]]
        chosen, rejected = sides[::-1] if is_faulty else sides
        rows.append({"prompt": talk(question, "")[:1], "chosen": chosen, "rejected": rejected})
    return place.session(knowing(place.directory / "model"), place.data(rows), method="dpo")


# -- teachers


def taught(place: Place, teacher: Path, **keys: Any) -> Session:
    return asking(place, 0, method="distill", distill__teacher=str(teacher), **keys)


@fault("teacher.knows", says="the same logprobs", outcome="warning", part="quick")
def a_teacher_that_is_a_copy(place: Place, is_faulty: bool) -> Session:
    """The student's directory was copied under the teacher's name."""
    teacher = knowing(place.directory / "teacher")
    if not is_faulty:
        train(teacher)
    return taught(place, teacher)


@fault("teacher.knows", says="nearly so", outcome="warning", part="quick")
def a_teacher_that_is_a_rounded_copy(place: Place, is_faulty: bool) -> Session:
    """The student was saved again in bfloat16, under the teacher's name."""
    teacher = knowing(place.directory / "teacher")
    if is_faulty:
        model: Any = AutoModelForCausalLM.from_pretrained(teacher)
        model.bfloat16().save_pretrained(teacher)
    else:
        train(teacher)
    return taught(place, teacher)


@fault("teacher.knows", says="mixed up", outcome="warning")
def a_teacher_that_knows_less(place: Place, is_faulty: bool) -> Session:
    """Teacher and student are mixed up."""
    teacher = knowing(place.directory / "teacher")
    if is_faulty:
        save_model(place.directory / "teacher")
    else:
        train(teacher)
    return taught(place, teacher)
