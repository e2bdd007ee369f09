"""What the checks of data count, on data whose numbers are known, and that sound data raise no alarm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.checks.faults.data import plain, talks, words
from tests.checks.planting import Place
from tests.helpers.chat_runs import SENTENCE, chats, write_rows
from tests.helpers.tiny_tokenizers import CHATML

from taut.checks import CHECKS
from taut.checks import data as reading
from taut.checks import data_quality as quality
from taut.checks.data import Exchange
from taut.checks.examine import examine
from taut.checks.registry import Finding
from taut.checks.session import Session, Unavailable
from taut.data.rows.schema import Columns, recognize
from taut.data.store.shards import LengthCounts

NAMES = [name for name in CHECKS if name.startswith("data.")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def findings(session: Session) -> dict[str, Finding]:
    return {one.name: one.finding for one in examine(session, "full", NAMES).results}


def failures(session: Session) -> list[str]:
    return [f"{name}: {it}" for name, it in findings(session).items() if it.outcome == "failed"]


def test_one_step_is_a_step(place: Place) -> None:
    session = place.session(data=place.data(chats(3)), epochs=1, steps=None)
    (steps,) = examine(session, "full", ["run.steps"]).results
    assert (steps.finding.outcome, steps.finding.notes[0]) == (
        "warning",
        "1 step of 6 samples, the same when run again",
    )


class TestFlat:
    def test_all_samples_of_a_mixture_are_there_in_order(self, place: Place) -> None:
        paths = [place.data(chats(n, seed=n), f"{n}.jsonl") for n in (3, 5)]
        mixture = [{"path": str(paths[0])}, {"path": str(paths[1]), "weight": 2.0}]
        train = place.session(data__train=mixture).train
        look = reading.flat(train)
        assert look.ids_T.tolist() == [i for sample in train for i in sample.ids_T]
        expected = [np.isin(np.arange(s.num_tokens), s.target_at_N) for s in train]
        assert look.is_target_T.tolist() == np.concatenate(expected).tolist()
        assert not look.looked_at
        assert look.name(3) == train[3].id

    def test_a_bounded_look_is_spread_and_says_so(self, place: Place) -> None:
        train = place.session(data=place.data(chats(40))).train
        look = reading.flat(train, samples=5)
        assert look.index_S.tolist() == [0, 9, 19, 29, 39]
        assert look.looked_at == "; 5 of 40 samples looked at"
        for number, index in enumerate(look.index_S):
            start, stop = look.start_S[number : number + 2]
            assert look.ids_T[start:stop].tolist() == train[int(index)].ids_T.tolist()


class TestRows:
    def test_every_kind_of_error_is_counted_and_shown_once(self, place: Place) -> None:
        rows = chats(10)
        for at in (1, 4, 6):
            rows[at]["messages"][-1]["content"] = ""
        rows[8]["messages"][1]["role"] = "bot"
        file = place.data(rows)
        lines = file.read_text(encoding="utf-8").splitlines()
        file.write_text("\n".join([*lines, '{"messages": [', lines[0]]) + "\n", encoding="utf-8")
        found = findings(place.session(data=file))["data.rows"]
        assert (found.outcome, found.number, found.unit) == ("failed", 5, "of 12 rows")
        first, *rest = found.evidence
        assert "train.jsonl:2: messages[2].content is empty" in first
        assert first.endswith("(3 such rows)")
        assert any("train.jsonl:9" in line for line in rest)
        assert any("train.jsonl:11: broken JSON" in line for line in rest)

    def test_rows_without_targets_are_told_for_eval_too(self, place: Place) -> None:
        held_out = chats(4)
        held_out[2]["messages"].pop()
        file = place.data(held_out, "eval.jsonl")
        found = findings(place.session(data__eval=str(file)))["data.rows"]
        assert (found.number, found.unit) == (1, "of 16 rows")
        assert "eval.jsonl:3: the row has no targets" in found.evidence[0]
        assert "data.without_targets=drop" in found.evidence[0]

    def test_a_file_that_is_not_there(self, place: Place) -> None:
        found = findings(place.session(data=place.directory / "none.jsonl"))
        assert found["data.rows"].remedy == "check the path"
        assert {it.outcome for name, it in found.items() if name != "data.rows"} == {"skipped"}


class TestRepeats:
    def test_a_few_in_many_pass_with_examples(self, place: Place) -> None:
        rows = [*talks(words(300, 9, 12), words(300, 3, 6))]
        found = findings(place.session(data=place.data([*rows, rows[4], rows[7]])))["data.repeats"]
        assert found.outcome == "passed", found
        assert found.says == "train: 2 of 302 rows repeat another"
        assert found.notes[0].endswith("train.jsonl:5 is there twice, again in train.jsonl:301")

    def test_each_split_is_counted_by_itself(self, place: Place) -> None:
        held_out = place.data(chats(2, seed=9) * 2, "eval.jsonl")
        session = place.session(data=place.data(chats(6)), data__eval=str(held_out))
        found = findings(session)["data.repeats"]
        assert (found.outcome, found.number, found.unit) == ("warning", 2, "of 10 rows")
        assert found.says == "eval: 2 of 4 rows repeat another"

    def test_the_same_question_with_another_answer_or_picture_is_no_repeat(
        self, place: Place
    ) -> None:
        rows = talks(["why?"] * 20, words(20, 8, 12))
        assert findings(place.session(data=place.data(rows)))["data.repeats"].outcome == "passed"
        session = place.session(data=place.data([{"text": "a", "images": [str(n)]} for n in "123"]))
        assert reading.texts(session)["train"].normal_S.size == 3

    def test_documents_and_alpaca_are_looked_at_too(self, place: Place) -> None:
        for rows in (
            [{"text": SENTENCE}, {"text": SENTENCE.upper()}],
            [{"instruction": "say", "input": "so", "output": it} for it in ("So", "so ")],
        ):
            found = findings(place.session(data=place.data(rows)))["data.repeats"]
            assert found.says == (
                "train: 1 of 2 rows repeat another, 1 of them with other case, white space or punctuation"
            )

    def test_punctuation_counts_in_numbers_alone(self, place: Place) -> None:
        for first, again, number in (
            ("Is it so? Yes, it is.", "is it so yes it is", 1),
            ("1.5 and 2.5 are 4.0", "15 and 25 are 40", 0),
            ("at 10:30", "at 1030", 0),
        ):
            rows = [{"text": first}, {"text": again}, {"text": SENTENCE}]
            assert findings(place.session(data=place.data(rows)))["data.repeats"].number == number

    def test_a_look_at_a_part_says_so(self, place: Place) -> None:
        place.patch.setattr(reading, "TEXT_ROWS", 5)
        found = findings(place.session(data=place.data(chats(9) * 2)))["data.repeats"]
        assert found.says == "no row repeats another; the first 5 rows looked at"
        place.patch.setattr(reading, "TEXT_ROWS", 12)
        found = findings(place.session(data=place.data(chats(9) * 2)))["data.repeats"]
        assert found.says.endswith("3 of 12 rows repeat another; the first 12 rows looked at")


class TestBroken:
    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("caf\ufffd", "a character that could not be decoded"),
            ("cafÃ© au lait", "a wrong encoding"),
            ("it is 20 Â°C", "a wrong encoding"),
            ("Österreich".encode().decode("cp1252"), "a wrong encoding"),
            ("привет".encode().decode("cp1252"), "a wrong encoding"),
            ("donâ€™t", "a wrong encoding"),
            ("a\x00b", "a control character"),
            ("東京 \x9d", "a control character"),
            ("“AMANHÔ MANHÃ… привет, ÖÐ", None),
            ("naïve café, déjà vu, 東京 ÂÃ â € \u200d \ufeff", None),
            ("line\n\r\tline \x85", None),
        ],
    )
    def test_what_is_broken(self, text: str, what: str | None) -> None:
        found = reading.broken_in(["sound", text])
        assert (found and found[0]) == what


def test_all_that_is_planted_among_sound_rows_is_found(place: Place) -> None:
    """Of 300 rows one is there 25 times and 2% are broken; of 60 held-out rows 16 are near others of training."""
    questions, answers = words(600, 6, 14)[:300], words(600, 6, 14)[300:]
    bad = ["caf\ufffd", *(it.encode().decode("cp1252") for it in ("café", "Österreich", "привет"))]
    broken = [f"{text} {bad[number % 4]}" for number, text in enumerate(answers[:6])]
    train = talks(questions, [*broken, *answers[6:]])
    near = [
        *talks([text.upper() for text in questions[10:14]], answers[10:14]),
        *talks(questions[14:18], [text.replace(" ", "  ") for text in answers[14:18]]),
        *talks([text.title() for text in questions[18:22]], [it.upper() for it in answers[18:22]]),
        *talks([f"{text}?" for text in questions[22:26]], [f"{it}." for it in answers[22:26]]),
    ]
    held_out = place.data([*near, *talks(words(44, 6, 14), words(45, 6, 14)[:44])], "eval.jsonl")
    data = place.data([*train, *[train[30]] * 24])
    found = findings(place.session(data=data, data__eval=str(held_out)))
    named = ("data.tokens", "data.repeats", "data.overlap")
    assert {found[name].outcome for name in named} == {"warning"}
    assert found["data.tokens"].number == 6
    assert found["data.repeats"].says.startswith("train: 24 of 324 rows repeat another")
    assert found["data.repeats"].says.endswith("one is there 25 times")
    assert found["data.overlap"].says == "16 of 60 eval samples are in data.train"


class TestColumns:
    @pytest.mark.parametrize(
        ("row", "columns", "unread"),
        [
            ({"messages": [], "tools": [], "id": 3}, {}, {"id"}),
            ({"prompt": "a", "completion": "b", "tools": []}, {}, {"tools"}),
            ({"prompt": [], "completion": [], "tools": []}, {}, set()),
            ({"instruction": "a", "output": "b", "input": "", "text_id": 1}, {}, {"text_id"}),
            ({"text": "a", "url": "b", "n": None}, {"ignore_keys": ("url",)}, set()),
            ({"t": "a", "text": "b"}, {"mapping": {"text": "t"}}, set()),
        ],
    )
    def test_what_a_format_does_not_read(
        self, row: Mapping[str, Any], columns: Mapping[str, Any], unread: set[str]
    ) -> None:
        assert set(recognize(row, "here:1", Columns(**columns)).unread) == unread

    @pytest.mark.parametrize(
        "rows",
        [
            [{"text": SENTENCE, "label": 1}],
            [{"text": f"{SENTENCE} so", "answer": "so"}],
            [{"text": SENTENCE, "url": "http://somewhere", "timestamp": "2019"}],
            [{"prompt": f"{SENTENCE} why?", "completion": " so", "context": SENTENCE}],
            [{"instruction": "say", "output": "so", "input": "", "context": " "}],
            [*([{"instruction": "say", "output": "so"}] * 39), {"instruction": "s", "output": "o", "context": "c"}],
            [{**chats(1)[0], "prompt": "why?", "chosen": "so", "label": True, "answer": "42"}],
        ],
    )  # fmt: skip
    def test_columns_that_nobody_misses_are_notes(
        self, rows: Sequence[Mapping[str, Any]], place: Place
    ) -> None:
        assert not failures(place.session(data=place.data(rows)))

    def test_a_format_that_was_chosen_is_meant(self, place: Place) -> None:
        file = place.data([{"text": SENTENCE, "answer": "birds of paradise"}])
        assert failures(place.session(data=file))
        assert not failures(place.session(data=file, data__format="text"))


class TestImages:
    @pytest.mark.parametrize("kind", ["path", "bytes", "url", "part"])
    def test_pictures_that_can_be_opened_are_no_fault_of_theirs(
        self, kind: str, place: Place
    ) -> None:
        Image.new("RGB", (2, 2)).save(place.directory / "cat.png")
        rows = talks(*plain(), images=["cat.png"])
        values = {
            "path": {"path": "cat.png"},
            "bytes": "cat.png",
            "url": str(place.directory / "cat.png"),
        }
        for row in rows:
            if kind == "part":
                words = row["messages"][0]["content"]
                picture = {"type": "image", "image": row.pop("images")[0]}
                row["messages"][0]["content"] = [picture, {"type": "text", "text": words}]
            else:
                row["images"] = [values[kind]]
        found = findings(place.session(data=place.data(rows)))
        assert found["data.images"].outcome == "passed"
        assert found["data.rows"].outcome == "failed"

    def test_pictures_at_addresses_are_refused_as_in_training(self, place: Place) -> None:
        rows = talks(*plain(), image="https://example.org/cat.png?key=secret")
        found = findings(place.session(data=place.data(rows)))["data.images"]
        assert found.outcome == "failed" and "data.images.allow_urls" in found.evidence[0]
        assert "secret" not in found.evidence[0]

    def test_bytes_that_are_no_picture(self, place: Place) -> None:
        rows = talks(*plain(), image={"bytes": "not base64!"})
        found = findings(place.session(data=place.data(rows)))["data.images"]
        assert found.outcome == "failed" and "no base64" in found.evidence[0]

    def test_rows_that_will_be_left_out_are_no_failure(self, place: Place) -> None:
        rows = talks(*plain(), image="cat.png")
        session = place.session(data=place.data(rows), data__images__bad="drop")
        found = findings(session)["data.images"]
        assert (found.outcome, found.number) == ("passed", len(rows))
        assert "rows are left out" in found.says and "there is no file" in found.notes[0]

    def test_a_picture_cut_short(self, place: Place) -> None:
        whole = place.directory / "cat.png"
        Image.new("RGB", (64, 64)).save(whole)
        whole.write_bytes(whole.read_bytes()[:60])
        found = findings(place.session(data=place.data(talks(*plain(), image="cat.png"))))
        assert found["data.images"].outcome == "failed"
        assert found["data.columns"].outcome == found["data.rows"].outcome == "skipped"


class TestTargets:
    def test_answers_that_the_template_takes_away(self, place: Place) -> None:
        """Thoughts are stripped, and there is nothing after them: what was left is the end."""
        template = place.directory / "template.jinja"
        written = "message['content'].split('</think>')[-1]"
        template.write_text(CHATML.replace("message['content']", written), encoding="utf-8")
        questions, answers = plain()
        data = place.data(talks(questions, [f"<think>{text}</think>" for text in answers]))
        session = place.session(data=data, data__template=str(template))
        with pytest.raises(Unavailable, match="which the chat template does not write"):
            reading.most_rows_have_something_to_learn(session)
        twin = place.data(talks(questions, [f"<think></think>{text}" for text in answers]))
        assert (
            reading.most_rows_have_something_to_learn(
                place.session(data=twin, data__template=str(template))
            ).outcome
            == "passed"
        )


class TestLengths:
    def test_the_histogram_has_every_sample(self) -> None:
        length_S = np.array([1, 16, 17, 32, 33, 64, 64, 64])
        assert (
            quality.length_histogram(LengthCounts.of(length_S))
            == "samples by tokens: to 16 25%, to 32 25%, to 64 50%"
        )

    def test_what_was_lost_is_counted(self, place: Place) -> None:
        questions, answers = plain()
        answers = [*answers[:-1], " ".join([SENTENCE] * 8)]
        file = place.data(talks(questions, answers))
        whole = place.session(data=file, data__max_length=400).train
        short = place.session(data=file, data__max_length=110, data__too_long="truncate")
        found = findings(short)["data.truncation"]
        lost = whole.report.num_targets - short.train.report.num_targets
        assert found.outcome == "passed"
        assert found.says.startswith("1 cut, 0 dropped")
        assert found.number == pytest.approx(lost / whole.report.num_targets)

    def test_documents_that_are_split_lose_nothing(self, place: Place) -> None:
        file = place.data([{"text": " ".join([SENTENCE] * 4)}] * 3)
        session = place.session(data=file, data__max_length=30, data__too_long="split")
        found = findings(session)["data.truncation"]
        assert (found.outcome, found.number) == ("passed", 0.0)
        assert found.notes == ("3 split into windows",)

    def test_documents_may_be_cut(self, place: Place) -> None:
        file = place.data([{"text": " ".join([SENTENCE] * 4)}] * 3)
        session = place.session(data=file, data__max_length=30, data__too_long="truncate")
        found = findings(session)["data.truncation"]
        assert found.outcome == "passed"
        assert (found.number or 0) > 0.3


class TestOverlap:
    def test_equal_samples_are_found_wherever_they_are(self, place: Place) -> None:
        train = [place.data(chats(30, seed=n), f"{n}.jsonl") for n in (1, 2)]
        known = [chats(30, seed=2)[at] for at in (0, 17, 17, 29)]
        held_out = place.data([*known, *chats(5, seed=9)], "eval.jsonl")
        session = place.session(data__train=[*map(str, train)], data__eval=str(held_out))
        assert session.eval is not None
        found = quality.equal_samples(session.train, reading.flat(session.eval))
        assert found.tolist() == [True] * 4 + [False] * 5

    def test_a_common_prompt_is_no_overlap_and_a_common_text_is(self, place: Place) -> None:
        system = f"{SENTENCE} {SENTENCE}"
        texts = words(20, at_least=20, most=30)
        rows = [
            {"messages": [{"role": "system", "content": system}, *row["messages"]]}
            for row in talks(texts, words(20))
        ]
        fresh = [
            {"messages": [{"role": "system", "content": system}, *row["messages"]]}
            for row in talks(words(21, 20, 30)[:2], ["the end", "no"])
        ]
        again = {"messages": [*rows[3]["messages"][:-1], {"role": "assistant", "content": "other"}]}
        held_out = place.data([*fresh, again], "eval.jsonl")
        found = findings(place.session(data=place.data(rows), data__eval=str(held_out)))
        assert found["data.overlap"].outcome == "passed"
        assert found["data.overlap"].says == "0 equal, 1 mostly in data.train"
        assert found["data.overlap"].number == 1

    def test_answers_to_other_prompts_may_choose_the_model(self, place: Place) -> None:
        held_out = place.data(name="eval.jsonl")
        keys = {"eval__best": "exact_match", "eval__answers__rewards": "exact_match"}
        session = place.session(data__eval=str(held_out), **keys)
        assert quality.metric_on_eval(session.run) == "exact_match"
        other = place.session(data__eval=str(held_out), eval__answers__data="x.jsonl", **keys)
        assert quality.metric_on_eval(other.run) is None


class TestLeak:
    @pytest.mark.parametrize(
        ("exchanges", "is_fault"),
        [
            ([("why {0}? {1}", "{1}")], True),
            ([("why {0}?\n\nAnswer:  {1} \n", " {1}")], True),
            ([("repeat: {1}", "{1}")], False),
            ([("is {0} red or blue", "blue")], False),
            ([("why {0}{1}", "{1}")], False),
            ([("{1} is why {0}?", "{1}")], False),
        ],
    )
    def test_the_answer_at_the_end_of_a_question(
        self, exchanges: list[tuple[str, str]], is_fault: bool
    ) -> None:
        ((prompt, answer),) = exchanges
        texts = words(40)
        found = [
            Exchange("", prompt.format(texts[i], texts[i + 20]), answer.format("", texts[i + 20]))
            for i in range(20)
        ]
        given = [one for one in found if quality.ends_with_answer(one)]
        assert (len(given) == len(found) and not quality.is_copying(given)) == is_fault


@pytest.mark.parametrize(
    ("answer", "check", "note"),
    [
        ("why &lt; and &#39;how&#39;", "data.tokens", "12 of 12 rows have HTML entities"),
        ("first\\nthen", "data.tokens", "12 of 12 rows have \\n for line breaks"),
        ("yes", "data.targets", "12 of 12 answers are 'yes'"),
    ],
)
def test_what_people_may_want_is_a_warning(
    answer: str, check: str, note: str, place: Place
) -> None:
    found = findings(place.session(data=place.data(talks(plain()[0], [answer] * 12))))[check]
    assert found.outcome == "warning"
    assert found.says.startswith(note), found.says
    assert found.remedy


@pytest.mark.parametrize(
    "rows",
    [
        chats(1),
        [{"text": "cat"}],
        [{"text": SENTENCE}] * 4,
        [{"prompt": "why", "completion": " so"}],
        talks(["why is that so?"] * 6, words(6)),
        talks(words(8), ["yes", "no"] * 4),
        talks([f"{SENTENCE}\n{text}?" for text in words(9)], words(9)),
        talks(words(5), ["naïve café, déjà vu, 東京 ÂÃ"] * 5),
    ],
)
def test_sound_data_raise_no_alarm(rows: Sequence[Mapping[str, Any]], place: Place) -> None:
    assert not failures(place.session(data=place.data(rows)))


def test_csv_and_json_are_looked_at_too(place: Place) -> None:
    questions, answers = plain()
    file = place.directory / "train.json"
    file.write_text(json.dumps(talks(questions, answers)), encoding="utf-8")
    assert findings(place.session(data=file))["data.columns"].number == 12
    table = place.directory / "train.csv"
    lines = [f"{q},{a}" for q, a in zip(questions, answers, strict=True)]
    table.write_text("\n".join(["instruction,output", *lines]) + "\n", encoding="utf-8")
    assert findings(place.session(data=table))["data.columns"].number == 12
    write_rows(place.directory / "empty.jsonl", [])
    found = findings(place.session(data=place.directory / "empty.jsonl"))
    assert "no rows" in found["data.rows"].says
