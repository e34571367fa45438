"""instructor: structured output in its modes, whole and partial."""

import instructor
from asked import AS_JSON, MODEL, ROME, Weather

for mode in (None, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_provider(f"openai/{MODEL}", **({} if mode is None else {"mode": mode}))
    ask = {"response_model": Weather, "messages": [{"role": "user", "content": AS_JSON}], "max_retries": 0}
    assert client.create(**ask).model_dump() == ROME.model_dump(), mode
    assert list(client.create_partial(**ask))[-1].model_dump() == ROME.model_dump(), mode
