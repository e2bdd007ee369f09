"""A run's curves and samples in MLflow: ``log.sinks=["examples/mlflow/report.py:MLflow"]`` (docs/runs.md).

MLflow itself is set by its environment variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow

PREFIXES = {"step": "train", "rollout": "rollout", "eval": "eval", "utilization": "system"}
LEFT_OUT = ("step", "time")
LONGEST = 6000
"""Characters of a parameter that MLflow takes."""


class MLflow:
    """One MLflow run for one ``out``: a resumed run goes on with the one that has its id as a tag."""

    def __init__(self, out: Path, settings: dict[str, Any], run_id: str) -> None:
        tag = "taut.run_id"
        found = mlflow.search_runs(filter_string=f"tags.`{tag}` = '{run_id}'", output_format="list")
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
            return
        mlflow.start_run(run_name=out.name)
        mlflow.set_tag(tag, run_id)
        mlflow.log_params({key: str(value)[:LONGEST] for key, value in settings.items()})

    def __call__(self, event: dict[str, Any]) -> None:
        prefix = PREFIXES.get(event["kind"])
        numbers = {
            f"{prefix}/{name}": float(value)
            for name, value in event.items()
            if isinstance(value, int | float) and name not in LEFT_OUT
        }
        if prefix and numbers:
            mlflow.log_metrics(numbers, step=event["step"])
        if event["kind"] == "end":
            mlflow.set_tag("taut.outcome", event["outcome"])

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        if rows:
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            mlflow.log_table(columns, artifact_file=f"samples/step-{step:06}.json")

    def close(self) -> None:
        mlflow.end_run()
