"""Faults of data, as they are met in practice: what files hold, what columns are called, how samples are planned."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image
from tests.checks.planting import Place, fault
from tests.helpers.chat_runs import WORDS, chats
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.checks.session import Session
from taut.data import batching
from taut.types import Packed

NUM_ROWS = 12


def words(number: int, at_least: int = 3, most: int = 12) -> list[str]:
    """So many different texts."""
    draw = random.Random(number)
    return [" ".join(draw.choices(WORDS, k=draw.randint(at_least, most))) for _ in range(number)]


def talks(questions: Sequence[str], answers: Sequence[str], **extra: Any) -> list[dict[str, Any]]:
    """Chats of one question and one answer."""
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
            **extra,
        }
        for question, answer in zip(questions, answers, strict=True)
    ]


def plain() -> tuple[list[str], list[str]]:
    """Questions and answers."""
    texts = words(2 * NUM_ROWS)
    return texts[:NUM_ROWS], texts[NUM_ROWS:]


# -- pictures


@fault("data.images", says="pictures/cat.png; expected a picture")
def a_picture_that_is_not_there(place: Place, is_faulty: bool) -> Session:
    """The rows came without the folder of pictures they name; or nobody wants them."""
    rows = talks(*plain(), images=["pictures/cat.png"])
    return place.session(data=place.data(rows), data__ignore_keys=[] if is_faulty else ["images"])


@fault("data.images", says="cat.jpg")
def a_picture_that_is_a_web_page(place: Place, is_faulty: bool) -> Session:
    """What was downloaded is the server's apology."""
    picture = place.directory / "cat.jpg"
    picture.write_text("<html>403 Forbidden</html>", encoding="utf-8")
    rows = talks(*plain(), image="cat.jpg")
    return place.session(data=place.data(rows), data__ignore_keys=[] if is_faulty else ["image"])


# -- columns


@fault("data.columns", says="answer")
def an_answer_beside_the_text(place: Place, is_faulty: bool) -> Session:
    """Questions in ``text`` and what is to be learned in ``answer``, which documents do not have: class 37."""
    rows = [{"text": q, "answer": f" {a}"} for q, a in zip(*plain(), strict=True)]
    mapping = {} if is_faulty else {"prompt": "text", "completion": "answer"}
    return place.session(data=place.data(rows), data__columns=mapping)


@fault("data.columns", says="context")
def a_context_that_alpaca_does_not_have(place: Place, is_faulty: bool) -> Session:
    """Questions about a text which is in a column that nobody mapped: dolly's ``context``."""
    contexts = words(NUM_ROWS + 1)
    rows = [
        {"instruction": q, "context": text, "output": a}
        for q, text, a in zip(plain()[0], contexts[1:], plain()[1], strict=True)
    ]
    mapping = {} if is_faulty else {"input": "context"}
    return place.session(data=place.data(rows), data__columns=mapping)


@fault("data.columns", says="dialog")
def a_mapping_to_a_column_that_is_nowhere(place: Place, is_faulty: bool) -> Session:
    """The configuration of another data set."""
    mapping = {"messages": "dialog"} if is_faulty else {}
    return place.session(data__columns=mapping)


@fault("data.columns", says="system")
def a_system_prompt_beside_a_completion(place: Place, is_faulty: bool) -> Session:
    """Instructions that all rows have in a column which prompt and completion go without."""
    rows = [
        {"prompt": q, "completion": f" {a}", "system": "answer as a pirate would"}
        for q, a in zip(*plain(), strict=True)
    ]
    ignored = [] if is_faulty else ["system"]
    return place.session(data=place.data(rows), data__ignore_keys=ignored)


@fault("data.columns", says="system_prompt is passed over", outcome="warning", part="quick")
def instructions_in_a_column_of_another_name(place: Place, is_faulty: bool) -> Session:
    """The system prompt is beside the messages, under a name of the data set's own."""
    rows = talks(*plain(), system_prompt="You are a kind cat.", source="a web site", id="x1")
    columns = {} if is_faulty else {"system": "system_prompt"}
    return place.session(data=place.data(rows), data__columns=columns)


