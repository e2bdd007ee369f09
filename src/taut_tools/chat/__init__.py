"""``taut chat``: a conversation with a model in the terminal."""

from taut.commands.registry import USE, Command

CHAT = Command(
    "MODEL",
    "chat with a model in the terminal",
    "taut_tools.chat.chat:run",
    "taut_tools.chat.settings:Chat",
    group=USE,
    alone=("model",),
    result="taut_tools.chat.chat:Conversation",
)
