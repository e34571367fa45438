"""A missing extra is refused before anything is fetched or loaded; the message names the command to install it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_samples import save_tiny_model
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.core.errors import (
    EXTRAS,
    ConfigurationError,
    InvalidRequestError,
    WeightsError,
    import_extra,
    require_extra,
)
from draftree.weights import install

MODEL = "smollm2-135m-instruct"
Without = Callable[..., None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny"), chat=True))


@pytest.fixture(autouse=True)
def nothing_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a download that fails the test."""

    def fetch(*arguments: object, **keywords: object) -> None:
        raise AssertionError("fetched")

    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(install, "fetch_source", fetch)


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test."""

    def load(*arguments: object, **keywords: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("draftree.loading.load._LocalLoad.run", load)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Without:
    """As if these packages were not installed."""

    def hide(*packages: str) -> None:
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)

    return hide


def test_every_extra_is_one_of_the_project_and_brings_its_package() -> None:
    import tomllib

    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    assert set(declared) - {"compiler", "dev", "docs"} == set(EXTRAS)  # of programs that are run, not imported
    for name, package in EXTRAS.items():
        distribution = {"PIL": "pillow"}.get(package, package)
        assert any(line.startswith(distribution) for line in declared[name])


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_message_names_the_package_and_the_command(extra: str, without: Without) -> None:
    without(EXTRAS[extra])
    for refuse in (require_extra, import_extra):
        with pytest.raises(ConfigurationError) as error:
            refuse(extra, "this needs", error=ConfigurationError)
        said = f"this needs the Python package '{EXTRAS[extra]}', which is not installed"
        assert str(error.value) == f"{said}: run pip install 'draftree[{extra}]'"


def test_a_broken_package_is_not_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xgrammar.py").write_text("raise ImportError('no libexample.so')")
    monkeypatch.delitem(sys.modules, "xgrammar", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    require_extra("grammar", "this needs", error=ConfigurationError)
    with pytest.raises(ConfigurationError, match=r"which cannot be imported \(no libexample\.so\): run pip install"):
        import_extra("grammar", "this needs", error=ConfigurationError)


@pytest.mark.parametrize("given", [{"json_schema": {}}, {"regex": "a"}, {"grammar": 'root ::= "a"'}])
def test_parameters_with_a_grammar_are_refused_when_built(given: dict[str, Any], without: Without) -> None:
    without("xgrammar")
    with pytest.raises(InvalidRequestError, match=r"pip install 'draftree\[grammar\]'"):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("model", "draft"),
    [
        (MODEL, None),
        ("TINY", f"model:{MODEL}"),
        ("TINY", f"ngram+model:{MODEL}"),
        ("TINY", "model:weights.gguf"),
        ("TINY", "grammar"),
    ],
)
def test_the_library_refuses_before_the_target_is_loaded(
    model: str, draft: str | None, tiny: str, without: Without, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    if model == "TINY":
        monkeypatch.setattr("draftree.loading.load._LocalLoad.run", None)
    without("gguf", "xgrammar")
    extra = "grammar" if draft == "grammar" else "gguf"
    with pytest.raises((WeightsError, ConfigurationError), match=rf"pip install 'draftree\[{extra}\]'"):
        LLM(tiny if model == "TINY" else model, draft)


COMMANDS = [
    (["generate", MODEL, "ab"], "gguf"),
    (["generate", MODEL, "ab", "--json-schema", "{}"], "grammar"),
    (["generate", "nowhere", "ab", "--regex", "a"], "grammar"),
    (["generate", "TINY", "ab", "--draft", f"model:{MODEL}"], "gguf"),
    (["demo"], "gguf"),
    (["models", "get", MODEL], "gguf"),
    (["models", "get", "stories15m", "gemma3-270m"], "gguf"),
    (["models", "get", "weights.gguf"], "gguf"),
    (["bench", MODEL, "--draft", "ngram"], "gguf"),
    (["bench", "TINY", "--draft", f"model:{MODEL}"], "gguf"),
    (["bench", "passes", MODEL], "gguf"),
    (["bench", "perplexity", MODEL, "--text", "pyproject.toml"], "gguf"),
    (["bench", "report", "nowhere.jsonl", "--plots", "plots"], "plots"),
    (["doctor", "TINY", "--draft", f"model:{MODEL}"], "gguf"),
    (["explain", MODEL, "--draft", "ngram"], "gguf"),
    (["tune", "layers", "TINY", "--prompts", "nowhere.jsonl"], "tune"),
]


@pytest.mark.parametrize(("arguments", "extra"), COMMANDS, ids=[" ".join(arguments) for arguments, _ in COMMANDS])
def test_commands_refuse_before_anything_is_fetched_or_loaded(
    arguments: Sequence[str],
    extra: str,
    tiny: str,
    without: Without,
    nothing_loaded: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    (tmp_path / "pyproject.toml").write_text("a text")
    without(*EXTRAS.values())
    assert run([word.replace("TINY", tiny) for word in arguments]) in (1, 2)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert f"run pip install 'draftree[{extra}]'" in printed.err
    assert printed.err.count("\n") == 1, printed.err


def test_a_missing_grammar_package_is_refused_without_torch() -> None:
    code = (
        "import sys; sys.modules['xgrammar'] = None\n"
        "from draftree.cli.main import run\n"
        "assert run(['generate', 'nowhere', 'ab', '--json-schema', '{}']) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.decode()
    assert b"draftree[grammar]" in done.stderr
