"""What limits the acceptance of a head's chains: its distribution, its vocabulary, or the rule that verifies them.

    python benchmarks/draft_limits.py smollm2-135m-instruct --head FOLDER --data FOLDER --texts 64 --output FILE

Texts of the data that training has not seen are read again. Along each text, drafts start at every token of the
answer that has room for all levels. Acceptance at a depth is that of the drafts of which all tokens before were
accepted, under the rule of the same line:

* `measured`: the head's pick under the text's own noise is the text's token (greedy texts: its most likely token).
* `best 2`, `best 4`: the text's token is one of so many best ones, at every depth.
* `coupled`: the closed form of `measured` under shared noise (`train/losses.py`).
* `overlap`: sum of min(p, q), the most that any rule can accept which verifies one drafted token.
* `vocabulary`: the target's mass on the draft vocabulary, the acceptance of a head without other faults.
* `..., all tokens`: the same head with all rows of the target's output head.
* `logits x F`: the draft's logits are multiplied by F before the noise is added, in closed form and measured.
* `without P of the best`: tokens with less than P times the head's largest probability are not proposed.

Survival under a rule in closed form is computed along the text: the chance of a token's acceptance, given that it is
the text's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.noise import Noise, gumbel
from draftree.heads.base import TargetParts
from draftree.heads.shipped import head_folder
from draftree.options import ModelOptions
from draftree.train.batches import Batch, first_chain
from draftree.train.boost import trainee_of
from draftree.train.head_trainee import TextTrainee
from draftree.train.losses import LEAST_LOG, condensed, coupled_acceptance, overlap
from draftree.train.preparing import TrainingJob, prepare
from draftree.train.settings import Limits, TrainSettings

FACTORS = (0.7, 0.8, 0.9, 1.1, 1.2, 1.4)
"""Factors of the draft's logits that are tried."""
SHARES = (0.01, 0.05)
"""Shares of the largest probability below which tokens are left out."""
CANDIDATES = (2, 4)
CHUNK_ROWS = 256
KEPT_COLUMNS = 512
"""Columns of the closed form; all others count as one."""


@dataclass(slots=True)
class Chains:
    """Drafts under one rule: by depth, the weight of those that reached it and of those that were accepted there."""

    depth: int
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached, self.accepted = [0.0] * self.depth, [0.0] * self.depth

    def facts(self) -> dict[str, Any]:
        """Return acceptance by depth and the acceptance length as JSON values."""
        starts = max(1.0, self.reached[0])
        rates = [round(a / r, 4) if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]
        return {"conditional": rates, "acceptance_length": round(1 + sum(self.accepted) / starts, 4)}


Verdicts = dict[str, tuple[Tensor, Tensor]]
"""By rule, the chance of acceptance of each row, and that chance given that the target's token is the text's."""


class Tally:
    """Sums over drafts of all rules, for texts of one temperature."""

    def __init__(self, depth: int) -> None:
        self.depth, self.texts, self.drafts = depth, 0, 0
        self.rules: dict[str, Chains] = {}

    def add(self, levels: Sequence[Verdicts]) -> None:
        """Count the drafts of a batch, given the verdicts of their levels."""
        for name in levels[0]:
            own = self.rules.setdefault(name, Chains(self.depth))
            alive = torch.ones_like(levels[0][name][0])
            for level, verdicts in enumerate(levels):
                chance, given = verdicts[name]
                own.reached[level] += float(alive.sum())
                own.accepted[level] += float((alive * chance).sum())
                alive = alive * given
        self.drafts += len(levels[0]["measured"][0])

    def facts(self) -> dict[str, Any]:
        """Return the rates of all rules as JSON values."""
        rules = {name: own.facts() for name, own in self.rules.items()}
        return {"texts": self.texts, "drafts": self.drafts, "rules": rules}


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfLevel:
    """Rows of one level.

    Attributes:
        logits: the head's logits over the temperature, shape (rows, draft vocabulary).
        places: row of the draft vocabulary of the text's token, -1 without one, shape (rows,).
        noise: of the draft vocabulary, shape of `logits`; None for greedy texts.
        log_p: the target's log-probabilities on all tokens, shape (rows, vocabulary); None for greedy texts.
        wide: the head's logits of all tokens over the temperature, shape (rows, vocabulary).
        wide_noise: of all tokens; None for greedy texts.
        tokens: the text's tokens, shape (rows,).
        ids: token ids of the draft vocabulary.
    """

    logits: Tensor
    places: Tensor
    noise: Tensor | None
    log_p: Tensor | None
    wide: Tensor
    wide_noise: Tensor | None
    tokens: Tensor
    ids: Tensor


