"""Training of an EAGLE-3-type head for a target: from data to a folder in the layout of speculators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftree.build import require_positive
from draftree.core.errors import ConfigurationError
from draftree.heads.base import FeatureHead, Head, TargetParts
from draftree.heads.calibration import write_calibration
from draftree.heads.config import EAGLE3, HeadConfig
from draftree.heads.eagle import Eagle3Head
from draftree.heads.folders import read_head, write_head
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.evaluate import ConfidenceFit
from draftree.train.finishing import TrainingResult, earlier_runs, train
from draftree.train.head_trainee import (
    SIZED_TEXTS,
    HeadTrainee,
    ScaledTexts,
    TextTrainee,
    TokenWeights,
    fold,
    sizes_for,
    unfold,
)
from draftree.train.preparing import (
    Note,
    Prepared,
    Report,
    TrainingJob,
    answer_vocabulary,
    chosen_features,
    ignore,
    prepare,
)
from draftree.train.settings import TrainSettings

AnyHead = TypeVar("AnyHead", bound=Head)
SMALL = 0.1  # factor of the first weights of the bias by the token before
PASSED = 0.5  # share of the deepest hidden state that the first product passes through
GAIN = 0.3
"""First gain of the norm, relative to the target's. With the target's own gain, random states give confident
predictions, and the divergence starts above 17 nats instead of 8. After 60 updates of 2,048 tokens, 31% of the most
likely tokens are the target's; 24% with the target's gain (SmolLM2-135M-Instruct, Muon)."""
SPREAD = 0.02  # standard deviation of random first weights


DRAFT_VOCAB = 8192  # size of the draft vocabulary of a new head, unless the user chooses another
LEAST_COVERAGE = 0.97


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Sizes and variants of a new head, or the head that training starts from."""

    layers: int = 1  # number of decoder layers
    draft_vocab: int | None = None  # size of the draft vocabulary; None for `DRAFT_VOCAB`
    features: tuple[int, ...] | None = None  # hidden states that it reads, among those of the data; None for all
    trains_output: bool = False  # whether the output head is trained; otherwise it stays the target's rows
    start: Path | None = None  # folder of a head that training starts from; None for a new one

    def __post_init__(self) -> None:
        require_positive(self, "draft_vocab")

    def require_sizes_of_start(self, *, but: str = "") -> None:
        """Raise if sizes or variants are chosen that the head has from which training starts."""
        excluded = (but, "trains_output", "start")
        if chosen := [f.name for f in fields(self) if f.name not in excluded and getattr(self, f.name) != f.default]:
            raise ConfigurationError(
                f"sizes and variants are those of the head that training starts from: leave out {', '.join(chosen)}"
            )


