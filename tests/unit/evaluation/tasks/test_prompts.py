"""Prompts byte for byte: against those that lm-evaluation-harness 0.4.13 made of the same rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.tasks.graders import RegexGrader
from megatron_distill.evaluation.tasks.prompts import Item, read_task
from megatron_distill.evaluation.tasks.record import Task, load_task, shipped_tasks
from tests.unit.evaluation.tasks import published

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "lm_eval_0_4_13.json").read_text(encoding="utf-8")
)


def lines(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def own_task(tmp_path: Path, **content: Any) -> Task:
    """A task of one's own on the rows of a.jsonl, by default a choice of no and yes."""
    own = {"kind": "multiple_choice", "question": "{{ q }}", "choices": ["no", "yes"]}
    own |= {"answer": "right", "files": ["a.jsonl"], "folder": str(tmp_path)}
    (tmp_path / "mine.yaml").write_text(json.dumps({**own, **content}), encoding="utf-8")
    return load_task(str(tmp_path / "mine.yaml"))


# Rows of the examples, where they are not those of the items.
EXAMPLES = {"hellaswag": published.HELLASWAG_EDGES}


def items(
    tmp_path: Path, named: str, rows: Sequence[dict[str, Any]], shots: int, **changes: Any
) -> list[Item]:
    test = lines(tmp_path / "test.jsonl", rows)
    dev = lines(tmp_path / "dev.jsonl", EXAMPLES.get(named, rows))
    files = {"files": [test], **({} if named == "minerva_math" else {"shot_files": [dev]})}
    return read_task(load_task(named, {**files, "shots": shots, **changes}))


# The examples of the leaderboard's MMLU-Pro are of any category.
MIXED = [
    {**row, "category": ("math", "law")[number % 2]}
    for number, row in enumerate([*published.MMLU_PRO, *published.MMLU_PRO])
]
ALGEBRA = [row for row in published.MMLU if row["subject"] == "abstract_algebra"]
CASES = [
    ("mmlu", ALGEBRA, 0),
    ("mmlu", ALGEBRA, 2),
    ("mmlu", [*ALGEBRA, *ALGEBRA], 5),
    ("arc_challenge", published.ARC, 0),
    ("arc_challenge", published.ARC, 2),
    ("arc_easy", published.ARC, 0),
    ("arc_easy", published.ARC, 1),
    ("hellaswag", [*published.HELLASWAG, *published.HELLASWAG_EDGES], 0),
    ("hellaswag", published.HELLASWAG, 3),
    ("gsm8k", published.GSM8K, 0),
    ("gsm8k", published.GSM8K, 5),
    ("mmlu_pro", MIXED, 2),
    ("mmlu_pro", MIXED, 5),
    ("mmlu_pro_cot", published.MMLU_PRO, 2),
    ("mmlu_pro_cot", [*published.MMLU_PRO, *published.MMLU_PRO], 5),
    ("hendrycks_math", published.MATH, 0),
    ("math_500", published.MATH_500, 0),
    ("minerva_math", published.MATH, 4),
]


@pytest.mark.parametrize(("named", "rows", "shots"), CASES, ids=lambda one: str(one)[:20])
def test_prompts_equal_those_of_the_published_harness(
    tmp_path: Path, named: str, rows: list[dict[str, Any]], shots: int
) -> None:
    found = []
    for item in items(tmp_path, named, rows, shots):
        text = item.prompt.text
        answers = [[text, f"{item.prompt.delimiter}{choice}"] for choice in item.choices]
        found.append(answers or [[text]])
    assert found == GOLDEN[f"{named}_{shots}"]


def test_the_original_mmlu_has_two_spaces_and_questions_as_they_are(tmp_path: Path) -> None:
    first, *_ = items(tmp_path, "mmlu_original", ALGEBRA, 1)
    question = " Which of these is 0?\n\nA.  0\nB. two\nC. a b\nD. none \nAnswer:"
    assert first.prompt.text == (
        "The following are multiple choice questions (with answers) about  abstract algebra.\n\n"
        f"{question} A\n\n{question}"
    )