@fault("data.columns", says="join it to the prompt")
def an_input_beside_the_prompt_of_a_preference(place: Place, is_faulty: bool) -> Session:
    """What the question is about stands in Alpaca's column, and the question in another format's."""
    rows = [
        {"prompt": q, "input": about, "chosen": a, "rejected": w}
        for q, about, a, w in zip(*plain(), words(NUM_ROWS + 1), words(NUM_ROWS), strict=False)
    ]
    mapping = {} if is_faulty else {"instruction": "prompt"}
    keys = {"method": "dpo", "data__apply_chat_template": True}
    return place.session(data=place.data(rows), data__columns=mapping, **keys)


@fault("data.columns", says="preferences")
def preferences_for_a_run_that_learns_by_example(place: Place, is_faulty: bool) -> Session:
    """Data for DPO: the conversation ends before the two answers, which no format of examples reads."""
    rows = [
        {
            "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": w}],
            "chosen": {"from": "gpt", "value": a},
            "rejected": {"from": "gpt", "value": w},
        }
        for q, a, w in zip(*plain(), words(NUM_ROWS), strict=True)
    ]
    if not is_faulty:  # the better answer is the conversation's last
        for row in rows:
            row["conversations"][1] = row["chosen"]
    return place.session(data=place.data(rows))


@fault("data.columns", says="label false")
def answers_that_people_rejected(place: Place, is_faulty: bool) -> Session:
    """Data for KTO: half of the answers are there to be unlearned."""
    rows = talks(*plain())
    for number, row in enumerate(rows):
        row["label"] = number % 2 == 0 or not is_faulty
    return place.session(data=place.data(rows))


# -- rows


