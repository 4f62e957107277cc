"""Every tuning constant of the solvers, with the reason for its value.

None of them decides whether a plan is right: the simulator evaluates every plan. They trade planning time against the
quality of plans. ``*_EVENTS`` limit search by simulated events, a count that stands in for a clock, so that the same
input gives the same plan. Sizes are ``CoarseGraph.size`` unless the name says ops.

"By trial": good plans in acceptable time on the models of ``tests/graphs``; no study of other values is recorded. Dates
refer to ``benchmarks/LOG.md``.
"""

import math
from typing import Final

# When a search stops (search_context.py)
TIME_LIMIT_S: Final = 60.0  # One stage; a safety net, since what a clock cuts off differs from run to run.
NODE_LIMIT: Final = 1000  # Branch-and-bound nodes of one MILP: a count, so that plans are reproducible. By trial.
GAP: Final = 0.01  # Of recompute time, where groups of ops are modelled; the documented default of ``solve``.
STEP_GAP: Final = 0.0025  # Of the step: proving 1 % of recompute time took 66 s, not 2 s; same plans (2026-11-20).
FIRST_PLAN_EVENTS: Final = 100_000  # To bring the first plan within the budget. By trial.
SAVE_WHAT_FITS_EVENTS: Final = 400_000  # To save again what the budget has room for. By trial.

# Which search plans a step (exact.py)
MONOLITHIC_SIZE: Final = 2000  # Steps up to this size are one model; larger MILPs take too long.
MONOLITHIC_NO_REPEATS_SIZE: Final = 6000  # Where no segments are equal: U-Net +7.0, decomposed +12.7 % (2026-11-20).
MONOLITHIC_OPS: Final = 300  # Ops worth replaying: above, one model is not even built, to save time. By trial.
MIN_SEGMENTS: Final = 3  # Fewer are not decomposed. By trial.
MIN_PEAK_EVENTS: Final = 1_500_000  # Local search for the least peak, each start. At 700,000: chain48 +710 to +1420 %.

# The least peak (least_peak.py)
LEAST_PEAK_EVENTS: Final = 2_500_000  # Simulated, replays included, all starts together. By trial.
LEAST_PEAK_START_EVENTS: Final = 800_000  # From one start. By trial.
LEAST_PEAK_DEEP_EVENTS: Final = 3500  # Of the step: above, everything recomputed is too far from the least.
LEAST_PEAK_ALL_CHOICES: Final = 8  # Storages that may be recomputed: up to here every choice is tried, 256 in 20 ms.
LEAST_PEAK_MODEL_SIZE: Final = 5000  # Of one model, in 0.1 to 2 s: 0.5 to 10 points of activations (2026-11-28).
LEAST_PEAK_RESTARTS: Final = 20  # From the best with a few decisions turned over. By trial.
LEAST_PEAK_TURNS: Final = (1, 2, 4)  # Decisions of each kind that are turned over at a time, on average. By trial.
LEAST_PEAKS_KEPT: Final = 16  # Graphs whose least is remembered.

# One model for the whole step (milp/monolithic.py)
ROUNDING_EVENTS: Final = 2_000_000  # To bring one rounded relaxation within the budget. By trial.
ROUNDING_MAX_EXCESS: Final = 0.05  # Of the step above the relaxation's bound: slower starts are given up. By trial.
ROUNDING_THRESHOLDS: Final = (0.25, 0.5, 0.75)  # What a relaxation keeps by less is recomputed. By trial.
MIN_PEAK_MILP_SIZE: Final = 600  # Above, the MILP for the least peak took 7 to 30 s and was no better (2026-11-21).
MIN_PEAK_NODES: Final = 10  # The root gives good answers; a proof takes thousands of nodes.

# What is one group of ops (milp/coarsening.py)
MERGE_SHARE: Final = 0.2  # An op joins its consumer from this share of the consumer's bytes: some 16 groups a layer.
KEEP_SHARE: Final = 0.75  # A dear op that makes less stays apart: plans may keep bf16 (0.5) of what is fp32 after it.
TINY_OUTPUT_SHARE: Final = 0.05  # Of a group's bytes: smaller outputs (norm statistics, logsumexp) follow the largest.
PER_OP_MODEL_OPS: Final = 12  # Graphs up to this many replayable ops are modelled op by op. By trial.

# Steps with several backward passes over the same graph (published/methods.py)
PASS_REPLAYS: Final = (2, 3, 6, 99)  # Of each recomputed op; as many as passes: kept for each (2026-11-26).

FEWER_REPLAYS: Final = 4  # Of an op that runs more often: MAML at its least peak 9.0 to 4.5 plain steps (2026-11-26).

