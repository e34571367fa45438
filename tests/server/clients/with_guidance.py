"""guidance: chat and JSON."""

from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, Weather
from guidance import assistant, gen, json, models, user

model = models.OpenAI(MODEL, echo=False)
with user():
    ask, as_json = model + QUESTION, model + AS_JSON
with assistant():
    assert (ask + gen("text"))["text"] == ANSWER
    assert Weather.model_validate_json((as_json + json("weather", schema=Weather))["weather"]) == ROME
