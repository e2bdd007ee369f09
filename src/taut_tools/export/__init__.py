"""``taut export`` and ``taut push``: write a model for other programs, and upload it to the Hugging Face hub.

export.py       ``taut export``; gguf.py writes the file of llama.cpp, modelfile.py the file of Ollama
verify.py       ``taut verify FILE.gguf``: a file against the contract of the model that it was made from
push.py         ``taut push``; card.py writes the model card, hub_upload.py uploads
"""

from taut.commands.registry import SAVE, Command

EXPORT = Command(
    "MODEL out=FILE.gguf",
    "export one GGUF file for llama.cpp and programs built on it",
    "taut_tools.export.export:run",
    "taut_tools.export.settings:Export",
    group=SAVE,
    alone=("model",),
    extras=("train", "gguf"),
    result="taut_tools.export.export:export",
)
PUSH = Command(
    "RUN NAME [private=false] [out=DIR]",
    "upload the model of a run, with a model card, to the Hugging Face hub",
    "taut_tools.export.push:run",
    "taut_tools.export.settings:Push",
    group=SAVE,
    alone=("run", "name"),
    result="taut_tools.export.push:push",
)
