"""Generate docs/papers.md: every paper that a source file names, with the files that follow it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftree.drafters import DRAFTERS
from draftree.heads.folders import CLASSES
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS
from generator.markdown import code, page, table

__all__ = ["TITLES", "cited", "make"]

SOURCES = Path(__file__).parents[2] / "src" / "draftree"
NAMED = re.compile(r"arXiv\s+(\d{4}\.\d{5}(?:,\s+\d{4}\.\d{5})*)", re.IGNORECASE)
"""One or several numbers."""
CITED_IN = (".py", ".c", ".h")

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Drafters", ("drafters/", "heads/")),
    ("Verifiers", ("verifiers/",)),
    ("Planners and rounds", ("planners/", "engine/")),
    ("Beam search", ("beam/",)),
    ("Training and tuning", ("train/", "lab/tune/")),
    ("Sampling, models and weights", ("",)),
)
"""Titles of tables, and the folders of which a paper's first file decides where it belongs."""


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's short name, its authors (empty where the sources do not name them) and what is taken from it."""

    name: str
    authors: str
    taken: str


TITLES: dict[str, Paper] = {
    "1609.08144": Paper("Google's neural machine translation system", "Wu et al.", "length penalty of beam search"),
    "1610.02424": Paper("Diverse beam search", "Vijayakumar et al.", "groups of beams with a penalty for equal tokens"),
    "1611.08562": Paper("Simple, fast diverse decoding", "Li et al.", "penalty by rank among the children of a beam"),
    "1705.04304": Paper("Abstractive summarization", "Paulus et al.", "blocking of repeated n-grams"),
    "1711.05101": Paper("Decoupled weight decay", "Loshchilov, Hutter", "the optimizer AdamW"),
    "1804.06609": Paper("Dynamic beam allocation", "Post, Vilar", "beam search with required words"),
    "1905.04519": Paper("Lexically constrained decoding", "", "beam search with required words"),
    "1909.05858": Paper("CTRL", "Keskar et al.", "repetition penalty"),
    "2207.14255": Paper("Fill-in-the-middle", "Bavarian et al.", "prompts with a gap"),
    "2210.17323": Paper("GPTQ", "Frantar et al.", "layout of packed checkpoints"),
    "2211.17192": Paper(
        "Fast inference from transformers via speculative decoding",
        "Leviathan et al.",
        "draft models, the rule min(1, p/q), closed forms",
    ),
    "2212.04356": Paper("Whisper", "Radford et al.", "transcription, timestamps, long audio"),
    "2302.01318": Paper("Speculative sampling", "Chen et al.", "draft models and the rule, independently found"),
    "2305.09781": Paper(
        "SpecInfer",
        "Miao et al.",
        "token trees, expansion and merging, greedy and multi-step verification, boosted drafters",
    ),
    "2309.00071": Paper("YaRN", "Peng et al.", "rotary frequencies of long contexts"),
    "2309.08168": Paper("Draft & Verify", "Zhang et al.", "drafting with skipped sublayers, the search for them"),
    "2310.08461": Paper("DistillSpec", "Zhou et al.", "distillation of drafters, losses"),
    "2312.07104": Paper("SGLang", "Zheng et al.", "jump-forward decoding under a grammar"),
    "2401.10774": Paper("Medusa", "Cai et al.", "heads for several positions, typical acceptance"),
    "2401.15077": Paper("EAGLE", "Li et al.", "a head that reads hidden states"),
    "2402.02057": Paper("Lookahead decoding", "Fu et al.", "n-grams from a window of guesses"),
    "2402.09977": Paper("Fast vocabulary transfer", "Gee et al.", "start values for another vocabulary"),
    "2402.12374": Paper("Sequoia", "Chen et al.", "verification of children drawn without replacement"),
    "2402.13753": Paper("LongRoPE", "Ding et al.", "rotary frequencies of long contexts"),
    "2402.14160": Paper("Recursive speculative decoding", "Jeon et al.", "recursive rejection sampling"),
    "2403.10444": Paper("Block verification", "Sun et al.", "verification of a chain as a whole"),
    "2404.16710": Paper("LayerSkip", "Elhoushi et al.", "drafting with the first layers"),
    "2405.04434": Paper("DeepSeek-V2", "DeepSeek-AI", "latent attention of native kernels"),
    "2405.21060": Paper("Mamba2", "Dao, Gu", "recurrent layers of native kernels"),
    "2411.15242": Paper("Zamba2", "Glorioso et al.", "shared blocks of native kernels"),
    "2406.08464": Paper("Magpie", "Xu et al.", "prompts that the model itself generates"),
    "2406.14066": Paper("SmartSpec", "Liu et al.", "goodput: draft length from measured cost"),
    "2406.16858": Paper("EAGLE-2", "Li et al.", "trees by confidence, few extended nodes"),
    "2406.17276": Paper("OPT-Tree", "Wang et al.", "best-first trees of a given size"),
    "2408.07978": Paper("Drafter-invariant speculative decoding", "Daliri et al.", "shared Gumbel noise: `coupled`"),
    "2408.11850": Paper("PEARL", "Liu et al.", "drafting while the target verifies"),
    "2411.04975": Paper("SuffixDecoding", "Oliaro et al.", "continuations counted in earlier texts"),
    "2411.15100": Paper("XGrammar", "Dong et al.", "masks of grammars"),
    "2412.06464": Paper("Gated delta networks", "Yang et al.", "recurrent layers of native kernels"),
    "2412.19437": Paper("DeepSeek-V3", "DeepSeek-AI", "multi-token prediction layers (MTP)"),
    "2502.05202": Paper("Other vocabularies", "Timor et al.", "draft models with another tokenizer"),
    "2502.16982": Paper("Muon is scalable", "Liu et al.", "the optimizer Muon"),
    "2503.01840": Paper("EAGLE-3", "Li et al.", "hidden states of several layers, training on own drafts"),
    "2504.15475": Paper("Exponential races", "Kobus, Gündüz", "shared noise on trees"),
    "2505.12398": Paper("Traversal verification", "", "branches verified from leaf to root"),
    "2509.18344": Paper("SubSpec", "", "a quantized copy drafts for streamed weights"),
    "2510.26692": Paper("Kimi Linear", "Kimi Team", "recurrent layers of native kernels"),
    "2602.06036": Paper("DFlash", "", "blocks of tokens drafted in one pass"),
    "2602.22647": Paper("STATIC", "", "sets of sequences as a trie in compressed rows"),
    "2602.23881": Paper("LK losses", "", "losses that follow acceptance"),
    "2603.03251": Paper("SSD (Saguaro)", "", "drafts for several outcomes of a verification"),
    "2606.18394": Paper("JetSpec", "Hu et al.", "one-pass tree drafting with causal blocks"),
}
"""Papers that sources name by arXiv number."""