@pytest.mark.parametrize("shots", [0, 5])
def test_the_original_prompts_equal_those_of_the_authors_program(
    tmp_path: Path, shots: int
) -> None:
    """evaluate.py of github.com/hendrycks/test at 4450500f made them of the same rows."""
    file = Path(__file__).parent / "golden" / "mmlu_of_its_authors.json"
    rows = [*ALGEBRA, *ALGEBRA]
    found = items(tmp_path, "mmlu_original", rows, shots)
    assert [item.prompt.text for item in found] == json.loads(file.read_text())[str(shots)]
    assert [(item.choices, item.right) for item in found] == [
        (("A", "B", "C", "D"), row["answer"]) for row in rows
    ]


def test_the_original_prompts_of_math_equal_those_of_the_authors_program(tmp_path: Path) -> None:
    """evaluate_gpt3.py of github.com/hendrycks/math at 5f3bf91d made them of the same rows."""
    file = Path(__file__).parent / "golden" / "math_of_its_authors.json"
    rows = [*published.MATH, {**published.MATH_500[1], "type": "Algebra"}]
    found = items(tmp_path, "math_original", rows, 8)
    assert [item.prompt.text for item in found] == json.loads(file.read_text())
    assert [item.target for item in found] == [row["solution"] for row in rows]


@pytest.mark.parametrize("shots", [0, 2, 5])
def test_the_original_prompts_of_mmlu_pro_equal_those_of_the_authors_program(
    tmp_path: Path, shots: int
) -> None:
    """evaluate_from_local.py of github.com/TIGER-AI-Lab/MMLU-Pro at f418b116, of the same rows."""
    file = Path(__file__).parent / "golden" / "mmlu_pro_of_its_authors.json"
    rows = [
        {**row, "category": ("math", "computer science")[number % 2]}
        for number, row in enumerate([*published.MMLU_PRO, *published.MMLU_PRO])
    ]
    rows[3]["options"] = ["one", "N/A", " three"]  # as in the first copies of the data set
    test, dev = lines(tmp_path / "test.jsonl", rows), lines(tmp_path / "dev.jsonl", [*rows, *rows])
    changes = {"files": [test], "shot_files": [dev], "shots": shots}
    found = read_task(load_task("mmlu_pro_original", changes))
    assert [item.prompt.text for item in found] == json.loads(file.read_text())[str(shots)]
    assert [item.target for item in found] == [row["answer"] for row in rows]


def test_shots_are_of_the_item_s_group_and_never_the_item_itself(tmp_path: Path) -> None:
    test = lines(tmp_path / "all.jsonl", published.MMLU)
    task = load_task("mmlu", {"files": [test], "shot_files": [], "shots": 3})
    found = read_task(task)
    assert len(found) == 8
    for item in found:
        assert item.prompt.question not in [question for question, _ in item.prompt.shots]
        assert item.group.replace("_", " ") in item.prompt.description


def test_rows_of_math_without_a_subject_are_of_one_group(tmp_path: Path) -> None:
    rows = [{"problem": "What is $1 + 1$?", "solution": "It is $\\boxed{2}$."}]
    for name in ("hendrycks_math", "math_500"):
        (found,) = items(tmp_path, name, rows, 0)
        assert (found.group, found.target) == ("", rows[0]["solution"])


def test_letters_of_mmlu_pro_follow_the_number_of_options(tmp_path: Path) -> None:
    found = items(tmp_path, "mmlu_pro", published.MMLU_PRO, 1)
    assert [item.choices for item in found[:2]] == [("A", "B", "C"), ("A", "B", "C", "D")]
    assert found[1].right == 1
    assert found[0].prompt.text.endswith("C. three\nAnswer:")
    assert {item.group for item in found} == {"math"}, "results are by category"


