"""The causes that verify can name: what each means, and what to look at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Text:
    means: str
    look_at: str


class Cause(Enum):
    """The first found is the one to mend first: the others often follow from it."""

    DATA_BY_HASH = Text(
        "the ranks have different data: they follow from the order of a set, or from hash()",
        "sets, and hash() of strings: each process has its own; sort what comes out of a set, or use a dict",
    )
    DATA_BY_LISTING = Text(
        "the ranks have different data: they follow from the order in which a folder gives its files",
        "os.listdir, glob and iterdir, which give files in no order: sort them",
    )
    WORKERS = Text(
        "loader workers change what a rank gets",
        "get_worker_info() in the data set: an index must be the same sample whichever worker asks; shardwise shares out the "
        "indices",
    )
    DATA_BY_RANK = Text(
        "the ranks have different data: they follow from RANK, WORLD_SIZE or what the process is",
        "RANK, LOCAL_RANK and WORLD_SIZE in the data set, or torch.distributed: every rank makes the same data, and shardwise "
        "gives each its share",
    )
    DATA_CHANGE = Text(
        "the data are not the same when read again: by the same process, or by the next one",
        "a data set or a collate() that draws from a generator of its own, or from the clock: torch, numpy and random are "
        "seeded for every sample, so what is drawn from them is drawn again",
    )
    MODELS_DIFFER = Text(
        "the ranks build different models: other parameters, or the same in another order",
        "what build_model() takes from a set, from hash(), from the files of a folder, or from RANK: sort what comes out of it",
    )
    DIFFERENT_SEEDS = Text(
        "the ranks start from different weights (different seeds, or weights not sent from rank 0)",
        "the seed before the model is built, and the broadcast of weights",
    )
    COLLECTIVE_MISMATCH = Text(
        "mismatched collectives: the ranks did not call the same collectives in the same order",
        "code that only some ranks run: `if rank == 0`, or a condition on a rank's own samples, around something that speaks "
        "with the others",
    )
    BRANCHES_DIFFER = Text(
        "the ranks took different branches: one left the loop, the others wait for it",
        "a decision (stop, save, skip) that each rank takes for itself; agree on it first",
    )
    HANG = Text(
        "the ranks hang",
        "the place named above; a lock, a queue, or a collective that one rank never calls",
    )
    HIDDEN_STATE = Text(
        "the loss depends on state in plain attributes, which no rank shares and no checkpoint has",
        "what is named above: make it a buffer that is the same on all ranks, or a function of the step",
    )
    WEIGHTS_BY_SAMPLES = Text(
        "a forward or backward pass changes a weight by the samples it sees: every rank changes its own otherwise",
        "what writes into the parameter named above (max_norm of an embedding, an update in no_grad or in a hook): make it a "
        "buffer that is averaged over the ranks, or leave it to the optimizer",
    )
    EVALUATION_CHANGES = Text(
        "evaluation changes the run: with another number of evaluations, other weights come out",
        "what evaluate() and study() set: weights, buffers, flags, frozen layers, seeds; put it back, or work on a copy",
    )
    RANDOM_FORWARD = Text(
        "the forward pass is random although dropout is off (noise, stochastic depth, sampling in the model)",
        "what the model or the loss draws in training mode; switch it off with --set, and verify again",
    )
    ORDER_MATTERS = Text(
        "the order of the samples within a batch changes the gradient, far beyond rounding",
        "what is drawn when a batch is put together (collate), or a loss that looks across samples",
    )
    DETACHED_PARAMETER = Text(
        "a trainable parameter gets no gradient",
        "a detach(), a no_grad() or .data in its path; freeze it if that is meant",
    )
    TIED_WEIGHT_SPLIT = Text(
        "a tied weight was split: two names that were one parameter are two after spreading",
        "how the model is spread: tied modules must stay in one unit, and be moved together",
    )
    STALE_BUFFERS = Text(
        "stale buffers: a buffer is not the same on every rank when it is evaluated with and saved",
        "the broadcast of buffers after building, and before evaluation and saving",
    )
    OWN_BUFFERS = Text(
        "the gradient depends on a buffer that follows a rank's own samples, so every rank computes with another one",
        "how the buffer is updated: average over the ranks what goes into it, or leave it out of the forward pass in training",
    )
    SAMPLER = Text(
        "the ranks do not share out the samples of a step: some are used twice or left out",
        "the sampler: rank and number of ranks must reach it",
    )
    SCHEDULE = Text(
        "the learning rate is another one",
        "the schedule: it must follow from the step alone, and scaling by the number of ranks must happen once",
    )
    ALL_UNSYNCHRONISED = Text(
        "no gradient is synchronised: every rank goes its own way",
        "no_sync() or set_requires_gradient_sync(False) left on, or a model that is called around its wrapper",
    )
    UNSYNCHRONISED_PARAMETER = Text(
        "the gradient of this parameter is not synchronised between the ranks",
        "a parameter registered after wrapping, ignored by the wrapper, or used around it",
    )
    ONE_SIDED_PARAMETER = Text(
        "the gradient of this parameter comes from some of the ranks only",
        "where the parameter is used: a branch (`if rank == 0`, or one on the data) that only some ranks take, a detach()",
    )
    RANKS_COMPUTE_DIFFERENTLY = Text(
        "some ranks compute something else than the others: not what one process gets from the same samples",
        "what only some ranks run in the model or the loss: a term of the loss behind `if rank == 0`, a block that is run twice",
    )
    ENGINE_STEP = Text(
        "one process on its own does not compute what plain PyTorch does",
        "the training step itself: how the loss is divided, which parameters the optimizer holds",
    )
    MEAN_OF_MEANS = Text(
        "mean of means: each rank or micro-batch divides its loss by its own count",
        "the loss scaling: divide the sum over all ranks and micro-batches by the count over all of them, once",
    )
    SCALED_BY_WORLD = Text(
        "the gradient is off by the number of ranks: averaged once too often, or not at all",
        "the loss scaling: gradients are averaged over the ranks, so the loss is multiplied by their number",
    )
    WRONG_SCALING = Text(
        "wrong loss scaling: every gradient is off by the same factor",
        "what the loss is divided by, and whether accumulation counts every micro-batch",
    )
    MICRO_BATCH_LOST = Text(
        "a micro-batch of the accumulation is left out or used alone",
        "the accumulation loop: where it begins and ends, and when gradients are set to zero",
    )
    LOSS_IS_NO_SUM = Text(
        "the task's loss is not a sum over samples: it changes when the batch is split",
        "the task's loss(), and its collate(): return the sum, and in count what it is to be divided by; nothing may look across "
        "samples, nor leave any out",
    )
    CLIPPED_BEFORE_REDUCED = Text(
        "gradients are clipped or scaled on each rank before they are reduced: every rank by its own norm",
        "hooks on parameters, and clipping outside of the training step: gradient_clip clips by the norm of the whole",
    )
    UNEVEN_WEIGHTS = Text(
        "the ranks or micro-batches do not count alike: the gradient is a weighted sum of theirs, with the wrong weights",
        "what each micro-batch's loss is divided or multiplied by",
    )
    ALL_GRADIENTS = Text(
        "every gradient is wrong, on every rank: they all compute something else than one process does",
        "what depends on WORLD_SIZE or on the number of ranks, on what each process keeps to itself, and a wrong divisor",
    )
    BEGINS_LATER = Text(
        "from the same weights and moments, the ranks compute something else than one process at a later step only",
        "what the step named above has that earlier ones had not: a rare sample, a short batch, a counter, a branch on numbers",
    )
    GRADIENTS = Text(
        "some gradients are wrong",
        "what is special about this parameter: tied, used twice, frozen in places, outside the wrapped module",
    )
    RANK_FAILED = Text(
        "a rank failed",
        "the error above; it comes from the program itself",
    )
    CLIP_NORM = Text(
        "the norm is not that of the whole gradient: each rank took its own part",
        "the clip norm: norms of shards must be combined over the ranks before clipping",
    )
    REPORTED_LOSS = Text(
        "the loss that is reported is not the loss that was trained on",
        "how losses are added up over ranks and micro-batches for the log",
    )
    SOME_RANKS_UPDATE = Text(
        "the update ran on some ranks only, or differently on each",
        "the optimizer step: every rank must take it, with the same state",
    )
    DRIFT = Text(
        "the run leaves the reference after the first step",
        "what only happens later: clipping, the optimizer's state, the short batch at the end of an epoch",
    )
    NOT_DETERMINISTIC = Text(
        "two runs of the same ranks are not bit for bit the same, so no resume could be",
        "non-deterministic kernels, or randomness that does not follow from the seed",
    )
    WEIGHTS_NOT_RESTORED = Text("the checkpoint does not bring the weights back", "what is saved and loaded")
    OPTIMIZER_NOT_RESTORED = Text(
        "forgotten optimizer state: moments start from zero after a resume",
        "whether the optimizer's state is in the checkpoint and loaded",
    )
    CURSOR_NOT_RESTORED = Text(
        "the data cursor is not restored: after a resume, samples are used again or left out",
        "whether the position in the epoch is in the checkpoint",
    )
    SCHEDULE_NOT_RESTORED = Text(
        "forgotten schedule: after a resume the learning rate starts over",
        "whether the step that the schedule counts from is in the checkpoint",
    )
    SUMS_IN_ANOTHER_ORDER = Text(
        "after a resume the same numbers are added up in another order: all that the checkpoint carries is right, and the "
        "last digits differ",
        "what a new process decides for itself at its first step: DDP, on more than two ranks, lays out its buckets anew "
        "after the first backward pass",
    )
    RESUME = Text("a resumed run does not do what the undisturbed one did", "what is not in the checkpoint")
    NO_CHECKPOINT = Text(
        "a killed run left nothing to resume from", "whether a checkpoint is whole before it is renamed"
    )
    NEVER_SAVES = Text(
        "the program never saves: a killed run begins anew",
        "where the loop calls session.save(): every few minutes, on all ranks, and not at the end alone",
    )
    NEVER_RESUMES = Text(
        "the program does not go on from its checkpoint: started again, it begins anew",
        "the call of session.resume(), after prepare() and before the loop",
    )
    OTHER_RANKS = Text(
        "resumed on another number of ranks, the run leaves the curve",
        "whether shards are put together, and whether the global batch stays the same",
    )
    DROPPED = Text(
        "samples are dropped: some are never trained on in an epoch",
        "the last, short batch: drop_last, or a size rounded down",
    )
    REPEATED = Text(
        "samples are used twice in an epoch: padding of the last batch, or ranks that do not share",
        "the last, short batch and the sampler",
    )
    NOT_RESHUFFLED = Text(
        "the sampler is not reshuffled: every epoch has the same order",
        "whether the epoch reaches the sampler (set_epoch)",
    )
    OVERLAP = Text(
        "validation samples are in the training data",
        "the split: by sample, after duplicates are gone, with one seed",
    )
    METRIC_OF_SOME_RANKS = Text(
        "a metric is counted on some ranks only",
        "`if rank == 0` in evaluate(): every rank returns the sum and the count of its own samples",
    )
    EVALUATION_RANDOM = Text(
        "two evaluations of the same weights do not agree",
        "what evaluate() adds up in attributes and never sets to zero, and generators of its own",
    )
    METRIC_DIFFERS = Text(
        "a metric depends on how the validation samples are shared out",
        "evaluate(): return for every metric the sum over samples and their count; a mean of a micro-batch that counts as one, "
        "or anything that looks across samples, is another on other ranks (what needs all samples together goes through Rows)",
    )
    EVALUATION_FAILS = Text(
        "evaluation fails",
        "the error above",
    )
