"""Prompts: shipped ones, templates and installed packages give distinct prompts, the same in every run."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PathDistribution, distributions
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from draftree.cli.prompt import json_prompt
from draftree.cli.train_data import is_own
from draftree.core.errors import ConfigurationError
from draftree.train.data.prompts import SLOT, Template, expanded, licence_of, package_prompts, prompt_set, shipped

NAME = "samplepack"
SOURCE = '''"""A module with a long description that says what it is for, in several words and in more than one line.

It continues with a second paragraph that explains the limits of the module and gives a hint about its use in other
programs, so that a prompt can quote it as a text that is long enough.
"""


def add_all(numbers, start=0):
    """Add numbers."""
    total = start
    for number in numbers:
        total += number
    return total


def tiny(x):
    return x


def stub(
    first,
    second,
    third,
): ...
'''


def lines() -> list[str]:
    content = files("draftree.train.data.shipped").joinpath("prompts.jsonl").read_text("utf-8")
    return content.splitlines()


def test_shipped_prompts_are_valid_distinct_and_varied() -> None:
    assert len(lines()) >= 300
    parsed = [json_prompt(line, number, f"prompts.jsonl:{number}", 1) for number, line in enumerate(lines(), 1)]
    assert len({prompt.labels["id"] for prompt in parsed}) == len(parsed)
    assert len({prompt.labels["category"] for prompt in parsed}) >= 15
    texts = {json.dumps(prompt.prompt or list(prompt.messages or ())) for prompt in parsed}
    assert len(texts) == len(parsed)
    assert max(map(len, texts)) < 3000
    prompts = shipped()
    assert [prompt.is_text for prompt in prompts] == [prompt.prompt is not None for prompt in parsed]
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)
    systems = {prompt.messages[0]["content"] for prompt in prompts if prompt.messages[0]["role"] == "system"}
    assert len(systems) >= 8
    assert sum(len(prompt.messages) >= 3 and prompt.messages[1]["role"] == "assistant" for prompt in prompts) >= 10


def test_expanded_prompts_are_distinct_complete_and_continue_smaller_sets() -> None:
    prompts = [prompt.text for prompt in expanded(5000)]
    assert len(prompts) == len(set(prompts)) == 5000
    assert not any(SLOT.search(prompt) for prompt in prompts)
    assert any("an ironic" in prompt for prompt in prompts)
    assert not any(" a ironic" in prompt for prompt in prompts)
    assert [prompt.text for prompt in expanded(100)] == prompts[:100]
    content = json.loads(files("draftree.train.data.shipped").joinpath("templates.json").read_text("utf-8"))
    assert all(len(set(words)) == len(words) for words in content["slots"].values())
    sizes = [Template.of(entry["prompt"], content["slots"]).size for entry in content["templates"]]
    assert sum(sizes) > 10_000


def test_templates_visit_every_combination_once() -> None:
    template = Template.of("{a} and {a2} with {b}", {"a": ["x", "y", "z"], "b": ["1", "2"]})
    assert template.size == 18
    found = list(template.prompts())
    assert len(found) == len(set(found)) == 12, "equal words of one slot are left out"
    assert {prompt[0] for prompt in found} == {"x", "y", "z"}
    with pytest.raises(KeyError):
        Template.of("{unknown}", {"a": ["x"]})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:

    folder = tmp_path / f"{NAME}-1.0.dist-info"
    folder.mkdir()
    prose = "This package counts things that are worth counting, and it does so with care. " * 4
    (folder / "METADATA").write_text(f"Name: {NAME}\nVersion: 1.0\nLicense-Expression: MIT\n\n{prose}\n")
    names = [f"{NAME}/__init__.py", f"{NAME}/broken.py", f"{NAME}/tests.py"]
    (folder / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    (tmp_path / NAME).mkdir()
    for name, text in zip(names, (SOURCE, "def broken(:\n", SOURCE.replace("add_all", "test_it")), strict=True):
        (tmp_path / name).write_text(text)
    distribution: Distribution = PathDistribution(folder)
    monkeypatch.setattr("draftree.train.data.prompts.distributions", lambda: [distribution])
    return distribution


def test_a_whole_licence_in_the_metadata_is_not_its_name(tmp_path: Path) -> None:
    (tmp_path / "other-2.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: other\nLicense: ====\n        Terms\n"
    text += "Classifier: License :: OSI Approved :: BSD License\n"
    (tmp_path / "other-2.dist-info" / "METADATA").write_text(text)
    assert licence_of(PathDistribution(tmp_path / "other-2.dist-info")) == "BSD License"


def test_packages_are_quoted_with_their_licence(package: Any) -> None:
    prompts, names = package_prompts(50)
    texts = [prompt.text for prompt in prompts]
    assert names == [f"{NAME}==1.0 (MIT)"]
    assert licence_of(package) == "MIT"
    assert len(texts) == len(set(texts)) == 3
    assert any("This package counts things" in text for text in texts)
    assert any("A module with a long description" in text for text in texts)
    function = next(text for text in texts if "def add_all" in text)
    assert "```python\ndef add_all(numbers, start=0):" in function
    assert "return total\n```" in function
    assert not any("test_it" in text or "def tiny" in text or "def stub" in text for text in texts)
    assert [prompt.text for prompt in package_prompts(2)[0]] == texts[:2]
    found = prompt_set("packages:2")
    assert found.source.count == 2
    assert f"{NAME}==1.0 (MIT)" in found.licence


def test_real_packages_give_the_same_prompts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the installed packages, draftree among them: all of them take seconds."""
    installed = {str(one.metadata["Name"]).lower(): one for one in distributions()}
    some = {"draftree", *sorted(installed)[:30]}
    monkeypatch.setattr("draftree.train.data.prompts.distributions", lambda: [installed[name] for name in some])
    first, names = package_prompts(60)
    assert len(first) == 60
    assert len(names) >= 10
    assert not any(name.startswith("draftree==") for name in names)
    assert [prompt.text for prompt in package_prompts(60)[0]] == [prompt.text for prompt in first]


def test_names_of_sources() -> None:
    assert is_own("expanded:5")
    assert not is_own("prompts.jsonl")
    own = prompt_set("shipped").source
    assert (own.count, len(own.sha256)) == (len(lines()), 64)
    assert prompt_set("expanded:7").source.count == 7
    for name in ("expanded:0", "packages:x", "shipped:3", "unknown"):
        with pytest.raises(ConfigurationError, match=f"prompts are '{name}': give 'shipped'"):
            prompt_set(name)
