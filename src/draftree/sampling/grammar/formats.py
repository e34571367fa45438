"""Formats of JSON strings as regular expressions. Each is the format, or a part of it without rare forms.

Source: JSON Schema 2020-12 validation, section 7.3, and the RFCs that it names.
"""

from __future__ import annotations

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_LEAP}|(?:[2468][048]|[13579][26]|0[48])00)-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9a-fA-F]"
_WORD = f"{_HEX}{{1,4}}"
_IPV6 = "|".join(
    [f"(?:{_WORD}:){{7}}{_WORD}", f"::(?:{_WORD}(?::{_WORD}){{0,6}})?"]
    + [f"{_WORD}(?::{_WORD}){{{before - 1}}}::(?:{_WORD}(?::{_WORD}){{0,{6 - before}}})?" for before in range(1, 7)]
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}\.){{0,2}}{_LABEL}"
_ATOM = "[A-Za-z0-9_+-]+"
_NAME = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_NAME}\.)+[A-Za-z]{{2,63}}"
_SIGN = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_PATH = f"(?:/{_SIGN}*)*"
_REST = rf"(?:\?(?:{_SIGN}|[/?])*)?(?:#(?:{_SIGN}|[/?])*)?"
_AUTHORITY = rf"//(?:{_NAME}\.)*{_NAME}(?::[0-9]{{1,4}})?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}{_PATH}|/?{_SIGN}+{_PATH}){_REST}"
_REFERENCE = f"(?:{_URI}|(?:{_AUTHORITY}{_PATH}|(?:/{_SIGN}+{_PATH})?){_REST})"
_VARIABLE = r"\{[+#./;?&]?[A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)*\*?\}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": _EMAIL,
    "hostname": _HOST,
    "idn-email": _EMAIL,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "iri": _URI,
    "iri-reference": _REFERENCE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "time": _TIME,
    "uri": _URI,
    "uri-reference": _REFERENCE,
    "uri-template": rf"(?:[A-Za-z0-9._~:/?#@!$&()*+,;=-]|%{_HEX}{{2}}|{_VARIABLE})*",
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
}
"""Expressions by the name of the format. Other formats are annotations."""
