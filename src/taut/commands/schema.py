"""``taut schema [METHOD]``: the JSON schema of a run's TOML file, with which an editor completes and checks its keys.

    taut schema dpo > dpo.schema.json

and as the first line of the file, for editors that use Taplo: ``#:schema dpo.schema.json``. No key is required by it:
what the file leaves out may stand on the command line. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
import sys

from taut.commands.keys import schema_of
from taut.config import configclass
from taut.errors import ConfigError
from taut.methods import METHODS


@configclass
class Schema:
    """Print a JSON schema."""

    method: str = "sft"
    """The training method whose runs the schema is for."""


def run(config: Schema) -> int:
    """Print the schema."""
    method = config.method.replace("-", "_")
    schema = schema_of(method)
    if schema is None:
        near = difflib.get_close_matches(method, METHODS, n=1)
        hint = f"did you mean {near[0]}" if near else f"expected one of {', '.join(METHODS)}"
        raise ConfigError(f"found method={config.method}, which has no schema here; {hint}")
    sys.stdout.write(json.dumps(schema, indent=1, ensure_ascii=False) + "\n")
    return 0
