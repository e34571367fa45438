"""Loading of a model by several processes, each with its share.

Rank 0 gets a `ParallelModel`; the other ranks repeat what it does until it stops.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from draftree.core.errors import ConfigurationError, DraftreeError, RankError, UnsupportedModelError
from draftree.loading.load import LoadedModel
from draftree.loading.reading import first_line
from draftree.models.check import EXACT_LENGTHS, NATIVE_LENGTHS, check, rounds_alike
from draftree.models.torch.identity import fingerprint_of
from draftree.parallel.channel import Leader, Member
from draftree.parallel.follow import follow, signals_ignored
from draftree.parallel.lifeline import FAILED, GRACE_SECONDS
from draftree.parallel.model import ParallelModel
from draftree.parallel.options import ParallelOptions
from draftree.parallel.settings import LoadSettings
from draftree.parallel.shares import LoadedShare, load_share
from draftree.parallel.world import World, current_world

__all__ = ["attend", "lead", "load_together"]

logger = logging.getLogger(__name__)


def load_together(name: str | os.PathLike[str], options: ParallelOptions, settings: LoadSettings) -> LoadedModel:
    """Load a model in all processes of the job.

    On rank 0 the model is returned. On the other ranks this function runs the passes of their shares until rank 0 has
    ended, and then ends the process.

    Args:
        name: the model, in any supported form.
        options: the division.
        settings: other options.

    Raises:
        SystemExit: on other ranks than 0, after rank 0 stopped (status 0), or if it ended otherwise (status 1).
        ConfigurationError: the number of processes, the division or an option is not possible.
        ModelError: the model cannot be found or used.
        RankError: a process ended.
    """
    if not isinstance(name, str | os.PathLike):
        raise ConfigurationError(f"{options} needs the name or the folder of a model: each process loads its own share")
    world = current_world(options)
    if world.rank == 0:
        if world.is_divided:
            raise ConfigurationError(
                "this job has divided a model already, and its other processes belong to that one: start another job"
            )
        world.is_divided = True
        return lead(world, name, options, settings)
    member = Member(world)
    with signals_ignored():
        attend(world, member, name, options, settings)
    raise SystemExit(0)


def lead(world: World, name: str | os.PathLike[str], options: ParallelOptions, settings: LoadSettings) -> LoadedModel:
    """Load rank 0's share, and check the model together with the other ranks.

    Raises:
        DraftreeError: as `load_together`.
    """
    leader = Leader(world)
    try:
        share = load_share(world, name, options, settings)
        leader.lifelines.releases.extend(share.releases)
        facts = [share.facts, *(json.loads(data) for data in leader.reports())]
        return _checked(share, leader, name, options, facts)
    except RankError:
        raise
    except DraftreeError:
        leader.drop()
        raise
    except Exception as error:  # often one of a collective operation, which another rank left
        leader.give_up(error)
    except BaseException:
        leader.drop()
        raise


def attend(
    world: World, member: Member, name: str | os.PathLike[str], options: ParallelOptions, settings: LoadSettings
) -> None:
    """Load another rank's share and run its passes until rank 0 stops; on failure the process ends with status 1."""
    try:
        share = load_share(world, name, options, settings)
        member.lifelines.releases.extend(share.releases)
        member.report(json.dumps(share.facts).encode())
        follow(share.model, member, has_parts=share.is_native)
    except RankError as error:
        logger.info("%s", error)
        _leave()
    except DraftreeError as error:
        logger.info("rank %d cannot run its share: %s", world.rank, error)
        # mostly one that rank 0 raises as well, and shows; it must not be ended before
        member.lifelines.wait(GRACE_SECONDS)
        member.fail(str(error))
        _leave()
    except Exception as error:
        lost = member.lifelines.noticed()
        if lost is not None:  # then this is the error of a collective operation that another rank left
            logger.info("%s, so rank %d ends", lost, world.rank)
            _leave()
        logger.exception("rank %d failed", world.rank)
        member.fail(first_line(error))
        _leave()
    member.close()


def _leave() -> NoReturn:
    """End the process at once: threads of a broken collective operation may never end."""
    logging.shutdown()
    os._exit(FAILED)


def _checked(
    share: LoadedShare,
    leader: Leader,
    name: str | os.PathLike[str],
    options: ParallelOptions,
    facts: Sequence[dict[str, Any]],
) -> LoadedModel:
    """Check the whole model, which all ranks run by now.

    Raises:
        UnsupportedModelError: its logits differ from those of transformers.
    """
    own = share.model
    own.max_length = min(int(each["max_length"]) for each in facts)
    if "samples" in share.facts:
        samples = {key: bytes.fromhex(text) for each in facts for key, text in each["samples"].items()}
        own.fingerprint = fingerprint_of(own.kind, samples)
    model = ParallelModel(own, leader, has_embeddings=options.pp == 1, has_parts=share.is_native)
    result = check(model, share.reference, tolerance=share.tolerance)
    if not result.chains_ok or (share.is_native and not result.trees_ok):
        error = max(result.chain_error, result.tree_error if share.is_native else 0.0)
        raise UnsupportedModelError(
            f"{own.kind} gives other logits when it is divided (error {error:.1e} of their spread): use one process"
            + (", or kernels 'torch'" if share.is_native else "")
        )
    model.supports_trees = own.supports_trees = result.trees_ok
    model.self_check = result
    # the order of other sums depends on the number of rows
    has_order = share.is_native or options.tp == 1 or options.strict_sums
    lengths = NATIVE_LENGTHS if share.is_native else EXACT_LENGTHS
    model.is_exact = share.is_fixed and has_order and result.is_exact and rounds_alike(model, lengths)
    return LoadedModel(model, share.folder, share.eos_ids, str(name), share.kernels, share.quantization)
