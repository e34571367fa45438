"""What the scripts of the Python clients ask, and what the served model answers."""

from pydantic import BaseModel

MODEL = "scripted"
QUESTION = "How is Rome?"
AS_JSON = "How is Rome? Answer as JSON."
THOUGHT = "Hm."
ANSWER = "It is 18 degrees in Rome."


class Weather(BaseModel):
    """The answer as JSON."""

    city: str
    degrees: int


ROME = Weather(city="Rome", degrees=18)


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name
    """
    assert city == "Rome"
    return "18 degrees"
