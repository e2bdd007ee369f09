"""``taut data``: describe data sets, and remove rows from them.

commands.py     stats, dedup and decontaminate
filter.py       filter
rows.py         the rows of files, in chunks, and the parts of them that are compared
output.py       files that are written: kept rows, removed rows with the reason, a report
"""

from taut.commands.registry import DATA, Command

STATS = Command(
    "IN ...",
    "print what a data set holds: rows, lengths, duplicates",
    "taut_tools.curate.commands:run_stats",
    "taut_tools.curate.settings:Stats",
    group=DATA,
    many="data",
    result="taut_tools.curate.commands:measure",
)
DEDUP = Command(
    "IN ... out=FILE.jsonl|DIR/",
    "remove exact and near duplicates",
    "taut_tools.curate.commands:run_dedup",
    "taut_tools.curate.settings:Dedup",
    group=DATA,
    many="data",
    extras=("train", "data"),
    result="taut_tools.curate.commands:dedup",
)
DECONTAMINATE = Command(
    "IN ... out=FILE.jsonl|DIR/ against=[FILE]",
    "remove rows that hold a question of an evaluation",
    "taut_tools.curate.commands:run_decontaminate",
    "taut_tools.curate.settings:Decontaminate",
    group=DATA,
    many="data",
    result="taut_tools.curate.commands:decontaminate",
)
FILTER = Command(
    "IN ... out=FILE.jsonl|DIR/",
    "keep rows by length, language, loss, reward, pass rate or column",
    "taut_tools.curate.filter:run",
    "taut_tools.curate.settings:Filter",
    group=DATA,
    many="data",
    result="taut_tools.curate.filter:filter_rows",
)