# The MILP (milp/peak_model.py, milp/highs.py)
ALL_BURSTS_SIZE: Final = 300  # Up to this size all burst rows are there from the start; above, cuts add them. By trial.
TIE_BREAK: Final = 2e-3  # Times fall by this share over the depth: equal layers would be interchangeable. By trial.
LAZY_ROWS_GAIN: Final = 1e-4  # Of the optimum: adding every lazy row took 1.2 to 8.9 s and gained 0.05 % (2026-11-21).
LAZY_ROWS_SMALL: Final = 15_000  # Rows: all at once takes 0.23 s where one after the other takes 0.48 (2026-11-22).
LAZY_ROWS_LARGE: Final = 30_000  # Rows: stopping early in smaller programs cost 3 % (MoE 25 %) (2026-11-21).
ROW_TOLERANCE: Final = 1e-6  # HiGHS's own is 1e-7.

# Segments and columns (decomposition/segments.py, master.py, pricing.py)
SMALL_SEGMENT_OPS: Final = 12  # Segments with fewer ops worth replaying join the one before. By trial.
PRICING_ROUNDS: Final = 15  # Of pricing every pool. By trial.
PRICING_SHORTAGE_ROUNDS: Final = 3  # Of them, after quick columns have run out and memory is still short. By trial.
MIN_PEAK_PIVOTS: Final = 30_000  # Of simplex. Most steps: up to 15,000; RWKV's recurrence: 100,000, 64 s (2026-11-28).
MIN_PEAK_PRICING_ROUNDS: Final = 5  # The least peak found here is only where local search begins.
PUBLISHED_FIRST_EVENTS: Final = 10_000  # Of the step: above, quick columns may take seconds (5, 2026-11-27).
QUICK_PRICING_GAIN: Final = 2e-3  # Of the relaxation: rounded columns are looked for while they gain as much. By trial.
PRICING_GAIN: Final = 5e-3  # Of recompute time: columns that promise less are not looked for. By trial.
DENSIFY_POINTS: Final = 36  # Columns looked for between the known ones, all pools together. By trial.
DENSIFY_MIN_POINTS: Final = 4  # Of one pool. By trial.
DENSIFY_THRESHOLDS: Final = (0.25, 0.5, 0.75)  # What a relaxation keeps by less is recomputed. By trial.
DENSIFY_SIZE: Final = 140  # Larger segments get fewer points, because one takes longer.
MIXTURE_TRIES: Final = (
    12  # Columns looked for between those that a relaxation mixes; fewer in larger segments. By trial.
)
USED_COLUMN_SHARE: Final = 1e-6  # Smaller shares of a column are numerical noise.
SHORTAGE_PRICE: Final = 1e4  # Scaled units: running short has to be dearer than any column.
PRICING_NODES: Final = 5  # Branch-and-bound nodes of one pricing problem. By trial.
PRICING_GAP: Final = 1e-2  # Finer columns took twice the time, and no plan was better by more than 0.02 %.
PRICING_CUT_ROUNDS: Final = 4  # Of one pricing problem. By trial.
COLUMN_SEARCH_EVENTS: Final = 80_000  # To lower the peak of one column by local search. By trial.
COLUMN_SEARCH_PRICE: Final = 2.0  # Of a byte's dual price: prices still move, so dearer changes count. By trial.

# The choice of columns (decomposition/shortest_path.py, multi_segment.py, decomposed_search.py)
MAX_LABELS: Final = 6000  # Of one stage, to limit time; the result stays within the budget. By trial.
FORWARD_END_PARTS: Final = 256  # Classes of bytes saved at forward's end, within which labels are compared. By trial.
FIRST_RUN_SEGMENTS: Final = 4  # Longest run of segments at first; doubled while the longest ones are used. By trial.
PAIR_PRICE_SHARES: Final = (0.7, 0.85, 1.0, 1.15, 1.3)  # Of a byte's price; 18 instead of 5 gain 0.015 % (2026-11-22).
PAIR_EXACT_SHARES: Final = (1.0, 1.15)  # At these the best columns too: 32 layers +24.16 to +24.02 % (2026-11-22).
PAIR_EXACT_SIZE: Final = 1400  # Of a pair: up to here at all, and no rounded ones: autocast at 50 % +2.43 to +1.80 %.
PAIR_PEAK_SHARE: Final = 0.01  # Of a byte's price: the earlier the pair, the less its own peak matters. By trial.
NEAR_BOUND: Final = 0.004  # Of the step: the target is a gap of 0.5 %, so this is near enough to stop.
FAR_FROM_BOUND: Final = 0.02  # Of the step: too far for a tighter bound alone (``TIGHT_GAP``) to close.
BUDGETS_ABOVE: Final = (0.02, 0.03, 0.05)  # Of activation memory: larger budgets to come down from. By trial.
BUDGETS_ABOVE_EVENTS: Final = 1_200_000  # To come down from one of them. By trial.
BUDGETS_ABOVE_TRIES: Final = 150  # Steps whose events do not allow this many tries are left out. By trial.
LP_ROUNDING_EVENTS: Final = 4_000_000  # To bring one start from the bound's relaxation within the budget. By trial.

