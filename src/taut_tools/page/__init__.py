"""``taut page``: questions about runs, their answers, and the page that asks them.

    answers.py   answer a question, written as a path, from the records of a run
    history.py   read the events of a run as they are written, and keep the numbers of each as a row
    curves.py    reduce a curve of any length to a bounded number of points
    compare.py   list how runs differ
    file.py      write a selection of answers and the page into one HTML file
    serve.py     the command, and the server
    static/      the page: HTML, CSS and JavaScript

An answer has a bounded size however long the run is. Answering writes nothing, loads no model and imports no torch.
"""

from taut.commands.registry import LOOK, Command

PAGE = Command(
    "RUN|DIR ... [out=FILE.html]",
    "show runs in a browser: every token, rollout and curve, live or in one file",
    "taut_tools.page.serve:run",
    "taut_tools.page.settings:Page",
    group=LOOK,
    many="runs",
)
