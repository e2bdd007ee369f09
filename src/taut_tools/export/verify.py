"""``taut verify FILE.gguf contract=DIR``: verify a GGUF file of any program against its model's contract."""

from __future__ import annotations

from taut.commands.settings import Verify
from taut.commands.verify import Finding, limits_of, rounded
from taut.config import changed, home_path, replace
from taut.conflicts import conflict
from taut.errors import ConfigError
from taut.evals.contract import read_contract
from taut.evals.round_trip import Room, load_anew
from taut.inference.factory import one_device, open_renderer
from taut.io import extras
from taut.models import architecture


def verify_gguf(config: Verify) -> list[Finding]:
    """Compare a GGUF file of any program with the contract of its model."""
    if config.contract is None:
        raise ConfigError(
            f"model={config.model} is a GGUF file, which has no contract; expected the directory of the model it was "
            "made from; set contract=DIR"
        )
    unread = "engine urls adapter dtype attention cpu_matmul local images"
    for key in changed(config, unread.split()):
        raise conflict(config, key, "a GGUF file is read by itself", f"leave `{key}` out")
    extras.require("gguf", f"model={config.model}")
    from taut_tools.export import gguf  # imports the library

    # Compare the keys that llama.cpp reads.
    contract = read_contract(home_path(config.contract))
    rendering = open_renderer(replace(config, {"model": config.contract}))
    gguf.require_convertible(rendering.config)
    file = gguf.open_gguf(home_path(config.model))
    tokenizer, stop_ids = rendering.renderer.tokenizer, [stop.id for stop in contract.stops]
    wanted = gguf.vocabulary(tokenizer, rendering.config, stop_ids, rendering.config.vocab_size)
    findings = [
        Finding(
            name, "failed" if wrong else "passed", "; ".join(wrong) or "as in the contract's model"
        )
        for name, wrong in gguf.differences(file, rendering.config, wanted).items()
    ]
    # Put its weights into the model, and compare answers and logprobs.
    limits = limits_of(gguf.bits_of(file), config)
    device = one_device(config.device)
    scorer = load_anew(config.contract, Room(device), config.trust_remote_code)
    kinds = gguf.read_weights(file, architecture.unwrap(scorer.model))
    findings.insert(0, Finding("dtype", "skipped", f"{kinds}; were {contract.facts.dtype}"))
    if not contract.goldens:
        why = f"the contract has no golden prompts ({contract.note})"
        return [*findings, Finding("continuations", "skipped", why)]
    return findings + rounded(contract, scorer, rendering, limits)