def test_formats_columns_and_limits(tmp_path: Path) -> None:
    """A CSV without a header, Parquet, Arrow and JSON lines give the same items."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"q": f"Is {n} odd?", "right": "yes" if n % 2 else "no", "unused": n} for n in range(9)]
    whole = pa.Table.from_pylist(rows)
    pq.write_table(whole, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", whole.schema) as writer:
        writer.write_table(whole)
    # With a blank line at the end, as spreadsheets write.
    table = "".join(f'"{row["q"]}",{row["right"]}\n' for row in rows) + "\n"
    (tmp_path / "a.csv").write_text(table, encoding="utf-8")
    (tmp_path / "odd.yaml").write_text(
        "kind: multiple_choice\nquestion: '{{ question }}'\nchoices: ['no', 'yes']\n"
        "answer: answer\ncolumns: {question: q, answer: right}\nlimit: 3\n",
        encoding="utf-8",
    )
    lines(tmp_path / "a.jsonl", rows)
    found = [
        read_task(load_task(str(tmp_path / "odd.yaml"), {"folder": str(tmp_path), **changes}))
        for changes in (
            {"files": ["a.parquet"]},
            {"files": ["a.arrow"]},
            {"files": ["a.jsonl"]},
            {"files": ["a.csv"], "column_names": ["q", "right"]},
        )
    ]
    texts = [[(item.prompt.text, item.choices[item.right]) for item in one] for one in found]
    assert all(one == texts[0] for one in texts)
    assert texts[0] == [("Is 0 odd?", "no"), ("Is 3 odd?", "yes"), ("Is 6 odd?", "no")]


def test_cells_of_csv_files_are_those_of_pandas(tmp_path: Path) -> None:
    """Text behind a quoted part, quotes inside of a cell, and line ends in quotes."""
    pandas = pytest.importorskip("pandas")
    cells = ['"a" then b', 'say "hi" twice', '"two ""quotes"""', '"a, b\nc" d', "''", '" x"y"']
    path = tmp_path / "a.csv"
    path.write_text("q,right\n" + "".join(f"{cell},no\n" for cell in cells), encoding="utf-8")
    task = own_task(tmp_path, files=["a.csv"])
    found = [item.prompt.text for item in read_task(task)]
    assert found == pandas.read_csv(path)["q"].tolist()
    assert found[0] == "a then b"
    path.write_text('q,right\n"a" then b,no\n"open,no\nc,no\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv: line 4: a quoted cell does not end; correct or"):
        read_task(task)


@pytest.mark.parametrize(
    ("system", "description"),
    [("Be short.", "Sums."), ("Be short.\n", "Sums."), ("Be short.", " Sums."), ("", "Sums."),
     ("Be short.", ""), ("", "")],
)  # fmt: skip
def test_a_system_message_comes_before_the_description(
    tmp_path: Path, system: str, description: str
) -> None:
    """With the separator of examples between them, where the harness has it."""
    lines(tmp_path / "a.jsonl", [{"q": "1+1?", "right": "2", "tone": system}])
    content = {"kind": "generation", "question": "{{ q }}", "answer": "right", "graders": "exact"}
    content |= {"files": ["a.jsonl"], "folder": str(tmp_path), "description": description}
    content |= {"system": "{{ tone }}", "chat": True, "shot_separator": "\n--\n"}
    (tmp_path / "mine.yaml").write_text(json.dumps(content))
    (item,) = read_task(load_task(str(tmp_path / "mine.yaml")))
    *before, question = item.prompt.messages
    assert question == {"role": "user", "content": "1+1?"}
    assert item.prompt.text == f"{description}1+1?", "plain prompts have no system message"
    if (system, description) == ("Be short.", "Sums."):
        assert before == [{"role": "system", "content": "Be short.\n--\nSums."}]
    harness = pytest.importorskip("lm_eval.api.utils", reason="lm-eval is not installed")
    expected = harness.maybe_delimit(system, description, "\n--\n")
    assert [one["content"] for one in before] == ([expected] if expected else [])


def test_lists_are_groups_and_examples_are_of_an_equal_one(tmp_path: Path) -> None:
    rows = [
        {"q": f"{n}?", "right": "no", "topics": ["odd"] if n % 2 else ["a", 2]} for n in range(4)
    ]
    lines(tmp_path / "a.jsonl", rows)
    found = read_task(own_task(tmp_path, group="topics", shots=1))
    assert [item.group for item in found] == ["['a', 2]", "['odd']"] * 2
    assert [item.prompt.shots[0][0] for item in found] == ["2?", "3?", "0?", "1?"]


KEYLESS = [
    ("hellaswag", {**published.HELLASWAG[0], "label": ""}, "answer = 'label' is empty"),
    ("gsm8k", {**published.GSM8K[0], "answer": ""}, "answer = 'answer' is empty"),
    ("math_500", {**published.MATH_500[0], "solution": " "}, "answer = 'solution' is empty"),
    ("arc_challenge", {**published.ARC[0], "answerKey": ""}, "answer: .* not in list"),
    ("mmlu", {**published.MMLU[0], "answer": -1}, "the answer is -1, neither one of the choices"),
]


@pytest.mark.parametrize(("named", "row", "message"), KEYLESS, ids=lambda one: str(one)[:20])
def test_a_row_without_an_answer_key_is_refused(
    tmp_path: Path, named: str, row: dict[str, Any], message: str
) -> None:
    """Such as the rows of HellaSwag's test split: nothing is scored against the first choice."""
    with pytest.raises(DataError, match=rf"task {named}: \S+test\.jsonl:1: {message}"):
        items(tmp_path, named, [row], 0)


def test_an_answer_that_is_an_index_and_another_choice_is_refused(tmp_path: Path) -> None:
    """CSV files have no numbers: 1 is the index of "2" here, or the text of the last choice."""
    table = "q,a,b,c,d,right\nOne?,x,y,2,1,2\nWhat is 1+1?,3,2,0,1,1\n"
    (tmp_path / "a.csv").write_text(table, encoding="utf-8")
    choices = ["{{ a }}", "{{ b }}", "{{ c }}", "{{ d }}"]
    task = own_task(tmp_path, files=["a.csv"], choices=choices)
    message = (
        r"task mine: \S+a\.csv:3: answer = 'right' gives '1': as an index the choice '2', "
        r"as a text the choice '1'; write `answer: \(right\) \| int` for the index, or "
        r"`answer: \[\.\.\., \.\.\.\]\.index\(right\)`"
    )
    with pytest.raises(DataError, match=message):
        read_task(task)
    for answer, right in (("(right) | int", [2, 1]), ("[a, b, c, d].index(right)", [2, 3])):
        found = read_task(own_task(tmp_path, files=["a.csv"], choices=choices, answer=answer))
        assert [item.right for item in found] == right


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_missing_column_of_a_table_names_those_it_has(tmp_path: Path, format: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = pa.Table.from_pylist([{"q": "1?", "right": "no"}])
    pq.write_table(whole, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", whole.schema) as writer:
        writer.write_table(whole)
    task = own_task(tmp_path, files=[f"a.{format}"], question="{{ quest }}")
    with pytest.raises(DataError, match=r"'quest' is undefined \(its columns: q, right\)"):
        read_task(task)


def test_a_damaged_table_and_a_folder_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="damaged or cut off") as caught:
        read_task(own_task(tmp_path, files=["a.parquet"]))
    assert str(caught.value).count("a.parquet") == 1
    assert "data source" not in str(caught.value)
    (tmp_path / "inside").mkdir()
    with pytest.raises(DataError, match=r"mine\.yaml\): files: \S+inside: not a saved dataset"):
        read_task(own_task(tmp_path, files=["inside"]))


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_system_message_without_a_chat_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_chat: bool
) -> None:
    lines(tmp_path / "a.jsonl", [{"q": "1?", "right": "no"}])
    with caplog.at_level("WARNING"):
        read_task(own_task(tmp_path, system="Be nice", chat=is_chat))
    told = "mine.yaml): system has no effect without chat: true; set it, or remove system"
    assert (told in caplog.text) != is_chat


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"files": ["no_such.jsonl"]}, ConfigError, "there is no file .*no_such.jsonl; correct files"),
    ({"files": ["empty.jsonl"]}, DataError, r"files = \['empty.jsonl'\] in \S+ has no row; corr"),
    ({"files": ["a.txt"]}, ConfigError, "set `format` to one of jsonl, json, parquet, arrow, csv"),
    ({"question": "{{ qq }}"}, DataError, "1: question: 'qq' is undefined .*under `columns`"),
    ({"question": "{{ q"}, ConfigError, "is not a template"),
    ({"question": "{{ 1 // 0 }}"}, DataError, "a.jsonl:1: .* by zero .*correct the template"),
    ({"question": "{{ q | regex_replace('(', '') }}"}, DataError, "a.jsonl:1: .*unterminated"),
    ({"base": "mmlu", "columns": ["q"]}, ConfigError, "columns = \\['q'\\] has the wrong type"),
    ({"answer": "q"}, DataError, "a.jsonl:1: the answer is 'Is 0 odd\\?'"),
    ({"answer": ""}, ConfigError, "without it nothing can be scored"),
    (
        {"kind": "generation", "graders": "exact", "answer": "''"},
        DataError,
        "a.jsonl:1: answer = .* is empty: the row has no right answer; give files that have",
    ),
    ({"kind": "generation", "graders": "exact", "answer": "none"}, DataError, "has no value"),
    ({"shots_of_group": "no"}, ConfigError, "shots_of_group = 'no' .*; give true or false"),
    ({"shots": 4}, DataError, "2 examples, and shots is 4; lower shots"),
    ({"kind": "essay"}, ConfigError, "give one of multiple_choice, generation, perplexity"),
    ({"shot": 4}, ConfigError, "'shot' is not a key of a task; the keys are"),
    ({"shots": "4"}, ConfigError, "shots = '4' has the wrong type; give a whole number"),
    ({"choices": [False, True]}, ConfigError, "choices = .* or a list of texts, in quotes: .no."),
    ({"question": None}, ConfigError, "question = null, which YAML reads .*; give a text, in quo"),
    ({"choices": [None, "a"]}, ConfigError, r"choices = \[None, 'a'\] has the wrong type; give an"),
    (
        {"columns": {"q": None}},
        ConfigError,
        r"columns = {'q': None} has the wrong type; give a map",
    ),
    ({"answer": 1}, ConfigError, "answer = 1 has the wrong type; give a text, in quotes"),
    ({"format": "text"}, ConfigError, "format = 'text'; give one of jsonl, json, parquet"),
    ({"layouts": [{"file": "a"}]}, ConfigError, "layouts: 'file' is not a key of a task"),
    (
        {"stops": ["\n", ""]},
        ConfigError,
        r"task mine \(\S+mine.yaml\): stops = .*not empty, or \[\]",
    ),
    (
        {"kind": "perplexity", "text": "q"},
        ConfigError,
        r"mine.yaml\): text = 'q' names no column; write it as a template, as {{ q }}",
    ),
    ({"max_new_tokens": 0}, ConfigError, r"mine.yaml\): max_new_tokens = 0; give 1 or more"),
    ({"max_new_tokens": -5}, ConfigError, "max_new_tokens = -5; give 1 or more"),
    ({"base": "mmluu"}, ConfigError, "mine.yaml: base = mmluu: there is no such task; give"),
    ({"base": ["mmlu"]}, ConfigError, r"mine.yaml: base = \['mmlu'\] has the wrong type; give the"),
    ({"group": "topic"}, DataError, "a.jsonl:1: group = 'topic' has no value"),
    ({"group": "q[:1].nothing.more"}, DataError, "a.jsonl:1: group: .*no attribute 'nothing'"),
]


