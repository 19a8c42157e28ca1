"""Golden answers of mathematics: whether graders find two LaTeX answers the same.

The groups are those in which published harnesses and their reports differ. `by_hendrycks` and
`by_minerva`: the graders that normalise text, `hendrycks_math` and `minerva_math`, as
lm-evaluation-harness 0.4.13 normalises it. `by_value`: math-verify.
"""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """A generated answer, the right one, and whether they are the same to the graders."""

    found: str
    wanted: str
    by_hendrycks: bool
    by_minerva: bool
    by_value: bool


_T, _F = True, False

PAIRS = [
    # Fractions and decimals.
    Pair("\\frac12", "\\frac{1}{2}", _T, _T, _T),
    Pair("\\dfrac{1}{2}", "\\frac{1}{2}", _T, _T, _T),
    Pair("\\tfrac{7}{9}", "\\frac79", _T, _T, _T),
    Pair("\\cfrac{1}{3}", "\\frac{1}{3}", _F, _F, _T),
    Pair("0.5", "\\frac{1}{2}", _T, _T, _T),
    Pair("1/2", "\\frac{1}{2}", _T, _T, _T),
    Pair(".5", "1/2", _T, _T, _T),
    Pair("-\\frac{2}{3}", "-2/3", _F, _T, _T),
    Pair("\\frac{-2}{3}", "-\\frac{2}{3}", _F, _T, _T),
    Pair("\\frac{2}{4}", "\\frac{1}{2}", _F, _T, _T),
    Pair("2.50", "2.5", _F, _T, _T),
    Pair("\\frac{1}{3}", "0.3", _F, _F, _F),
    Pair("1/0", "0", _F, _F, _F),
    Pair("\\frac{a}{b}", "\\frac{b}{a}", _F, _F, _F),
    Pair("\\frac{x+1}{2}", "\\frac{1+x}{2}", _F, _F, _T),
    Pair("\\frac{2}{\\sqrt{2}}", "\\sqrt{2}", _F, _F, _T),
    # Mixed numbers.
    Pair("3\\frac{1}{2}", "3\\frac12", _T, _T, _T),
    Pair("\\frac{7}{2}", "3\\frac{1}{2}", _F, _T, _T),
    Pair("-1\\frac{1}{4}", "-1.25", _F, _T, _T),
    Pair("\\frac{3}{2}", "3\\frac{1}{2}", _F, _F, _F),
    # Intervals.
    Pair("\\left[2,5\\right)", "[2,5)", _T, _F, _T),
    Pair("[2, 5)", "[2,5)", _T, _T, _T),
    Pair("(1,2)", "[1,2]", _F, _F, _F),
    Pair("(2,5)", "(2,5]", _F, _F, _F),
    Pair("(-\\infty, 3]", "(-\\infty,3]", _T, _T, _T),
    Pair("[1,\\infty)\\cup(-\\infty,0]", "(-\\infty,0]\\cup[1,\\infty)", _F, _F, _T),
    # Tuples, vectors and sets.
    Pair("\\left(1,2\\right)", "(1,2)", _T, _F, _T),
    Pair("(3,\\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)", _T, _F, _T),
    Pair("(2,1)", "(1,2)", _F, _F, _F),
    Pair("(1,2,3)", "(1,2)", _F, _F, _F),
    Pair("\\{1,2\\}", "\\{2,1\\}", _F, _F, _T),
    Pair(
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
        _T,
        _F,
        _T,
    ),
    # Units.
    Pair("2 cm", "2", _F, _T, _T),
    Pair("5\\text{ cm}", "5", _T, _T, _T),
    Pair("12\\text{ inches}", "12", _T, _T, _T),
    Pair("3 feet", "3", _F, _T, _T),
    Pair("6 dollars", "6", _F, _T, _F),
    Pair("\\$12", "12", _T, _T, _T),
    Pair("90^\\circ", "90", _T, _T, _T),
    Pair("30^{\\circ}", "30", _T, _T, _T),
    Pair("90\N{DEGREE SIGN}", "90^\\circ", _F, _F, _T),
    Pair("8\\mbox{ cm}^2", "8", _F, _T, _T),
    Pair("8\\text{cm}^2", "8\\mbox{ cm}^2", _F, _T, _T),
    Pair("8 cm^2", "8", _F, _F, _F),
    Pair("8\\text{ m}^3", "8^3", _F, _F, _F),
    # "ft" is a unit, and also a part of "left".
    Pair("5 ft", "5", _F, _T, _T),
    Pair("\\left(\\frac{1}{2}\\right)", "(\\frac{1}{2})", _T, _F, _T),
    Pair("\\left\\{1\\right\\}", "\\{1\\}", _T, _F, _T),
    Pair("left", "le", _F, _T, _F),
    # Thousands.
    Pair("100,000", "100000", _F, _T, _T),
    Pair("1,234,567", "1234567", _F, _T, _T),
    Pair("10{,}000", "10000", _F, _T, _T),
    Pair("10,\\!000", "10000", _F, _T, _T),
    Pair("1,000.5", "1000.5", _F, _F, _T),
    Pair("0,1", "1", _F, _F, _F),
    Pair("1,2", "12", _F, _F, _F),
    # Nested braces and roots.
    Pair("\\sqrt{\\frac{1}{2}}", "\\sqrt{\\frac12}", _T, _T, _T),
    Pair("\\frac{\\sqrt{3}}{2}", "\\frac{\\sqrt3}{2}", _T, _T, _T),
    Pair("x^{2^{3}}", "x^{2^3}", _F, _F, _T),
    Pair("\\sqrt3", "\\sqrt{3}", _T, _T, _T),
    Pair("\\sqrt[3]8", "\\sqrt[3]{8}", _F, _T, _F),
    Pair("\\sqrt{12}", "2\\sqrt{3}", _F, _F, _T),
    # Percent.
    Pair("50\\%", "50", _T, _F, _T),
    Pair("50\\%", "50\\%", _T, _T, _T),
    Pair("5\\%", "50\\%", _F, _F, _F),
    # Expressions and words.
    Pair("x=3", "3", _T, _T, _T),
    Pair("3.", "3", _F, _T, _T),
    Pair("x+1", "1+x", _F, _F, _T),
    Pair("2^3", "8", _F, _F, _T),
    Pair("6\\pi", "\\pi\\cdot 6", _F, _F, _T),
    Pair("\\text{east}", "east", _F, _T, _T),
    Pair("2", "-2", _F, _F, _F),
    Pair("x", "y", _F, _F, _F),
    Pair("", "1", _F, _F, _F),
    # Words, names and what the rules of one harness alone accept.
    Pair("\\text{ Friday}", "\\text{ Monday}", _T, _F, _F),
    Pair("", "\\text{ Friday}", _T, _F, _F),
    Pair("\\text{Friday}", "\\text{Monday}", _F, _F, _F),
    Pair("a=1,b=2", "2", _F, _T, _F),
    Pair("k=5", "5", _T, _T, _T),
    Pair("area=5", "5", _F, _T, _T),
    Pair("x/2", "\\frac{x}{2}", _F, _F, _T),
    Pair("x/2", "x/2", _T, _T, _T),
    Pair("\\frac{1}{2}\\text{ cm}", "\\frac12", _T, _T, _T),
    Pair("a 5", "5", _F, _T, _F),
    Pair("\\textbf{7}", "7", _F, _T, _T),
    Pair("\\dfrac{3}{4}\\%", "\\frac{3}{4}", _T, _F, _F),
]