def verdicts_of(rows: RowsOfLevel) -> Verdicts:
    """Return the verdicts of all rules on the rows of a level."""
    scores = rows.logits if rows.noise is None else rows.logits + rows.noise
    ranked = scores.topk(min(max(CANDIDATES), scores.shape[-1]), dim=-1).indices == rows.places[:, None]
    found: Verdicts = {"measured": _counted(ranked[:, 0])}
    found |= {f"best {count}": _counted(ranked[:, :count].any(-1)) for count in CANDIDATES}
    is_inside = rows.places >= 0
    wide_scores = rows.wide if rows.wide_noise is None else rows.wide + rows.wide_noise
    found["measured, all tokens"] = _counted(wide_scores.argmax(-1) == rows.tokens)
    if rows.log_p is None or rows.noise is None:
        return found | {"vocabulary": _counted(is_inside)}
    log_p = rows.log_p[:, rows.ids]
    outside = (1 - log_p.double().exp().sum(-1)).clamp_min(1e-12).log()
    found["vocabulary"] = (1 - outside.exp(), is_inside.double())
    log_q = rows.logits.log_softmax(-1)
    found["coupled"] = _coupled(log_p, log_q, outside, rows.places)
    found["overlap"] = _overlapping(log_p, log_q, rows.places)
    wide_q, none = rows.wide.log_softmax(-1), torch.full_like(outside, LEAST_LOG)
    found["coupled, all tokens"] = _coupled(rows.log_p, wide_q, none, rows.tokens)
    found["overlap, all tokens"] = _overlapping(rows.log_p, wide_q, rows.tokens)
    for factor in FACTORS:
        found[f"logits x {factor:g}"] = _coupled(log_p, (factor * log_q).log_softmax(-1), outside, rows.places)
        picked = (factor * rows.logits + rows.noise).argmax(-1)
        found[f"logits x {factor:g}, measured"] = _counted(picked == rows.places)
    for share in SHARES:
        is_kept = log_q >= log_q.amax(-1, keepdim=True) + math.log(share)
        picked = torch.where(is_kept, scores, -math.inf).argmax(-1)
        found[f"without {share:g} of the best, measured"] = _counted(picked == rows.places)
    return found


def _counted(is_hit: Tensor) -> tuple[Tensor, Tensor]:
    return is_hit.double(), is_hit.double()


