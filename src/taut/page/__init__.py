"""The page of ``taut page``: questions about runs and their answers, and the page that asks them.

    answers.py   a question, written as a path, and its answer, from what a run has recorded
    history.py   the events of a run, read as they are written, the numbers of each kept as a row
    curves.py    a curve of any length in a bounded number of points
    compare.py   how runs differ
    file.py      a selection of answers and the page in one HTML file
    static/      the page: HTML, CSS and JavaScript

An answer has a bounded size however long the run is. Nothing is written, no model is loaded, no torch here.
"""