class Text(NamedTuple):
    """A whole generated text, and the graders that find it right for `SOLUTION`."""

    text: str
    graders: frozenset[str]


SOLUTION = "First $\\boxed{7}$ is wrong; then $x = \\frac{1}{2}$, so it is $\\boxed{\\frac{1}{2}}$."

_MINERVA = "Final Answer: The final answer is $\\frac{1}{2}$. I hope it is correct."

TEXTS = [
    Text("It is $\\boxed{\\frac{1}{2}}$.", frozenset({"math_verify"})),
    Text("$\\frac12$", frozenset({"hendrycks_math", "math_verify"})),
    Text("the answer is $0.5$", frozenset({"hendrycks_math", "math_verify"})),
    Text("1/2", frozenset({"hendrycks_math", "math_verify"})),
    Text("so we get 1/2", frozenset({"math_verify"})),
    Text(_MINERVA, frozenset({"hendrycks_math", "minerva_math", "math_verify"})),
    Text(f"as $x = 3$. {_MINERVA} Problem", frozenset({"minerva_math", "math_verify"})),
    Text("$\\boxed{7}$ or $\\boxed{\\frac{1}{2}}$", frozenset()),
    Text("$7$", frozenset()),
    Text("Final Answer: The final answer is $7$. I hope it is correct.", frozenset()),
    Text("no number", frozenset()),
    Text("", frozenset()),
]
