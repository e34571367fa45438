"""Pictures of beam searches for the guide: python docs/beam_gallery.py. Needs the weights of stories15m."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree import LLM, BeamSearchParams
from draftree.beam.trace import BeamTrace, tree_svg

FOLDER = Path(__file__).resolve().parent / "guides/images"
PROMPT = "Once upon a time, there was a little"
WIDTH = 4


@dataclass(frozen=True)
class Picture:
    """One search and the step at which its tree is drawn; None for the end."""

    name: str
    title: str
    given: dict[str, Any]
    step: int | None = None
    tokens: int = 9
    prompt: str = PROMPT


def pictures(llm: LLM) -> list[Picture]:
    """Return all pictures of the gallery."""
    dog = llm.prompts.encode_text("dog", add_special_tokens=False)
    groups = {"num_beam_groups": 2, "diversity_penalty": 1.0, "num_return_sequences": 4}
    sampled = {"sampling": "independent", "top_p": 0.9, "seed": 3}
    return [
        Picture("beam-step", f"Beam search, {WIDTH} beams, after 5 steps", {}, step=5),
        Picture("beam-late", f"Beam search, {WIDTH} beams, after 17 steps", {}, step=17, tokens=20),
        Picture(
            "beam-prefix", f"A common prefix, {WIDTH} beams, after 12 steps", {}, 12, 20, "The dog was happy because"
        ),
        Picture("beam-end", f"Beam search, {WIDTH} beams, at the end", {}),
        Picture("beam-groups", f"Diverse groups: 2 groups of {WIDTH // 2} beams", groups),
        Picture("beam-sampling", f"Independent sampling, {WIDTH} texts, the 2 best returned", sampled),
        Picture("beam-phrases", "Every text contains 'dog'", {"force_words_ids": [dog]}, tokens=12),
    ]


def draw(llm: LLM, picture: Picture) -> Path:
    """Search and write one picture; returns its path."""
    trace = BeamTrace()
    given = {"num_return_sequences": 2, **picture.given}
    params = BeamSearchParams(beam_width=WIDTH, max_new_tokens=picture.tokens, **given)
    llm.beam_search(picture.prompt, params, on_step=trace)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    svg = tree_svg(
        trace,
        lambda token: tokenizer.decode([token], False),
        prompt=picture.prompt,
        title=picture.title,
        step=picture.step,
    )
    path = FOLDER / f"{picture.name}.svg"
    path.write_text(svg, "utf-8")
    return path


def main() -> None:
    """Write all pictures."""
    llm = LLM("stories15m", dtype="float32", kernels="torch")
    for picture in pictures(llm):
        sys.stdout.write(f"{draw(llm, picture)}\n")


if __name__ == "__main__":
    main()
