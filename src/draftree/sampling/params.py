"""Sampling parameters, with the names and defaults of vLLM's `SamplingParams` where it has them."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from draftree.core.errors import InvalidRequestError, require_extra, suggestion
from draftree.sampling.grammar.ebnf import require_bounded_grammar
from draftree.sampling.grammar.regex import parse
from draftree.sampling.grammar.schema import schema_text

MAX_IDS = 2**18  # token ids of one list: as many as the largest vocabularies have
MAX_STOPS = 64  # stop strings, each of which is matched at every character of the text
MAX_STOP_CHARS = 1024  # characters of one stop string
MAX_STOP_IDS = 4096
MAX_BAD_WORDS = 1024  # words, each of which is encoded twice and matched at every token of the text
MAX_BAD_WORD_CHARS = 256  # characters of one word
MAX_PREDICTION = 2**20  # characters or token ids

Params = TypeVar("Params")
Check = Callable[[str, Any], Any]
"""Returns the value of a parameter, by its name, in the form in which it is stored; raises InvalidRequestError."""
ELSEWHERE = {
    "max_new_tokens": "did you mean 'max_tokens'?",
    "max_completion_tokens": "did you mean 'max_tokens'?",
    "num_return_sequences": "did you mean 'n'?",
    "best_of": "all of the 'n' generated texts are returned",
    "do_sample": "temperature=0 takes the most likely token, a temperature above 0 samples",
    "eos_token_id": "add end tokens by 'stop_token_ids', or ignore the model's by 'ignore_eos'",
    "stop_strings": "did you mean 'stop'?",
    "top_logprobs": "did you mean 'logprobs'?",
    "suppress_tokens": "forbid tokens by logit_bias={id: -inf}",
    "structured_outputs": "give one of 'json_schema', 'regex' and 'grammar'",
    "guided_decoding": "give one of 'json_schema', 'regex' and 'grammar'",
    "response_format": "did you mean 'json_schema'?",
    "guided_json": "did you mean 'json_schema'?",
    "guided_regex": "did you mean 'regex'?",
    "guided_grammar": "did you mean 'grammar'?",
}
"""Names that other libraries use for these parameters, if their spelling is too different for a suggestion."""


def names_are_checked(cls: type[Params]) -> type[Params]:
    """Make a dataclass refuse unknown keyword arguments with a suggestion instead of Python's TypeError."""
    build: Callable[..., None] = cls.__init__
    known = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @functools.wraps(build)
    def init(self: Params, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                hint = ELSEWHERE.get(name) or suggestion(name, known)
                raise InvalidRequestError(f"unknown sampling parameter '{name}': {hint}", param=name)
        build(self, *args, **values)

    cls.__init__ = init  # type: ignore[assignment]
    return cls


def refuse(name: str, value: Any, allowed: str) -> InvalidRequestError:
    """Return the error for a value that is not allowed; a long value is shortened."""
    return InvalidRequestError(
        f"{name}={shown(value)} is refused: {name} must be {allowed}", param=name.partition("[")[0]
    )


def shown(value: Any) -> str:
    """Return a value for a message, shortened if it is too deep or too large."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    short.maxlist = short.maxtuple = short.maxdict = 40
    text = short.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def whole(low: int, high: int | None = None, *, optional: bool = False, everything: str = "") -> Check:
    """Return a check for whole numbers in a range, None if it is optional, and -1 if that means `everything`."""
    allowed = "a whole number " + (f"of at least {low}" if high is None else f"from {low} to {high}")
    allowed += (f", -1 ({everything})" if everything else "") + (" or None" if optional else "")

    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise refuse(name, value, allowed)
        number = int(value)
        if (number < low or (high is not None and number > high)) and not (everything and number == -1):
            raise refuse(name, value, allowed)
        return number

    return check


def number(low: float, high: float, allowed: str, *, above_low: bool = False, optional: bool = False) -> Check:
    """Return a check for finite numbers in a range, which `allowed` describes, and None if it is optional."""

    def check(name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise refuse(name, value, allowed)
        # compared before conversion: a whole number may be too large for a float
        if not low <= value <= high or (above_low and value == low):  # type: ignore[operator]
            raise refuse(name, value, allowed)
        return float(value)

    return check


def strings(most: int, chars: int, *, may_be_one: bool = False) -> Check:
    """Return a check for lists of at most so many strings, none empty or longer; None is an empty list.

    Args:
        may_be_one: whether a string stands for a list of it.
    """
    allowed = "a list of strings that are not empty"

    def check(name: str, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        if isinstance(value, str) and may_be_one:
            value = (value,)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise refuse(name, value, allowed)
        require_length(name, value, most, "strings")
        for item in value:
            if not isinstance(item, str) or not item:
                raise refuse(name, value, allowed)
            require_length(name, item, chars, "characters in one string")
        return tuple(value)

    return check


def token_ids(most: int = MAX_IDS) -> Check:
    """Return a check for lists of at most so many token ids; None is an empty list."""
    allowed = "a list of token ids, which are whole numbers of at least 0"

    def check(name: str, value: Any) -> tuple[int, ...]:
        if value is None:
            return ()
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
            raise refuse(name, value, allowed)
        require_length(name, value, most, "token ids")
        if not all(map(_is_token_id, value)):
            raise refuse(name, value, allowed)
        return tuple(map(int, value))

    return check


def _is_token_id(value: Any) -> bool:
    if type(value) is int:  # first, because the general test takes most of the time of long lists
        return value >= 0
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0


def require_length(name: str, value: Sized, most: int, items: str) -> None:
    """Raise InvalidRequestError for a value with more than `most` items, named in plural."""
    if len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} {items}: at most {most} are allowed", param=name)


def one_of(values: Sequence[Any]) -> Check:
    """Return a check for one of these values."""

    def check(name: str, value: Any) -> Any:
        for allowed in values:
            if type(value) is type(allowed) and value == allowed:
                return allowed
        raise refuse(name, value, " or ".join(map(repr, values)))

    return check


def flag(name: str, value: Any) -> bool:
    """Check for a bool."""
    if not isinstance(value, bool | np.bool_):
        raise refuse(name, value, "True or False")
    return bool(value)


NGRAM_SCOPES = ("all", "generated")
_CONSTRAINTS = ("json_schema", "regex", "grammar")
_FRESH_SEED = -1
_OF_MODEL = "default: the model's, or"
_MIN_TEMPERATURE = 1e-4  # below it logits over temperature may leave float32's range
_MAX_TEMPERATURE = 1e4  # far above it the temperature itself does, and a forbidden token's -inf becomes NaN
_COUNT = whole(0, optional=True, everything="all tokens")
_PENALTY = number(-2.0, 2.0, "a number from -2 to 2")
_LARK = re.compile(r"^(?:%llguidance|[?!]?\w+(?:\.\d+)?\s*:(?!:=))", re.MULTILINE)
"""A directive or a rule of a Lark grammar."""


def _temperature(name: str, value: Any) -> float | None:
    allowed = f"0 (the most likely token) or a number from {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE:.0f}"
    temperature: float | None = number(0.0, _MAX_TEMPERATURE, allowed, optional=True)(name, value)
    if temperature is not None and 0 < temperature < _MIN_TEMPERATURE:
        raise refuse(name, value, allowed)
    return temperature


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    allowed = "a mapping from token ids, which are whole numbers of at least 0, to numbers"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refuse(name, value, allowed)
    require_length(name, value, MAX_IDS, "token ids")
    if not all(map(_is_token_id, value)):
        raise refuse(name, value, allowed)
    return {int(token): _bias(f"{name}[{token}]", bias) for token, bias in value.items()} or None


def _bias(name: str, value: Any) -> float:
    if isinstance(value, numbers.Real) and value == -math.inf:
        return -math.inf
    return number(-100.0, 100.0, "a number from -100 to 100, or -inf to forbid the token")(name, value)


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    words: tuple[str, ...] = strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)(name, value)
    if not all(word.strip() for word in words):
        raise refuse(name, value, "a list of strings with more than spaces in them")
    return words


def _allowed_ids(name: str, value: Any) -> tuple[int, ...] | None:
    ids = tuple(dict.fromkeys(token_ids()(name, value)))
    if value is not None and not ids:
        raise refuse(name, value, "a list of at least one token id")
    return ids or None


def _seed(name: str, value: Any) -> int | None:
    seed = whole(-(2**63), 2**64 - 1, optional=True)(name, value)
    return None if seed == _FRESH_SEED else seed


def _prediction(name: str, value: Any) -> str | tuple[int, ...] | None:
    if isinstance(value, str):
        require_length(name, value, MAX_PREDICTION, "characters")
    tokens: str | tuple[int, ...] = value if isinstance(value, str) else token_ids(MAX_PREDICTION)(name, value)
    if value is not None and not tokens:
        raise refuse(name, value, "a text or token ids, at least one")
    return tokens or None


def _json_schema(name: str, value: Any) -> str | None:
    if value is None:
        return None
    try:
        return schema_text(value)
    except ValueError as error:
        reason = f"a JSON schema: a dictionary, JSON text, or a pydantic model ({_clipped(error)})"
        raise refuse(name, value, reason) from error


def _clipped(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 200 else text[:197] + "..."


def _text(require: Callable[[str], object]) -> Check:
    """Return a check for a text that a function accepts without a ValueError, or None."""

    def check(name: str, value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise refuse(name, value, "a text that is not empty")
        try:
            require(value)
        except ValueError as error:
            raise InvalidRequestError(f"{name}={shown(value)} is refused: {_clipped(error)}", param=name) from error
        return value

    return check


def _require_ebnf(text: str) -> None:
    if "::=" not in text and _LARK.search(text):
        raise ValueError('it is a Lark grammar: write EBNF, such as root ::= "yes" | "no"')
    require_bounded_grammar(text)


def parameter(default: Any, check: Check, text: str) -> Any:
    """Return a field of a dataclass of parameters, with the check of its values and its help."""
    return dataclasses.field(default=default, metadata={"help": text, "check": check})


def check_fields(params: Any) -> None:
    """Replace the values of a frozen dataclass by what the checks of its parameters return."""
    for field in dataclasses.fields(params):
        if check := field.metadata.get("check"):
            object.__setattr__(params, field.name, check(field.name, getattr(params, field.name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Values of the parameters for which a model may have defaults; by default the model's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


NEUTRAL = Sampling()


@names_are_checked
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request. Validated on construction.

    `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` are None if they are not given: then the model's
    defaults hold, those of its `generation_config.json`, or else those of `Sampling`.

    Sequences are stored as tuples (an absent one is empty, but `allowed_token_ids` stays None) and numbers as Python's
    own types; `logit_bias` is copied.

    Raises:
        InvalidRequestError: an unknown name, a wrong type, a value out of range, or two values that contradict each
            other.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1, stop="###").stop
        ('###',)
    """

    n: int = parameter(1, whole(1), "number of texts per prompt")
    temperature: float | None = parameter(
        None, _temperature, f"0 takes the most likely token, larger values flatten the distribution; {_OF_MODEL} 1"
    )
    top_p: float | None = parameter(
        None,
        number(0.0, 1.0, "a number above 0 and up to 1", above_low=True, optional=True),
        f"keep the most likely tokens that together have this probability, 1 keeps all; {_OF_MODEL} 1",
    )
    top_k: int | None = parameter(
        None, whole(-1, optional=True), f"keep this many of the most likely tokens, 0 or -1 keeps all; {_OF_MODEL} 0"
    )
    min_p: float | None = parameter(
        None,
        number(0.0, 1.0, "a number from 0 to 1", optional=True),
        f"keep tokens at least this fraction as likely as the most likely one, 0 keeps all; {_OF_MODEL} 0",
    )
    repetition_penalty: float | None = parameter(
        None,
        number(0.01, 100.0, "a number from 0.01 to 100 (1 is off)", optional=True),
        f"above 1 makes tokens of the prompt and the output less likely, 1 is off; {_OF_MODEL} 1",
    )
    presence_penalty: float = parameter(0.0, _PENALTY, "subtracted from the logit of every token that is in the output")
    frequency_penalty: float = parameter(
        0.0, _PENALTY, "subtracted from a token's logit once for each time it is in the output"
    )
    logit_bias: Mapping[int, float] | None = parameter(
        None, _logit_bias, "added to the logits of these token ids; -inf forbids a token"
    )
    no_repeat_ngram_size: int = parameter(
        0, whole(0), "no run of this many tokens occurs twice; 0 is off, 1 forbids every token that has occurred"
    )
    ngram_scope: str = parameter(
        "all", one_of(NGRAM_SCOPES), "where no_repeat_ngram_size applies: 'all' is prompt and output, or 'generated'"
    )
    bad_words: Sequence[str] | None = parameter(
        None,
        _bad_words,
        "words that must not occur in the tokenizer's own split of them, with or without a space before",
    )
    allowed_token_ids: Sequence[int] | None = parameter(
        None,
        _allowed_ids,
        "the only token ids that may be generated; this includes the end of text, which is allowed only if listed",
    )
    min_tokens: int = parameter(0, whole(0), "no end of text, stop token or stop string among this many first tokens")
    max_tokens: int | None = parameter(
        16, whole(1, optional=True), "maximum number of tokens; none continues to the end of the model's context"
    )
    stop: str | Sequence[str] | None = parameter(
        None, strings(MAX_STOPS, MAX_STOP_CHARS, may_be_one=True), "strings that end the text; not part of the text"
    )
    stop_token_ids: Sequence[int] | None = parameter(None, token_ids(MAX_STOP_IDS), "token ids that end the text")
    ignore_eos: bool = parameter(False, flag, "continue after the model's end-of-text token")
    include_stop_str_in_output: bool = parameter(False, flag, "keep the stop string at the end of the text")
    detokenize: bool = parameter(True, flag, "convert tokens to text; otherwise a completion has token ids only")
    skip_special_tokens: bool = parameter(True, flag, "leave special tokens out of the text")
    spaces_between_special_tokens: bool = parameter(
        True, flag, "keep the spaces that some tokenizers write between adjacent special tokens"
    )
    seed: int | None = parameter(
        None, _seed, "the same seed gives the same text; none or -1 draws a fresh one and reports it"
    )
    logprobs: int | None = parameter(
        None,
        _COUNT,
        "report log-probabilities: 0 for the chosen tokens, n for the n most likely as well, -1 for all tokens",
    )
    prompt_logprobs: int | None = parameter(
        None, _COUNT, "report log-probabilities of the prompt's tokens, with the same numbers as for logprobs"
    )
    truncate_prompt_tokens: int | None = parameter(
        None,
        whole(1, optional=True, everything="as many as leave room for max_tokens"),
        "keep only this many of the prompt's last tokens; -1 keeps as many as leave room for max_tokens",
    )
    prediction: str | Sequence[int] | None = parameter(
        None, _prediction, "expected text, from which the drafter 'prediction' drafts; the output does not depend on it"
    )
    json_schema: Mapping[str, Any] | str | type[Any] | None = parameter(  # noqa: RUF009, as the others
        None, _json_schema, "the text is JSON that follows this schema: a dictionary, JSON text, or a pydantic model"
    )
    regex: str | None = parameter(None, _text(parse), "the whole text matches this regular expression")
    grammar: str | None = parameter(
        None, _text(_require_ebnf), "the whole text follows this grammar, EBNF with a rule 'root'"
    )
    grammar_prefix: str | None = parameter(
        None,
        _text(require_bounded_grammar),
        "EBNF of what precedes the text of json_schema, regex or grammar, such as reasoning; Token(ID) is a token",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n > 1 and self.temperature == 0:
            raise InvalidRequestError(
                f"n={self.n} texts at temperature=0 would all be the same: set n=1 or a temperature above 0",
                param="n",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: "
                "lower the former or raise the latter",
                param="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings are matched in the text, and detokenize=False produces none: "
                "leave one of them out, or use stop_token_ids",
                param="stop",
            )
        names = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(names) > 1:
            raise InvalidRequestError(
                f"{names[0]} and {names[1]} were given, and only one is allowed: keep one", param=names[1]
            )
        if names:
            require_extra("grammar", f"{names[0]} needs", error=partial(InvalidRequestError, param=names[0]))

    def resolved(self, defaults: Sampling = NEUTRAL) -> Self:
        """Return the parameters with a model's defaults in place of those that are not given.

        Raises:
            InvalidRequestError: as the constructor.
        """
        missing = {field.name for field in dataclasses.fields(Sampling) if getattr(self, field.name) is None}
        values: dict[str, Any] = {name: getattr(defaults, name) for name in missing}
        return dataclasses.replace(self, **values) if missing else self

    @property
    def sampling(self) -> Sampling:
        """The values of the parameters for which a model may have defaults, as far as they are given."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Sampling)}
        return Sampling(**{name: value for name, value in values.items() if value is not None})

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The kind (`json_schema`, `regex` or `grammar`) and the text of the grammar; None if there is none."""
        values = ((name, getattr(self, name)) for name in _CONSTRAINTS)
        return next(((name, text) for name, text in values if text is not None), None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())
