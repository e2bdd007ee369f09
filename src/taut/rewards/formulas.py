r"""The formula that a text is: ``whole`` reads all of it or nothing.

16 cm^2                    16                 units after a number are left out
The answer is $5$ apples.  5                  so are words around the formula, unless they change its value
3 and 5                    3 , 5              several formulas are a list: "and", "or", commas, line breaks
5 million, 3 cats 5 dogs   None
"""

from __future__ import annotations

import re

LONGEST = 2000
"""Characters of a text that can be one formula."""

# fmt: off
_COMMANDS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp pi alpha beta gamma theta phi gcd"
_UNITS = ("nm mm cm dm km mi ft feet foot in inch inches yd mg kg lb lbs oz ml mL dL cc ms sec min hr hrs mph kmh kph"
          " Hz kHz MHz Pa kPa kJ kW kWh mol rad deg")
_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"
LETTER = rf"[msghlLNJWVAKCF]{_POWER}(?![A-Za-z\d_^(])"
"""A unit of one letter."""
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{"
_UNIT = rf"(?:(?:sq|cu|square|cubic)\.?\s+)?(?:{_TEXT}[^{{}}]*\}}|(?:{_UNITS.replace(' ', '|')})(?![A-Za-z])){_POWER}"
_PER = rf"\s*(?:/|\bper\b)\s*(?:{_UNIT}|{LETTER})"
_BEFORE = r"(?:(?<=[\d)}])|(?<=[\d)}]\$))(?:[\s~]|\\[,;: ])*"
_AFTER = r"(?=\s*(?:$|[-+=,;.:?!)\]}&$]|\\|[A-Za-z]{2}))"
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2012\u2013\u2212", "-") | dict.fromkeys("·⋅", r"\cdot ") | dict.fromkeys("“”\ue000", "")
    | {"°": r"^\circ ", "²": "^2", "³": "^3", "±": r"\pm ", "\x0c": r"\f", "\x08": r"\b"}
)
"""The last two are what an unescaped \\frac and \\begin leave."""
_WRITTEN = tuple((re.compile(pattern), plain) for pattern, plain in (
    (r"(?<![\w)}])\*\*(.+?)\*\*(?![\w({])", r"\1"),
    (r"\*\*", "^"),
    (r"√\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))", r"\\sqrt{\1\2}"),
    (r"\+/?-(?=\s*[\d\\])", r"\\pm "),
    (r"(?<=\d)(?:\\[,!;: ]|[~\u00a0\u2009\u202f ]|\{,\})(?=\d{3}(?!\d))", ""),  # 10 000
    (r"(?<![\w.}])(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"\1\\times 10^{\2}"),
    (r"(?<=\d)\s*[x*\u00d7]\s*(?=10\s*\^)", r"\\times "),
    (r"(?<=\d)_\{?\\text\s*\{[^{}]*\}\}?", ""),  # a base in words
    (rf"(?<![A-Za-z\\])({_COMMANDS.replace(' ', '|')})(?![A-Za-z])", r"\\\1 "),
    (rf"(?:\s|,|\\q?quad)*(?:{_TEXT}\s*,?\s*(?:and|or)\s*\}}|(?<![A-Za-z\\])(?:and|or)(?![a-z]))", " , "),
    (r"\s*(?:\bper ?cent(?:age)?|\bpct)\b", r"\\%"),
    (rf"{_BEFORE}{_UNIT}(?:{_PER})*{_AFTER}", ""),
    (rf"{_BEFORE}{LETTER}(?:{_PER})+{_AFTER}", ""),
    (rf"{_TEXT}\s*([A-Za-z])\s*\}}", r"{\1}"),
))
"""Spellings of formulas, and the spellings that math-verify reads."""
_CURRENCY = re.compile(r"(?:\\?\$\s?\d[\d,.]*(?:\s*(?:,|and|or)\s*)?)+")
_MATHS = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_WORD = re.compile(
    r"(?<![A-Za-z\\_^{])(?:[A-Za-z]{4,}|(?<!\d)(?![A-Z]{3})[A-Za-z]{3}"
    r"|(?<!\d)(?:[Ii]s|[Oo]f|[Tt]o|[IAai]n|[Aa]t|[Bb]y|[Aa]s|be|[Ii]t|[Ww]e|on|[Ii]f|[Ss]o|[Nn]o)"
    r"|(?<=[a-z] )a(?= [a-z]))(?:['\u2019-][A-Za-z]+)*(?![A-Za-z\d_^({])(?![^{}]*\})"
)
"""A word in no braces: four letters or more, three that are no points (ABC), a short one that is often met."""
_CHANGES = re.compile(
    "no|not|none|never|minus|negative|plus|times|over|more|less|least|most|fewer|than|half|halves|thirds?|quarters?"
    "|squared|cubed|root|factorial|dozen|hundred|thousand|million|billion|trillion|mod|modulo|choose|power|if|when"
    "|where|except|unless|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve", re.IGNORECASE
)
"""Words that change the value of a number beside them, or are one."""
_PART_OF_LINES = re.compile(r"\\begin|\\end|\\\[|\\\]|^[=<>&]|[=<>&+*/-]$|\\\\$")
# fmt: on


def whole(text: str) -> str | None:
    """The LaTeX of all of ``text``; None: it is no formula, or words between several."""
    text = re.sub(r"\\(?=\x0c)|\\?\"", "", text.strip()).translate(_CHARACTERS)
    if not text or len(text) > LONGEST:
        return None
    if _CURRENCY.fullmatch(text.rstrip(".")):
        text = re.sub(r"\\?\$|(?<=\d),(?=\d{3})", "", text)
    elif text.replace("\\$", "").count("$") % 2:  # money
        text = re.sub(r"\\?\$(?=\s?[\d.])", "", text).replace("$", " dollars ")
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # escaped twice
    # Lines that are formulas are a list; others are one text.
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    text = (", " if all(map(_is_formula, lines)) else " ").join(lines)
    for pattern, plain in _WRITTEN:
        text = pattern.sub(plain, text)
    formulas: list[str] = []

    def put_aside(match: re.Match[str]) -> str:
        formula = _bare(match[match.lastindex or 0])
        formulas.extend([formula] if formula else [])
        return "\ue000" if formula else match[0].replace("$", "")

    # No words but one formula between them: those between dollar signs are put aside meanwhile.
    text = _MATHS.sub(put_aside, text)
    parts = [part for part in map(_bare, _WORD.split(text)) if part]
    if len(parts) != 1 or any(map(_CHANGES.fullmatch, _WORD.findall(text))):
        return None
    # The elements of a list; plus-minus is two of them.
    left = iter(formulas)
    elements = re.split(r",(?![^(\[{]*[)\]}])", re.sub("\ue000", lambda _: next(left), parts[0]))
    signs = {True: "+-", False: "+"}
    return ",".join(each.replace(r"\pm", s) for each in elements for s in signs[r"\pm" in each])


def _is_formula(line: str) -> bool:
    """Whether a line can be a formula of its own."""
    is_open = len(re.findall(r"[{(\[]", line)) != len(re.findall(r"[})\]]", line))
    return not is_open and line.count("$") % 2 == 0 and not _PART_OF_LINES.search(line)


def _bare(formula: str) -> str:
    """A formula without the punctuation of a sentence."""
    return re.sub(r"^[\s,:;*]+|(?:[\s,:;.*?]|\\[,;: ]|\\$)+$", "", formula)
