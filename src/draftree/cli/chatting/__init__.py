"""Parts of `draftree chat`: the conversation, its input, the commands and the answers."""
