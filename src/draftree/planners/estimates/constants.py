"""Tuned numbers of the planner `adaptive`, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrialRates:
    """Shares of the time since the last trial that a trial may cost.

    Attributes:
        first_share: the share before any fruitless trial.
        backoff: factor by which every fruitless trial lengthens the wait.
        least_share: lower limit of the share; the long-run cost of a useless drafter.
    """

    first_share: float
    backoff: float
    least_share: float


@dataclass(frozen=True, slots=True)
class AutoConstants:
    """Numbers that `adaptive` and its estimates are tuned by.

    Shares without another unit are fractions of the seconds of a plain pass of the target. Measurements are in
    docs/lab/auto.md: the constants of trials were compared with neighbouring values on replayed traces
    ("Constants"), `hit_prior` and the priors of bins on first texts ("The first text of a fresh `LLM`", "Tried and
    dropped"), `catch_up_rounds` and `single_level_share` on short texts ("Useless drafters in short texts"). The other
    fields have no measurement of their own; the note measures the planner as a whole.
    """

    # Trials of what does not pay
    trials: TrialRates = TrialRates(first_share=0.02, backoff=4.0, least_share=0.002)
    """Of drafters that run a model, and of rows. With first_share=0.04 the worst prompt loses 1.5% more, with
    backoff=2 2% more, with least_share=0.008 0.4% more."""
    cheap_trials: TrialRates = TrialRates(first_share=0.04, backoff=2.0, least_share=0.004)
    """Of cheap drafters, whose trials start anew with every text."""
    batch_trials: TrialRates = TrialRates(first_share=0.03, backoff=2.0, least_share=0.004)
    """The same for the sequences of a batch: each has trials of its own, and a token saves less time."""
    batch_margin: float = 2.0
    """Gain of a draft relative to its cost from which a sequence of a batch has drafts: the average of a few drafts is
    too high for the sequences that it selects."""
    learning: float = 1.0
    """Time of learning from a round with drafts relative to that of planning it; learning is not timed."""
    trial_depth: int = 2
    """Levels of a trial; with 1 or 4 the worst prompt loses 1% more."""
    single_level_share: float = 0.2
    """Cost of a level from which a trial has one level."""
    least_drafts: int = 8
    """Drafts of a drafter that runs a model before it is turned off; fewer if they cost more than the next share."""
    settling_share: float = 1.5
    """Cost of these drafts, in plain passes, from which `first_drafts` that read little text are enough."""
    max_idle_rounds: int = 16
    """Rounds in a row without any decision while no trial is due; a decision takes 0.1 ms."""
    idle_sample_rounds: int = 4
    """One in so many idle rounds updates the cost of a pass."""

    # Decisions
    turn_on: float = 1.03
    """Speed relative to no draft from which a drafter is turned on."""
    stay_on: float = 1.01
    """Speed relative to no draft below which it is turned off."""
    node_margin: float = 1.004
    """Speed relative to no nodes from which nodes are scored."""
    min_survival: float = 0.01
    """Survival probability below which a node is not considered, unless a row costs less than this share of a pass."""
    least_survival: float = 0.0005
    """The same where rows cost nothing: chances are not learned so precisely."""
    cheap_model_share: float = 0.02
    """Cost of a draft below which a drafter that runs a model drafts first and its tree is judged then."""
    cheap_lookup_share: float = 0.15
    """The same for a drafter without a model."""
    catch_up_rounds: int = 32
    """Rounds over which the cost of reading the unread text must be regained."""

    # Costs of drafts and passes
    unknown_level_share: float = 0.08
    """Cost of a level before one was measured."""
    unknown_row_share: float = 0.02
    """Cost of a further row before one was measured."""
    cost_memory: int = 12
    """Rounds over which a cost is averaged."""
    max_jump: float = 1.5
    """Ratio to the expected seconds at which a round's seconds are clipped."""
    max_draft_jump: float = 3.0
    """The same for a draft's seconds."""
    cost_window: int = 9
    """Drafts whose median is the cost of a draft."""
    cost_doubt: int = 2
    """Weight in drafts of the cost of a depth that follows from shallower drafts."""
    cost_age: int = 64
    """Drafts after which a measured cost of another depth is dropped."""
    min_unread: int = 16
    """Unread tokens above which a draft's seconds do not count as the cost of its levels."""
    settled_rounds: int = 16
    """Rounds of a cell after which its curve is computed anew every `renew_rounds` rounds only."""
    renew_rounds: int = 4
    """See `settled_rounds`."""

    # Gains of levels
    first_gain: float = 0.5
    """Tokens that a level is assumed to add per token of the level above, with the weight of one draft."""
    gain_memory: int = 16
    """Drafts over which gains are averaged."""
    recent_memory: int = 6
    """Drafts over which the gain of a cheap drafter is averaged to turn it off."""
    untried_keep: float = 0.98
    """Factor of a level's weight for every round without a trial of it."""
    min_first_weight: float = 8.0
    """Weight in drafts that the first level keeps without trials."""
    shared_weight: float = 4.0
    """Weight in drafts of all sequences' gains beside a sequence's own."""
    hit_prior: float = 1.0
    """Accepted first guesses assumed before any was seen, in the ratio of accepted to expected ones."""
    known_hit_prior: float = 4.0
    """The same for a drafter whose acceptance was measured before."""
    known_weight: float = 6.0
    """Weight in drafts of acceptance that was measured before."""
    first_drafts: int = 3
    """Drafts until the cost of a drafter is judged."""
    unsure_share: float = 0.5
    """Acceptance of a level after a token of low survival, relative to that of the level: unlikely tokens follow each
    other."""
    most_survival: float = 0.9
    """Survival of a node from which a calibrated drafter goes deeper in any case."""
    further_rate: float = 0.6
    """Assumed acceptance of a further level of a calibrated drafter whose acceptance was not measured before."""
    hit_memory: float = 50.0
    """Expected first guesses over which this ratio is averaged."""

    # Acceptance of nodes
    score_edges: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.93, 0.97, 0.99)
    """Edges of the bins of the drafter's own conditional probability."""
    score_discount: float = 0.95
    """Assumed acceptance of a bin relative to its centre: drafters are overconfident."""
    score_weight: float = 2.5
    """Weight in guesses of what is assumed of a scored bin."""
    calibrated_weight: float = 12.0
    """The same for a drafter with calibrated scores, whose assumed acceptance is the centre of the bin."""
    rank_chances: tuple[float, ...] = (0.6, 0.15, 0.06, 0.04, 0.02)
    """Assumed acceptance of an unscored guess by rank among its siblings."""
    first_rank_weight: float = 1.5
    """Weight in guesses of what is assumed of first siblings."""
    later_rank_weight: float = 4.0
    """The same for other siblings, which a few misses would exclude for good."""
    depth_bins: tuple[int, ...] = (0, 1, 2, 3, 3, 4, 4, 4, 4)
    """Bin of each depth of unscored guesses; deeper ones share one more."""
    sequence_weight: float = 6.0
    """Weight in guesses of all sequences' acceptance beside a sequence's own."""
    sequence_memory: float = 32.0
    """Guesses over which a sequence's own deviation is averaged."""
    calibration_memory: float = 200.0
    """Guesses over which a drafter's overconfidence in all bins is averaged."""


AUTO = AutoConstants()
"""The numbers in use."""
