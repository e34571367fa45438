"""The navigation of the site: named groups of pages; a page that no group names is added to the group of its folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch

__all__ = ["Item", "navigation", "title_of"]

Item = dict[str, "str | list[Item]"]
"""A title, and the place of a page or the entries of a group."""

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("index.md",)),
    ("Start", ("install.md", "tutorial.md", "guides/choosing.md", "guides/automatic.md", "guides/library.md",
               "guides/command-line.md", "guides/transformers.md", "faq.md", "notebooks/*")),
    ("Understand", ("how-it-works.md", "lossless.md", "glossary.md", "papers.md", "gallery.md",
                    "playground-page.md", "performance.md", "comparison.md")),
    ("Guides/Models and texts", ("guides/native-kernels.md", "guides/precision.md", "guides/beam-search.md",
                                 "guides/encoder-decoder.md", "guides/traces.md")),
    ("Guides/Drafters", ("guides/training.md", "guides/third-party-heads.md", "guides/drafters-for-vllm.md")),
    ("Guides/Serving", ("guides/serving.md", "guides/serving-tools.md", "guides/fields.md", "guides/page.md",
                        "guides/operating.md", "guides/replicas.md", "guides/sizing.md")),
    ("Guides/Devices", ("guides/devices.md", "guides/end-and-cloud.md", "guides/larger-than-memory.md",
                        "guides/drafting-ahead.md")),
    ("Guides/More", ("guides/*",)),
    ("Methods", ("methods/index.md",)),
    ("Methods/Drafters", ("methods/drafter-*",)),
    ("Methods/Verifiers", ("methods/verifier-*",)),
    ("Methods/Planners", ("methods/planner-*",)),
    ("Lab notes", ("lab/index.md", "lab/*")),
    ("Inside", ("architecture.md", "guides/adding-a-method.md", "decisions.md")),
    ("Reference", ("reference.md",)),
    ("Project", ("project/readme.md", "project/contributing.md", "project/security.md", "project/changelog.md",
                 "project/benchmarks.md")),
    ("Project/More pages", ("*",)),
    ("Project/Files", ("source/*",)),
)  # fmt: skip
"""Path of a group, and the pages in it; patterns take pages that are named nowhere else."""
KIND = re.compile(r"^([\w-]+) (?:drafter|verifier|planner)$")
"""A method's title, of which the group says the kind."""
NAMED = {pattern for _, patterns in GROUPS for pattern in patterns if "*" not in pattern}


def navigation(places: Sequence[str], title: Callable[[str], str]) -> list[Item]:
    """The tree of all pages; every page is in it once.

    Args:
        places: of the pages.
        title: the title of a page.
    """
    left = [place for place in places if place not in NAMED]
    root: list[Item] = []
    for path, patterns in GROUPS:
        found: list[str] = []
        for pattern in patterns:
            taken = [place for place in (places if pattern in NAMED else left) if fits(place, pattern)]
            found += taken
            left = [place for place in left if place not in taken]
        if found:
            group(root, path).extend({title(place): place} for place in found)
    return root


def fits(place: str, pattern: str) -> bool:
    """Whether a pattern takes a page; `*` alone leaves the shown files to their own group."""
    return fnmatch(place, pattern) and (pattern != "*" or not place.startswith("source/"))


def group(root: list[Item], path: str) -> list[Item]:
    """The entries of a group, which is made if it does not exist."""
    here = root
    for name in filter(None, path.split("/")):
        below = next((entry[name] for entry in here if name in entry and isinstance(entry[name], list)), None)
        if not isinstance(below, list):
            below = []
            here.append({name: below})
        here = below
    return here


def title_of(text: str) -> str:
    """The first heading of a page, without marks."""
    heading = re.search(r"^# +(.*)$", text, re.MULTILINE)
    words = re.sub(r"[`*]", "", heading[1]).strip() if heading else "Untitled"
    return KIND.sub(r"\1", words)