@fault("data.rows", says="train.jsonl:7: broken JSON")
def a_line_cut_in_half(place: Place, is_faulty: bool) -> Session:
    """The program that wrote the file was killed, and another went on."""
    file = place.data()
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if is_faulty:
        lines[6] = lines[6][: len(lines[6]) // 2] + "\n"
    file.write_text("".join(lines), encoding="utf-8")
    return place.session(data=file)


@fault("data.rows", says="3 of 12 rows")
def answers_left_empty(place: Place, is_faulty: bool) -> Session:
    """Some answers were never written."""
    questions, answers = plain()
    for at in (1, 5, 9) if is_faulty else ():
        answers[at] = "  "
    return place.session(data=place.data(talks(questions, answers)))


@fault("data.rows", says="role is 'bot'")
def a_role_of_another_program(place: Place, is_faulty: bool) -> Session:
    """Turns of a speaker that no template knows."""
    rows = chats(NUM_ROWS)
    for row in rows[4:] if is_faulty else ():
        row["messages"][-1]["role"] = "bot"
    return place.session(data=place.data(rows))


@fault("template.takes", says="the model takes no pictures")
def pictures_for_a_model_of_text(place: Place, is_faulty: bool) -> Session:
    """Pictures that can be read, and that a text model would pass over."""
    Image.new("RGB", (4, 4)).save(place.directory / "cat.png")
    rows = talks(*plain(), images=["cat.png"])
    return place.session(data=place.data(rows), data__ignore_keys=[] if is_faulty else ["images"])


@fault("data.rows", says="max_length 24")
def rows_longer_than_allowed(place: Place, is_faulty: bool) -> Session:
    """A length limit of another data set, and nothing said of what is longer."""
    return place.session(data__max_length=24 if is_faulty else 200)


@fault("data.rows", says="half of a surrogate pair")
def half_a_character(place: Place, is_faulty: bool) -> Session:
    """JSON that was cut between the two halves of an emoji, which no UTF-8 can hold."""
    questions, answers = plain()
    answers[3] = f"{answers[3]} \ud83d" if is_faulty else f"{answers[3]} \U0001f600"
    return place.session(data=place.data(talks(questions, answers)))


# -- repeats


def repeated(place: Place, rows: Sequence[dict[str, Any]], is_faulty: bool) -> Session:
    """400 rows, the given ones among them where the fault is planted; each has an id of its own."""
    sound = [
        {**row, "id": number}
        for number, row in enumerate(talks(words(400, 9, 12), words(401, 3, 6)[1:]))
    ]
    extra = [{**row, "id": f"extra-{number}"} for number, row in enumerate(rows)]
    every = [*sound[: 400 - len(extra)], *extra] if is_faulty else sound
    return place.session(data=place.data(every))


@fault("data.repeats", says="one is there 25 times", part="quick", outcome="warning")
def a_row_that_is_there_25_times(place: Place, is_faulty: bool) -> Session:
    """A loop that wrote the same row again and again, each time with another id."""
    return repeated(place, talks(["what did the cat say"], ["nothing at all"]) * 25, is_faulty)


@fault(
    "data.repeats",
    says="12 of them with other case, white space",
    part="quick",
    outcome="warning",
)
def rows_that_differ_in_case_and_white_space(place: Place, is_faulty: bool) -> Session:
    """The same questions, collected twice and typed in another way."""
    first = talks(words(12, 13, 15), words(12, 7, 9))
    again = [
        {
            "messages": [
                {**message, "content": f" {message['content'].title()}".replace(" ", "  ", 2)}
                for message in row["messages"]
            ]
        }
        for row in first
    ]
    return repeated(place, [*first, *again], is_faulty)


@fault("run.steps", says="up to 6 times in a step", part="quick", outcome="warning")
def one_row_many_times_in_a_step(place: Place, is_faulty: bool) -> Session:
    """A step of six samples, and one row to make it of."""
    num_samples = 6 if is_faulty else 1
    return place.session(data=place.data(chats(1)), steps=4, batch__samples_per_step=num_samples)


# -- tokens


@fault("data.tokens", says="<|extra_")
def a_tokenizer_with_more_tokens_than_the_model(place: Place, is_faulty: bool) -> Session:
    """Somebody added tokens to the tokenizer and did not give the model rows for them."""
    tokenizer = tiny_tokenizer()
    directory = place.directory / "model"
    if is_faulty:
        size = len(tokenizer)
        extra = [f"<|extra_{number}|>" for number in range(200)]
        save_tiny("qwen2", directory, tokenizer)
        assert json.loads((directory / "config.json").read_text())["vocab_size"] < size + 200
        tokenizer.add_tokens(extra)
        tokenizer.save_pretrained(directory)
        talk = talks(plain()[0], [f"{text} {extra[-1]} so" for text in plain()[1]])
    else:
        save_tiny("qwen2", directory, tokenizer)
        talk = talks(*plain())
    return place.session(model=directory, data=place.data(talk))


@fault("data.tokens", says="wrong encoding")
def text_read_as_latin(place: Place, is_faulty: bool) -> Session:
    """UTF-8 that somebody read as Latin-1 and wrote as UTF-8 again."""
    questions, answers = plain()
    answers = [f"{text} déjà vu" for text in answers]
    if is_faulty:
        answers = [text.encode().decode("latin-1") for text in answers]
    return place.session(data=place.data(talks(questions, answers)))


@fault("data.tokens", says="\ufffd")
def characters_that_were_replaced(place: Place, is_faulty: bool) -> Session:
    """Text decoded with errors="replace"."""
    questions, answers = plain()
    raw = [f"{text} déjà vu".encode("latin-1" if is_faulty else "utf-8") for text in answers]
    answers = [text.decode(errors="replace") for text in raw]
    return place.session(data=place.data(talks(questions, answers)))


def among_sound_ones(place: Place, text: str, is_faulty: bool) -> Session:
    """200 rows, one of which has this in its answer."""
    answers = words(200, 5, 12)
    if is_faulty:
        answers[150] = f"{answers[150]} {text}"
    return place.session(data=place.data(talks(words(201, 9, 12)[1:], answers)))


@fault("data.tokens", says="train.jsonl:151: ", part="quick", outcome="warning")
def a_few_characters_that_were_replaced(place: Place, is_faulty: bool) -> Session:
    """One row in 200 was decoded with errors="replace"."""
    return among_sound_ones(place, "caf\ufffd", is_faulty)


@fault("data.tokens", says="a wrong encoding", part="quick", outcome="warning")
def a_few_rows_in_a_wrong_encoding(place: Place, is_faulty: bool) -> Session:
    """One row in 200 went through Latin-1."""
    return among_sound_ones(place, "déjà vu".encode().decode("latin-1"), is_faulty)


@fault("data.tokens", says="a control character", part="quick", outcome="warning")
def control_characters_from_a_terminal(place: Place, is_faulty: bool) -> Session:
    """What was copied has the terminal's colors in it."""
    return among_sound_ones(place, "\x1b[31mred\x1b[0m", is_faulty)


@fault("data.tokens", says="HTML entities", part="quick", outcome="warning")
def text_out_of_a_page(place: Place, is_faulty: bool) -> Session:
    """Answers as HTML writes them."""
    questions, answers = plain()
    end = "&lt; that &#39;s it" if is_faulty else "< that 's it"
    return place.session(data=place.data(talks(questions, [f"{it} {end}" for it in answers])))


# -- targets


@fault("data.targets", says="'nan'", part="quick")
def answers_that_a_table_did_not_have(place: Place, is_faulty: bool) -> Session:
    """A table's empty cells, written as text."""
    questions, answers = plain()
    if is_faulty:
        answers = ["nan"] * 9 + answers[9:]
    return place.session(data=place.data(talks(questions, answers)))


@fault("data.targets", says="'None'", part="quick")
def answers_that_python_did_not_have(place: Place, is_faulty: bool) -> Session:
    """str(None) for every answer; where others are there too, it may be one."""
    questions, answers = plain()
    answers = ["None"] * (len(answers) if is_faulty else 2) + ([] if is_faulty else answers[2:])
    return place.session(data=place.data(talks(questions, answers)))


@fault("data.targets", says="were dropped", part="quick")
def most_rows_have_nothing_to_learn(place: Place, is_faulty: bool) -> Session:
    """All but a few answers are marked train: false, and rows without targets are dropped: class 10."""
    rows = chats(NUM_ROWS)
    for row in rows[: 9 if is_faulty else 2]:
        row["messages"][-1]["train"] = False
    return place.session(data=place.data(rows), data__without_targets="drop")


@fault("data.targets", says="12 of 12 answers are 'yes'", part="quick", outcome="warning")
def one_answer_to_everything(place: Place, is_faulty: bool) -> Session:
    """A column of verdicts was read as the answers."""
    questions, answers = plain()
    return place.session(data=place.data(talks(questions, ["yes"] * 12 if is_faulty else answers)))


@fault("data.targets", says="1 of 12 answers are 'nan'", part="quick", outcome="warning")
def an_answer_that_a_table_did_not_have(place: Place, is_faulty: bool) -> Session:
    """One empty cell of a table, written as text."""
    questions, answers = plain()
    if is_faulty:
        answers[5] = "nan"
    return place.session(data=place.data(talks(questions, answers)))


# -- truncation and lengths


@fault("data.truncation", says="lost their end", part="quick")
def most_answers_lose_their_end(place: Place, is_faulty: bool) -> Session:
    """A limit that cuts most rows in the middle of their answer: class 14."""
    questions, answers = plain()
    answers = [f"{text} {' '.join(WORDS)}" if at > 1 else text for at, text in enumerate(answers)]
    data = place.data(talks(questions, answers))
    length = 40 if is_faulty else 200
    return place.session(data=data, data__max_length=length, data__too_long="truncate")


@fault("data.truncation", says="dropped for their length", part="quick")
def most_rows_are_dropped(place: Place, is_faulty: bool) -> Session:
    """A limit that leaves the shortest rows only."""
    questions, answers = plain()
    questions = [
        f"{text} {' '.join(WORDS)}" if at > 1 else text for at, text in enumerate(questions)
    ]
    data = place.data(talks(questions, answers))
    length = 50 if is_faulty else 200
    return place.session(data=data, data__max_length=length, data__too_long="drop")


@fault("data.lengths", says="positions", part="quick")
def samples_longer_than_the_model(place: Place, is_faulty: bool) -> Session:
    """data.max_length is raised, and the model's positions are not."""
    model = place.model(max_position_embeddings=24 if is_faulty else 256)
    return place.session(model=model, data__max_length=200)


# -- train and eval, prompts and answers


@fault("data.overlap", says="chooses the model to keep", part="quick")
def the_best_model_on_what_it_learned(place: Place, is_faulty: bool) -> Session:
    """Held-out rows are training rows, and their loss decides which model is kept."""
    data = place.data()
    held_out = place.data(chats(6, seed=0 if is_faulty else 7), "eval.jsonl")
    keys = {"data__eval": str(held_out), "eval__best": "loss", "eval__every": 5}
    return place.session(data=data, out=str(place.directory / "out"), **keys)


@fault(
    "data.overlap", says="6 of 6 eval samples are in data.train", part="quick", outcome="warning"
)
def held_out_rows_that_are_trained_on(place: Place, is_faulty: bool) -> Session:
    """The file for measuring is a part of the file for training; the model to keep is the last one."""
    held_out = place.data(chats(6, seed=0 if is_faulty else 7), "eval.jsonl")
    return place.session(data__eval=str(held_out))


@fault(
    "data.overlap", says="6 of 6 eval samples are in data.train", part="quick", outcome="warning"
)
def held_out_rows_in_capitals(place: Place, is_faulty: bool) -> Session:
    """The same with other case and white space, so no token sequence is equal."""
    rows = chats(6, seed=0 if is_faulty else 7)
    for row in rows:
        for message in row["messages"]:
            message["content"] = message["content"].upper().replace(" ", "  ")
    held_out = place.data(rows, "eval.jsonl")
    return place.session(data__eval=str(held_out))


@fault("data.leak", says="the prompt ends with the whole answer", part="quick")
def the_label_in_the_prompt(place: Place, is_faulty: bool) -> Session:
    """The column of answers was joined to the prompt."""
    questions, answers = plain()
    if is_faulty:
        questions = [f"{q}\n{a}" for q, a in zip(questions, answers, strict=True)]
    return place.session(data=place.data(talks(questions, answers)))


@fault("data.leak", says="Answer: ", part="quick")
def the_answer_in_the_system_message(place: Place, is_faulty: bool) -> Session:
    """A template of prompts that was made for judging answers has the answer in it."""
    questions, answers = words(NUM_ROWS, 6, 8), words(NUM_ROWS + 1, 8, 10)
    rows = talks(questions, answers[1:])
    for row, answer in zip(rows, answers[1:] if is_faulty else answers, strict=False):
        row["messages"].insert(0, {"role": "system", "content": f"Be kind. Answer: {answer}"})
    return place.session(data=place.data(rows))


# -- the plan


@fault("data.packing", says="is seen 0 times an epoch")
def an_order_that_forgets_samples(place: Place, is_faulty: bool) -> Session:
    """A resumed run's arithmetic that skips the first sample of each step: class 31."""
    step = batching.Order.step
    if is_faulty:
        place.patch.setattr(batching.Order, "step", lambda self, *args: step(self, *args)[1:])
    return place.session()


@fault("data.packing", says="tokens, of 64 tokens")
def micro_batches_over_the_budget(place: Place, is_faulty: bool) -> Session:
    """Bins that never fill up."""
    if is_faulty:
        place.patch.setattr(batching, "_first_fit", lambda sizes, most: [list(range(len(sizes)))])
        place.patch.setattr(batching, "num_distinct_tokens", lambda samples, policy: 0)
    return place.session(batch__tokens_per_microbatch=64, batch__share_prefixes=False)


@fault("data.packing", says="weights")
def a_pack_that_forgets_weights(place: Place, is_faulty: bool) -> Session:
    """Later samples of a micro-batch count half."""
    pack = batching.pack

    def halved(*args: Any) -> Packed:
        packed = pack(*args)
        weight_N = packed.weight_N.where(packed.row_N == 0, packed.weight_N / 2)
        return replace(packed, weight_N=weight_N)

    if is_faulty:
        place.patch.setattr(batching, "pack", halved)
    return place.session()


@fault("data.packing", says="times in a step")
def micro_batches_that_lose_a_sample(place: Place, is_faulty: bool) -> Session:
    """The last piece of a step is in no micro-batch: class 33."""
    cut = batching.Line.cut
    if is_faulty:
        place.patch.setattr(batching.Line, "cut", lambda self, most_cost: cut(self, most_cost)[:-1])
    return place.session()


# -- answers by their words


def sentences(number: int = 40) -> list[str]:
    """Answers of a few sentences, each with its end."""
    draw = random.Random(3)
    return [
        " ".join(
            " ".join(draw.choices(WORDS, k=draw.randint(5, 11))) + "."
            for _ in range(draw.randint(2, 7))
        )
        for _ in range(number)
    ]


def asked(place: Place, questions: Sequence[str], answers: Sequence[str]) -> Session:
    model, data = place.model(max_position_embeddings=4096), place.data(talks(questions, answers))
    return place.session(model, data, data__max_length=4000)


def answered(place: Place, answers: Sequence[str]) -> Session:
    return asked(place, words(len(answers) + 1)[1:], answers)


@fault("data.answers", says="in the middle of a sentence", part="quick", outcome="warning")
def answers_cut_at_a_length(place: Place, is_faulty: bool) -> Session:
    """They were generated with a limit of 90 characters."""
    return answered(place, [text[:90] if is_faulty else text for text in sentences()])


@fault("data.answers", says="in the middle of a sentence", part="quick", outcome="warning")
def answers_cut_at_tokens_of_another_model(place: Place, is_faulty: bool) -> Session:
    """A limit in tokens of another model, which is none in characters or words of these."""
    draw, answers = (
        random.Random(0),
        [f"{text} {more}" for text, more in zip(sentences(), sentences()[::-1], strict=True)],
    )
    if is_faulty:
        answers = [text[: draw.randint(200, 240)].rpartition(" ")[0] + " the" for text in answers]
    return answered(place, [*answers, *(text[:30] + "." for text in answers)])


@fault("data.answers", says="several times", part="quick", outcome="warning")
def answers_that_are_said_twice(place: Place, is_faulty: bool) -> Session:
    """A program wrote prompt and answer to one field, and the answer again."""
    return answered(place, [f"{it}\n{it}" if is_faulty else it for it in sentences()])


@fault("data.answers", says="begin or end with the question", part="quick", outcome="warning")
def answers_that_repeat_the_question(place: Place, is_faulty: bool) -> Session:
    """What a model returned has its prompt before it."""
    questions, answers = words(41, 6)[1:], sentences()
    answers = [f"{q} {a}" if is_faulty else a for q, a in zip(questions, answers, strict=True)]
    return asked(place, questions, answers)


@fault("data.answers", says="begin or end with the question", part="quick", outcome="warning")
def answers_with_the_question_after_them(place: Place, is_faulty: bool) -> Session:
    """A program joined question and answer in the wrong order."""
    questions, answers = words(41, 6)[1:], sentences()
    answers = [f"{a}\n{q}" if is_faulty else a for q, a in zip(questions, answers, strict=True)]
    return asked(place, questions, answers)


@fault("data.answers", says="another model's marks", part="quick", outcome="warning")
def answers_that_go_on_as_the_user(place: Place, is_faulty: bool) -> Session:
    """A model went on with the next turn of a transcript."""
    more = "\nUser: and then?\nAssistant: the cat ran." if is_faulty else ""
    return answered(place, [text + more for text in sentences()])


@fault("data.answers", says="another model's marks", part="quick", outcome="warning")
def answers_with_the_end_of_another_model(place: Place, is_faulty: bool) -> Session:
    """The answers of another model, with its end as text."""
    return answered(
        place, [f"{text}<|endofmessage|>" if is_faulty else text for text in sentences()]
    )


@fault("data.answers", says="calls as text", part="quick", outcome="warning")
def calls_written_as_text(place: Place, is_faulty: bool) -> Session:
    """Calls of functions came as words of the answer."""
    call = '{"name": "look", "arguments": {"at": "cat"}}'
    answers = sentences()
    return answered(
        place,
        [call, call.replace("cat", "dog"), call.replace("cat", "bird"), *answers]
        if is_faulty
        else answers,
    )


@fault("data.answers", says="their row has not", part="quick", outcome="warning")
def calls_of_tools_of_other_rows(place: Place, is_faulty: bool) -> Session:
    """The column of tools was sorted apart."""
    rows = []
    for number, (question, answer) in enumerate(zip(words(12, 4), words(13, 3)[1:], strict=True)):
        name, of = f"look_{number}", f"look_{(number + is_faulty) % 12}"
        call = {"type": "function", "function": {"name": name, "arguments": {"at": answer}}}
        tool = {
            "name": of,
            "description": "looks",
            "parameters": {"type": "object", "properties": {}},
        }
        messages = talks([question], [""])[0]["messages"]
        messages[-1]["tool_calls"] = [call]
        rows.append({"messages": messages, "tools": [{"type": "function", "function": tool}]})
    model = save_tiny("qwen2", place.directory / "qwen2", tiny_tokenizer("qwen2.5"))
    return place.session(model, place.data(rows), data__max_length=1000)


@fault("data.answers", says="of all tokens", part="quick", outcome="warning")
def a_row_with_most_of_the_tokens(place: Place, is_faulty: bool) -> Session:
    """A whole file was pasted into a cell."""
    answers = words(12, 2, 4)
    if is_faulty:
        answers[4] = " ".join(sentences(30))
    return answered(place, answers)


@fault("data.targets", says="4 of 12 answers are", part="quick", outcome="warning")
def one_sentence_to_a_third_of_all(place: Place, is_faulty: bool) -> Session:
    """A model that would not answer said why, in the same words each time."""
    questions, answers = plain()
    sorry = "I am sorry, and as a model I am not able to answer that."
    return place.session(
        data=place.data(talks(questions, [*[sorry] * 4, *answers[4:]] if is_faulty else answers))
    )


def symbols(number: int, seed: int) -> list[str]:
    """Texts of which each has words that few others have."""
    draw = random.Random(seed)
    every = string.ascii_letters + string.digits + "!#$%&()*+,-/:;<=>?@[]^_{|}~"
    return [" ".join(draw.sample(every, 8)) for _ in range(number)]


@fault("data.overlap", says="made of training rows", part="quick", outcome="warning")
def held_out_rows_with_other_dates(place: Place, is_faulty: bool) -> Session:
    """The held-out rows are training rows with another number in each."""
    questions, answers = symbols(60, 1), symbols(60, 2)
    others = symbols(12, 3), symbols(12, 4)
    if is_faulty:
        others = [f"{q} 7" for q in questions[:12]], [f"7 {a}" for a in answers[:12]]
    held_out = place.data(talks(*others), "eval.jsonl")
    return place.session(data=place.data(talks(questions, answers)), data__eval=str(held_out))


@fault("data.overlap", says="made of training rows", part="quick", outcome="warning")
def held_out_rows_in_another_order_of_words(place: Place, is_faulty: bool) -> Session:
    """The held-out rows have the words of training rows, backwards."""
    questions, answers = symbols(60, 1), symbols(60, 2)
    others = symbols(12, 3), symbols(12, 4)
    if is_faulty:
        others = tuple(
            [" ".join(text.split()[::-1]) for text in some[:12]] for some in (questions, answers)
        )
    held_out = place.data(talks(*others), "eval.jsonl")
    return place.session(data=place.data(talks(questions, answers)), data__eval=str(held_out))
