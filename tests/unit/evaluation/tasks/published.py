"""Rows in the layouts in which the data sets are published, with the blanks that decide bytes."""

from __future__ import annotations

from typing import Any

MMLU: list[dict[str, Any]] = [
    {
        "question": f" Which of these is {number}?\n",
        "subject": subject,
        "choices": [f" {number}", "two", "a b", "none "],
        "answer": number % 4,
    }
    for number in range(4)
    for subject in ("abstract_algebra", "virology")
]
MMLU_PRO: list[dict[str, Any]] = [
    {
        "question_id": number,
        "question": f"Which letter stands at {number}?",
        "options": ["one", " two ", "three", "four", "five"][: 3 + number % 3],
        "answer": "ABC"[number % 3],
        "answer_index": number % 3,
        "cot_content": f"A: Let's think step by step. It is {number}. The answer is (A).",
        "category": "math",
        "src": "made",
    }
    for number in range(4)
]
ARC: list[dict[str, Any]] = [
    {
        "id": f"row{number}",
        "question": f"What falls {number} times?",
        "choices": {"text": ["rain", "a stone", "light", "dust"], "label": labels},
        "answerKey": labels[number],
    }
    for number, labels in enumerate([["A", "B", "C", "D"], ["1", "2", "3", "4"]])
]
HELLASWAG: list[dict[str, Any]] = [
    {
        "ind": 4,
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is sitting on a roof. [header] He",
        "ctx_b": "he  [title] starts",
        "ctx": "unused",
        "endings": ["is using wrap [step] twice.", " pulls  it off.", "sits.", "sings [a]"],
        "label": "3",
    }
]
# Capitals within a context and one that is empty, brackets in a row, blanks at the ends.
HELLASWAG_EDGES: list[dict[str, Any]] = [
    {
        "ind": number,
        "activity_label": label,
        "ctx_a": before,
        "ctx_b": after,
        "ctx": "unused",
        "endings": endings,
        "label": str(number),
    }
    for number, (label, before, after, endings) in enumerate(
        [
            ("Canoeing", "Two MEN row. ", "the man from NASA", ["a  b", " c ", "[d] e", "f."]),
            ("Baking [bread]", "", "", ["[title] a", "b [title]", "c[x]d", "   e"]),
            (
                "  Home and Garden",
                "How to sit [title] Sit. [step]",
                "",
                ["é", "ß", "[a][b] c", "d"],
            ),
        ]
    )
]
GSM8K: list[dict[str, Any]] = [
    {
        "question": f"Two and {number}?",
        "answer": f"It is <<2+{number}={2 + number}>>.\n#### {2 + number}",
    }
    for number in range(7)
]
MATH: list[dict[str, Any]] = [
    {
        "problem": "Compute $1+1$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "It is $\\boxed{2}$.",
    }
]
MATH_500: list[dict[str, Any]] = [
    {
        "problem": problem,
        "solution": solution,
        "answer": answer,
        "subject": "Algebra",
        "level": 1,
        "unique_id": f"test/algebra/{number}.json",
    }
    for number, (problem, solution, answer) in enumerate(
        [
            ("Compute $1+1$.", "It is $\\boxed{2}$.", "2"),
            (" Which fraction? ", "Half: \\[\\boxed{\\frac{1}{2}}\\]", "\\frac{1}{2}"),
        ]
    )
]
