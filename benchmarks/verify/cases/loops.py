"""The programs of this folder that have a loop of their own, `loop_*.py`."""

from case import loop

loop("loop-clean", "own loop", "loop_clean.py")
loop("loop-clean-observer", "own loop", "loop_clean_observer.py")
loop(
    "loop-never-saves",
    "own loop saves",
    "loop_never_saves.py",
    "a killed run leaves nothing to go on from",
    ("never_saves", "no_checkpoint"),
)
loop(
    "loop-never-resumes",
    "own loop resumes",
    "loop_never_resumes.py",
    "a new process does not go on from the checkpoint",
    ("never_resumes", "resume", "weights_not_restored", "cursor_not_restored", "no_checkpoint"),
)
loop(
    "loop-weights-only",
    "own loop resumes",
    "loop_weights_only.py",
    "the optimizer, the cursor and the schedule start anew after a resume",
    (
        "optimizer_not_restored",
        "cursor_not_restored",
        "schedule_not_restored",
        "no_checkpoint",
        "resume",
        "weights_not_restored",
    ),
)
loop(
    "loop-first-weights-again",
    "own loop resumes",
    "loop_first_weights_again.py",
    "the weights of the checkpoint are overwritten after the resume",
    ("weights_not_restored", "resume"),
)
loop(
    "loop-skips-again",
    "own loop resumes",
    "loop_skips_again.py",
    "samples are left out after a resume",
    ("cursor_not_restored", "resume", "dropped"),
)
loop(
    "loop-seeded-by-clock",
    "own loop seeds",
    "loop_seeded_by_clock.py",
    "the first weights are other ones in each run",
    ("different_seeds", "not_deterministic"),
)
loop(
    "loop-rate-by-world",
    "own loop rates",
    "loop_rate_by_world.py",
    "the learning rate depends on the number of ranks",
    ("schedule",),
)
loop(
    "loop-rate-by-rank",
    "own loop rates",
    "loop_rate_by_rank.py",
    "each rank updates by another learning rate",
    ("schedule", "some_ranks_update"),
)
loop(
    "loop-one-rank-stops",
    "own loop stops",
    "loop_one_rank_stops.py",
    "one rank leaves the loop, the others wait for it",
    ("branches_differ", "hang", "collective_mismatch", "rank_failed"),
)
loop(
    "loop-saves-on-rank-0",
    "own loop saves",
    "loop_saves_on_rank_0.py",
    "only one rank calls what all have to",
    ("collective_mismatch", "hang", "branches_differ", "rank_failed"),
)
loop(
    "loop-evaluates-on-rank-0",
    "own loop evaluates",
    "loop_evaluates_on_rank_0.py",
    "only one rank calls what all have to",
    ("collective_mismatch", "hang", "branches_differ", "rank_failed"),
)
loop(
    "loop-reduced-twice",
    "own loop gradients",
    "loop_reduced_twice.py",
    "gradients are added up over the ranks twice",
    ("scaled_by_world", "wrong_scaling", "clip_norm", "drift"),
    visible="after the gradients are reduced",
)
loop(
    "loop-gradient-noise-by-rank",
    "own loop gradients",
    "loop_gradient_noise_by_rank.py",
    "each rank adds noise of its own to the gradients",
    (
        "some_ranks_update",
        "unsynchronised_parameter",
        "all_unsynchronised",
        "gradients",
        "drift",
        "ranks_compute_differently",
    ),
    visible="after the gradients are reduced",
)
loop(
    "loop-clamped-on-rank-0",
    "own loop weights",
    "loop_clamped_on_rank_0.py",
    "the weights of one rank are changed",
    ("some_ranks_update", "drift", "different_seeds"),
)
loop(
    "loop-average-lost",
    "own loop weights",
    "loop_average_lost.py",
    "the average of the weights is not in the checkpoint",
    ("resume",),
    visible="after a resume, from step 6 on",
)
loop(
    "loop-own-step-counter",
    "own loop resumes",
    "loop_own_step_counter.py",
    "a counter that is in the loss is not in the checkpoint",
    ("resume",),
    visible="after a resume",
)
loop(
    "loop-small-batches-skipped",
    "own loop stops",
    "loop_small_batches_skipped.py",
    "one rank leaves out a step, the others wait for it",
    ("branches_differ", "hang", "collective_mismatch", "rank_failed"),
)