def cited() -> dict[str, list[str]]:
    """Number at arXiv to the files of the package that name it, relative to the package."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix in CITED_IN:
            named = NAMED.findall(path.read_text(encoding="utf-8"))
            for number in sorted({number for numbers in named for number in re.split(r",\s+", numbers)}):
                found.setdefault(number, []).append(path.relative_to(SOURCES).as_posix())
    return found


def others() -> list[tuple[str, str]]:
    """Files of methods, heads and strategies that name no arXiv paper, and their sources."""
    found = []
    for path in method_files():
        text = ast.get_docstring(ast.parse((SOURCES / path).read_text(encoding="utf-8"))) or ""
        if not NAMED.search(text):
            found.append((listed([path]), source_of(text)))
    return found


def method_files() -> list[str]:
    """Files of the package that hold one method each, relative to it; plug-in folders are left out."""
    seams = (DRAFTERS, VERIFIERS, PLANNERS)
    methods = [method.module.replace(".", "/").removeprefix("draftree/") for seam in seams for method in seam.methods()]
    heads = sorted({name.partition(":")[0].replace(".", "/").removeprefix("draftree/") for name in CLASSES.values()})
    names = [f"{name}.py" for name in (*methods, *heads, "beam/strategies")]
    return [name for name in names if (SOURCES / name).is_file()]


def source_of(docstring: str) -> str:
    """The sentence that begins with `Source:`; a dash if there is none."""
    found = re.search(r"^Sources?: (.+?)(?<![ (][A-Z])\.(?:\s|$)", docstring, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else "–"


def make() -> str:
    """The page; a paper that `TITLES` does not have yet is listed by its number alone."""
    files = cited()
    return page(
        "# Papers",
        "<!-- Made by docs/build.py from the sources and docs/generator/papers.py, then `make docs`. -->",
        "Which paper is in which file. Paths are below `src/draftree/`; every file that names the paper is listed, the "
        "one with the method first. Where a file differs from its paper, its docstring says how. Terms of the papers "
        "against ours: [glossary](glossary.md).",
        *sections(files),
        "## Without a paper",
        "Methods, heads and strategies of beam search whose file names no arXiv paper:",
        table(("file", "source"), others()),
    )


def sections(files: dict[str, list[str]]) -> Iterator[str]:
    left = dict(sorted(files.items()))
    for title, folders in GROUPS:
        rows = []
        for number in list(left):
            names = sorted(left[number], key=lambda name: (not name.startswith(folders), name.count("/"), name))
            if names[0].startswith(folders) and belongs(left[number], folders):
                paper = TITLES.get(number, Paper("", "", ""))
                rows.append(
                    (
                        f"[{number}](https://arxiv.org/abs/{number})",
                        f"{paper.name} ({paper.authors})" if paper.authors else paper.name,
                        paper.taken,
                        listed(names),
                    )
                )
                del left[number]
        if rows:
            yield f"## {title}"
            yield table(("arXiv", "paper", "what is taken", "files"), rows)


def belongs(names: list[str], folders: tuple[str, ...]) -> bool:
    """Whether a paper's files include one of the folders."""
    return any(name.startswith(folders) for name in names)


def listed(names: list[str]) -> str:
    return ", ".join(f"[{code(name)}](../src/draftree/{name})" for name in names)