def _coupled(log_p: Tensor, log_q: Tensor, outside: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the acceptance under shared noise, and that given the text's token."""
    chance = coupled_acceptance(*condensed(log_p, log_q, KEPT_COLUMNS), outside)
    p, q = log_p.double().clamp_min(LEAST_LOG).exp(), log_q.double().clamp_min(LEAST_LOG).exp()
    own = places.clamp_min(0)[:, None]
    own_p, own_q = p.gather(-1, own), q.gather(-1, own)
    # tokens whose ratio of q to p is larger than that of the text's token; compared without a division
    is_above = q * own_p > own_q * p
    below = (p * ~is_above).sum(-1) + outside.exp()
    given = own_q[:, 0] / (below * own_q[:, 0] + (q * is_above).sum(-1) * own_p[:, 0])
    return chance, torch.where(places >= 0, given, 0.0)


def _overlapping(log_p: Tensor, log_q: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest acceptance of one draft, and that given the text's token."""
    own = places.clamp_min(0)[:, None]
    given = (log_q.gather(-1, own) - log_p.gather(-1, own)).clamp_max(0).exp()[:, 0]
    return overlap(log_p, log_q).double(), torch.where(places >= 0, given.double(), 0.0)


class Judge:
    """Verdicts on the unseen texts of a trainee.

    Args:
        trainee: a feature head of the target.
        parts: the target's parts; its logits are a plain product with its output head.
        depth: length of drafts.
    """

    def __init__(self, trainee: TextTrainee, parts: TargetParts, depth: int) -> None:
        self._trainee, self._parts, self._depth = trainee, parts, depth
        self._output = parts.output.float() * parts.facts.logit_scale

    @torch.no_grad()
    def tallies(self, count: int | None) -> dict[str, Tally]:
        """Return the sums over some unseen texts, by temperature."""
        found: dict[str, Tally] = {}
        for numbers in self._trainee.unseen_batches(count):
            for number in numbers:
                text = self._trainee.text(number)
                tally = found.setdefault(f"{text.temperature:g}", Tally(self._depth))
                tally.texts += 1
                for levels in self._levels(self._trainee.batch([number])):
                    tally.add(levels)
        return found

    def _levels(self, batch: Batch) -> Iterator[list[Verdicts]]:
        """Yield the verdicts of all levels for some chains of a text at a time."""
        states = list(self._trainee.states_of(batch, self._depth))
        chosen = (batch.room >= self._depth).nonzero()[:, 0]
        for part in chosen.split(CHUNK_ROWS):
            yield [verdicts_of(self._rows(batch, level, part, states[level][part])) for level in range(self._depth)]

    def _rows(self, batch: Batch, level: int, part: Tensor, states: Tensor) -> RowsOfLevel:
        (text,) = batch.texts
        ids = self._trainee.vocabulary.ids
        is_noisy = text.temperature > 0
        divisor = text.temperature if is_noisy else 1.0
        chains = batch.step_chains(level)[part]
        noise = wide_noise = log_p = None
        if is_noisy:
            positions = (batch.positions[batch.chains[part]] + level + 1).tolist()
            keys = [Noise(text.seed).keys(position) for position in positions]
            wide_noise = gumbel(keys, torch.arange(self._parts.vocab_size))
            noise = wide_noise[:, ids]
            if text.last is None:
                raise ConfigurationError(
                    "the data has the target's most likely tokens only: make data with 'draftree train data' without "
                    "--teacher top-k"
                )
            last = self._parts.finish(text.last[first_chain(text) :][chains].to(self._parts.output.dtype)).float()
            log_p = (last @ self._output.T / divisor).log_softmax(-1)
        tokens = batch.picks[chains]
        return RowsOfLevel(
            self._trainee.logits_of(batch, level, part, states) / divisor,
            self._trainee.vocabulary.places(tokens),
            noise,
            log_p,
            self._trainee.module.norm(states).float() @ self._output.T / divisor,
            wide_noise,
            tokens,
            ids,
        )


def table(facts: dict[str, Any]) -> list[str]:
    """Return lines of a table in Markdown, a row for each rule."""
    lines = []
    for temperature, own in facts.items():
        count = len(next(iter(own["rules"].values()))["conditional"])
        lines += [
            f"temperature {temperature}: {own['texts']} texts, {own['drafts']:,} drafts",
            "",
            f"| rule | {' | '.join(f'depth {level + 1}' for level in range(count))} | length |",
            f"| --- |{' ---: |' * (count + 1)}",
        ]
        for name, rule in own["rules"].items():
            rates = " | ".join(f"{rate:.3f}" for rate in rule["conditional"])
            lines.append(f"| {name} | {rates} | {rule['acceptance_length']:.3f} |")
        lines.append("")
    return lines


def main() -> None:
    """Print the tables and write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--head", required=True, help="folder of a head, or the name of one of this package")
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--texts", type=int, help="number of unseen texts; all if not given")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, help="file that a line of results is added to")
    given = parser.parse_args()
    # the folder of results is not used: nothing is trained
    job = TrainingJob(
        options=ModelOptions(given.model, threads=given.threads, dtype="float32"),
        data=tuple(given.data),
        output=Path("unused-output"),
    )
    prepared = prepare(job, TrainSettings(limits=Limits(steps=1), depth=given.depth, batch_tokens=1))
    tallies = Judge(trainee_of(prepared, head_folder(given.head)), prepared.parts, given.depth).tallies(given.texts)
    facts = {temperature: tally.facts() for temperature, tally in sorted(tallies.items())}
    print("\n".join(table(facts)))
    if given.output:
        line = {"target": given.model, "head": given.head, "data": [str(one) for one in given.data]} | facts
        with given.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