def head_config(
    model_config: Any,
    parts: TargetParts,
    features: Sequence[int],
    options: HeadOptions,
    *,
    draft_vocab: int,
    depth: int,
    name: str,
) -> HeadConfig:
    """Return the configuration of a new head of kind `eagle3`."""
    if not features:
        raise ConfigurationError(
            "the data has no hidden states of layers, which a head reads: make data without '--features none'"
        )
    hidden = parts.hidden
    heads = int(getattr(model_config, "num_attention_heads", 0) or max(1, hidden // 64))
    dim = int(getattr(model_config, "head_dim", None) or hidden // heads)
    rope = getattr(model_config, "rope_parameters", None) or {}
    return HeadConfig(
        kind=EAGLE3,
        features=tuple(features),
        target_hidden=hidden,
        hidden=hidden,
        vocab_size=parts.vocab_size,
        draft_vocab_size=draft_vocab,
        depth=depth,
        num_layers=options.layers,
        num_heads=heads,
        num_kv_heads=int(getattr(model_config, "num_key_value_heads", None) or heads),
        head_dim=dim + dim % 2,
        intermediate=int(getattr(model_config, "intermediate_size", 0) or 4 * hidden),
        epsilon=float(getattr(model_config, "rms_norm_eps", 1e-6)),
        rope={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        max_length=int(getattr(model_config, "max_position_embeddings", 2048)),
        own_embedding=False,
        own_output=True,
        target_name=name,
    )


def fresh(head: Any, parts: TargetParts, *, trains_output: bool, seed: int) -> Any:
    """Set the first weights of a head with `fc`, `norm` and `lm_head`, bind it to its target, and return it.

    The first product expects hidden states of size 1 (`ScaledTexts`) and returns states of size 1: otherwise the layer,
    whose outputs are small at first, has no effect on the residual stream for many updates. The output head is
    the target's; so is the norm, except for the size of its gain.
    """
    facts = parts.facts
    if facts.bias is not None or facts.soft_cap is not None:
        raise ConfigurationError(
            "the target adds a bias to its logits or caps them, which the layout of heads cannot express: choose "
            "another target"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(SPREAD * torch.randn(parameter.shape, generator=generator))
                if name.endswith("markov_w2.weight"):
                    parameter.mul_(SMALL)
        # mix all hidden states at random, and pass a share of the deepest one through, from elements of size 1
        fc = head.fc
        config = head.config
        width = config.target_hidden
        kept = min(config.hidden, config.target_hidden)
        deepest = max(range(len(config.features)), key=lambda i: config.features[i] % (1 << 30))
        fc.weight.copy_(torch.randn(fc.weight.shape, generator=generator) * fc.in_features**-0.5)
        fc.weight[:kept, deepest * width : deepest * width + kept] += PASSED * torch.eye(kept)
        head.norm.weight.copy_(GAIN * norm_gain(parts))
        assert head.lm_head is not None, "new heads have an output head of their own"
        rows = parts.output[head.vocabulary.ids.to(parts.output.device)]
        head.lm_head.weight.copy_(rows.float() * facts.logit_scale)
        head.lm_head.weight.requires_grad_(trains_output)
    head.bind(parts)
    return head


def norm_gain(parts: TargetParts) -> Tensor:
    """Return the gain of the target's final norm if it is a root mean square norm, else ones; shape (hidden,)."""
    width, output = parts.hidden, parts.output
    probe = torch.randn(width, generator=torch.Generator().manual_seed(0)) * 4
    outputs = parts.finish(torch.stack((torch.ones(width), probe)).to(output)).float().cpu()
    gain = outputs[0]
    wanted = outputs[0] * probe * probe.square().mean().rsqrt()
    close = torch.allclose(outputs[1], wanted, rtol=0.05, atol=0.05 * float(wanted.abs().mean()) + 1e-6)
    return gain if close else torch.ones(width)


def train_head(
    job: TrainingJob,
    settings: TrainSettings,
    options: HeadOptions,
    *,
    report: Report = ignore,
    note: Note = ignore,
) -> TrainingResult:
    return train_prepared(prepare(job, settings, report, note), options, "EAGLE-3 head", {})


def train_prepared(
    prepared: Prepared,
    options: HeadOptions,
    kind: str,
    facts: dict[str, Any],
    token_weights: TokenWeights | None = None,
) -> TrainingResult:
    """Train a head on loaded inputs.

    `kind`: noun for the model card. `facts`: part of the recipe. `token_weights`: weights of predictions; None for
    equal ones.
    """
    head, data = start(prepared, options)
    trainee = HeadTrainee.of(prepared, head, data, token_weights=token_weights)
    return finish_head(prepared, trainee, data.sizes, kind, facts | earlier_runs(options.start))


def start(prepared: Prepared, options: HeadOptions) -> tuple[FeatureHead, ScaledTexts]:
    """Return the head before training, and the data with the hidden states that it reads."""
    if options.start is None:
        config, vocabulary = new_config(prepared, options)
        head = Eagle3Head(config, vocabulary)
        fresh(head, prepared.parts, trains_output=options.trains_output, seed=prepared.settings.seed)
        return placed(head, prepared), scaled(prepared, config)
    options.require_sizes_of_start()
    before = read_head(options.start, dtype=torch.float32)
    if not isinstance(before, FeatureHead):
        raise ConfigurationError(
            f"'{options.start}' has a head of kind '{before.config.kind}', which this command does not train"
        )
    return continued(before, prepared, options)


def new_config(prepared: Prepared, options: HeadOptions) -> tuple[HeadConfig, DraftVocabulary]:
    """Return the configuration of a new head of kind `eagle3`, and its draft vocabulary."""
    vocabulary, share = answer_vocabulary(prepared, options.draft_vocab or DRAFT_VOCAB)
    prepared.note(f"draft vocabulary: {len(vocabulary):,} tokens, {100 * share:.2f} % of unseen answers")
    if share < LEAST_COVERAGE:
        prepared.note("the draft vocabulary limits acceptance: a larger one (--draft-vocab) covers more")
    stored = prepared.data.recipe.features
    config = head_config(
        prepared.config,
        prepared.parts,
        [stored[place] for place in chosen_features(options.features, stored, prepared.parts.num_layers)],
        options,
        draft_vocab=len(vocabulary),
        depth=prepared.settings.depth,
        name=prepared.loaded.name,
    )
    return config, vocabulary


def continued(head: AnyHead, prepared: Prepared, options: HeadOptions) -> tuple[AnyHead, ScaledTexts]:
    """Return a head from which training starts, in float32 before, and the data with the hidden states it reads."""
    head.bind(prepared.parts)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(options.trains_output or not name.startswith(("lm_head", "embed_tokens")))
    data = scaled(prepared, head.config)
    unfold(head, data.sizes)
    return placed(head, prepared), data


def scaled(prepared: Prepared, config: HeadConfig) -> ScaledTexts:
    """Return the data with the hidden states that a head reads, divided by their sizes."""
    places = chosen_features(config.features, prepared.data.recipe.features, prepared.parts.num_layers)
    texts = (prepared.data[number] for number in prepared.seen[:SIZED_TEXTS])
    return ScaledTexts(prepared.data, places, sizes_for(config, texts, places))


def placed(head: AnyHead, prepared: Prepared) -> AnyHead:
    """Return the head on the device of computation and in its dtype, bound to the target."""
    device = prepared.processes.device
    head.to(device=device, dtype=prepared.dtype)
    head.vocabulary = head.vocabulary.to(device)
    head.bind(prepared.parts)
    return head


def finish_head(
    prepared: Prepared, trainee: TextTrainee, sizes: Tensor, kind: str, facts: dict[str, Any]
) -> TrainingResult:
    """Train a head whose hidden states have these sizes, fit its confidence, and write all files."""
    output = prepared.job.output
    head = trainee.module
    fit = ConfidenceFit(prepared.settings.depth)

    def write() -> dict[str, Any]:
        fold(head, sizes)
        write_head(head.to(prepared.loaded.model.dtype), output)
        calibration = fit.fit()
        write_calibration(calibration, output)
        return json_ready({"head": {"config": asdict(head.config)}, "confidence": fit.report(calibration)} | facts)

    return train(prepared, trainee, write, kind=kind, usage=f"head:{output}", watch=fit.add)


def json_ready(value: Any) -> Any:
    """Return a value with mappings and sequences as dictionaries and lists."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): json_ready(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