# Local search (local_search.py)
MAX_PEAK_HOLDERS: Final = 16  # Of each kind, the largest, that are asked to give way. By trial.
MAX_DESCENT_STEPS: Final = 300  # Of one descent. By trial.

# Plans from the bound's relaxation (lp_rounding.py)
LP_ROUNDING_OPS: Final = 2500  # Larger steps take too long to relax and simulate. By trial.
LP_ROUNDING_ROUNDS: Final = 3  # Relaxations, each with more slots. By trial.
LP_ROUNDING_THRESHOLDS: Final = (0.25, 0.5)  # What the relaxation keeps by less is recomputed. By trial.
LP_ROUNDING_MAX_EXCESS: Final = 0.2  # Of the budget's activations: further above, local search fails. By trial.
SLOTS_PER_ROUND: Final = 2  # Slots added where memory is most above the budget. By trial.
STAGES_APART: Final = 3  # Stages this close share one slot. By trial.

# The lower bound (lower_bound/)
TIGHT_GAP: Final = 0.0098  # Of the step: the target is a gap below 1 %, so that 0.98 stands in tables.
TIGHTEN_MAX_GAP: Final = 0.05  # Of the bound: larger gaps are not closed in time. By trial.
TIGHTEN_ROUNDS: Final = 4  # Of slots. By trial.
TIGHTEN_ROUND_WORK: Final = (
    60_000  # Rows times nodes: where that is not enough, slots help more than nodes (2026-11-22).
)
TIGHTEN_WORK: Final = 40_000_000  # Rows times simplex iterations, time by count: no further round after some 2 s.
TIGHTEN_MAX_ROWS: Final = 10_000  # Larger programs take too long for one node. By trial.
SLOT_PER_STAGE_SIZE: Final = 400  # Ops x stages: up to here each stage has a slot; finer above was slower (2026-11-20).
BACKWARD_MOMENTS: Final = 96  # Rows of backward; not by the budget, so that the bound falls as it grows. By trial.
ALL_MOMENTS_OPS: Final = 2500  # Up to this many ops every moment of backward has a row. By trial.
FETCH_MOMENTS: Final = 12  # Moments of backward by which fetches must be back. By trial.
BOUND_TOLERANCE: Final = 1e-6  # Of the objective, taken off every bound: HiGHS's own, with room.

# Published methods (published/)
KNAPSACK_UNITS: Final = 10_000  # Weight units, as in PyTorch.
KNAPSACK_RATIOS: Final = tuple(step / 100 for step in range(101))  # Plans offered.
KNAPSACK_ILP_RATIOS: Final = tuple(step / 20 for step in range(20))  # Fewer: one ILP takes a hundred times as long.
KNAPSACK_ILP_GAP: Final = 1e-4  # SciPy's default, which PyTorch uses.
KNAPSACK_ILP_NODES: Final = 200  # By trial.
KNAPSACK_ILP_TIME_LIMIT_S: Final = 10.0  # A safety net. By trial.
ROTOR_UNITS: Final = 500  # Memory units of the dynamic program, as published.

# Offloading (offload/)
LINK_LOADS: Final[tuple[float, ...]] = (0.5, 1.0, 1.5)  # Of what the links can carry without a wait. By trial.
HEAVY_LINK_LOADS: Final = (1.0, 2.0, 4.0, math.inf)  # Where recomputing alone does not fit. By trial.
MIN_OFFLOAD_SHARE: Final = 1e-3  # Of the stored bytes: a smaller storage is not worth a transfer.
OFFLOAD_NODE_LIMIT: Final = 300  # Of one of many searches. By trial.
TRANSFER_INTERFERENCE: Final = 0.05  # Of a transfer's time, charged in ranking for memory bandwidth. By trial.
OFFLOAD_SWAP_EVENTS: Final = 300_000  # Scheduled, all tries together: 75 tries on 1037 ops, 3 to 5 s (2026-11-21).
FETCH_SPARE_SHARE: Final = 0.3  # Of a fetch's time, added: links are slower on some days. By trial.
FETCH_DELAY_ROUNDS: Final = 6  # Of putting fetches off where memory is above the budget. By trial.
STORES_IN_FLIGHT: Final = (2, 1, 0)  # Largest storages on their way out at once: double buffering first.