def wrong_graders(graders: Any, message: str) -> tuple[dict[str, Any], type[Exception], str]:
    return {"kind": "generation", "graders": graders}, ConfigError, f"mine.yaml.*graders.*{message}"


WRONG += [
    wrong_graders([], r"None; give one or more of exact, letter, .*with `regex`"),
    wrong_graders([{"regex": "("}], r"regex = '\(' is not a regular expression: missing \), unt"),
    wrong_graders([{"regex": "a", "take": "best"}], "take = 'best'; give first or last"),
    wrong_graders([{"regex": "a", "name": "letter"}], "name = 'letter'; give letters, digits and"),
    wrong_graders([{"regex": "a", "name": "n"}], "name = 'n'; give letters, .* and none of exact"),
    wrong_graders(
        [{"regex": "a"}, {"regex": "b"}], "'regex'; give each grader a `name` of its own"
    ),
    wrong_graders(["exact", "exact"], "'exact'; give each grader"),
    wrong_graders(
        [{"pattern": "a"}], "wrong type; give names of graders, or mappings of regex, name"
    ),
    wrong_graders([{"regex": 1}], "wrong type"),
    wrong_graders(["exactt"], "'exactt'; give one of exact, letter, gsm8k_strict"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG, ids=lambda one: str(one)[:30])
def test_errors_name_the_task_file_and_key(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    rows = [{"q": f"Is {n} odd?", "right": ["no", "yes"][n % 2]} for n in range(3)]
    lines(tmp_path / "a.jsonl", rows)
    for empty in ("a.txt", "empty.jsonl"):
        (tmp_path / empty).write_text("", encoding="utf-8")
    with pytest.raises(kind, match=message):
        read_task(own_task(tmp_path, **changes))


def test_graders_by_name_and_as_regular_expressions(tmp_path: Path) -> None:
    """A task of one's own sets them in its YAML, and results have their names."""
    (tmp_path / "mine.yaml").write_text(
        "kind: generation\nquestion: '{{ q }}'\nanswer: right\n"
        "graders: [exact, {regex: 'is (\\d+)', name: number, take: last}]\n"
    )
    task = load_task(str(tmp_path / "mine.yaml"))
    assert task.measures == ("exact", "number")
    assert task.graders == ("exact", RegexGrader(r"is (\d+)", name="number", take="last"))
    alone = load_task(str(tmp_path / "mine.yaml"), {"graders": "letter"})
    assert alone.graders == ("letter",)


def test_a_task_that_is_not_utf_8_is_to_be_converted(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_bytes("kind: generation # Prüfung".encode("latin-1"))
    with pytest.raises(
        ConfigError, match=r"own.yaml: not UTF-8 \(byte 21: .*convert the file to U"
    ):
        load_task(str(own))


def test_the_row_of_an_example_is_named(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"q": "1?", "right": "no"}])
    examples = [{"q": "2?", "right": "yes"}, {"q": "3?", "right": "maybe"}]
    with pytest.raises(DataError, match=r"mine.yaml: shot_rows: row 2: the answer is 'maybe'"):
        read_task(own_task(tmp_path, shots=2, shot_rows=examples))


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("multiple_choice", {"stops": ["x"], "text": "{{ q }}"}),
        ("generation", {"graders": ["exact"], "text": "{{ q }}"}),
        ("perplexity", {"text": "{{ q }}", "shots": 3, "stops": ["x"], "max_new_tokens": 3}),
    ],
)
def test_keys_of_other_kinds_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, keys: dict[str, Any]
) -> None:
    lines(tmp_path / "a.jsonl", [{"q": "1?", "right": "no"}])
    with caplog.at_level("WARNING"):
        read_task(own_task(tmp_path, kind=kind, **keys))
    (told,) = (one.getMessage() for one in caplog.records)
    named = told.partition("mine.yaml): ")[2].partition(": no effect with")[0].split(", ")
    expected = {
        "multiple_choice": ["text", "stops"],
        "generation": ["text", "choices"],
        "perplexity": ["question", "choices", "answer", "shots", "stops", "max_new_tokens"],
    }
    assert named == expected[kind]


def test_no_shipped_task_has_keys_without_effect() -> None:
    assert not [name for name in shipped_tasks() if load_task(name).without_effect]


def test_a_template_without_quotes_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("kind: multiple_choice\nquestion: {{ q }}\n")
    with pytest.raises(ConfigError, match=r'is in quotes, such as question: "\{\{ question \}\}"'):
        load_task(str(tmp_path / "mine.yaml"))


def test_a_name_that_is_no_task_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="there is no such task.*arc_challenge.*mmlu_original"):
        load_task("mmlu5")
    assert {"mmlu", "gsm8k", "text"} <= set(shipped_tasks())
