"""Tests that are too long for `make test`: `make nightly` runs them and stores the result (nightly.py).

`make test` keeps a test of every subject: some rows of a table, one of two databases, one of several whole stacks.
"""

from collections.abc import Collection

INTEGRATION, ACCEPTANCE = "tests/integration/test_", "tests/acceptance/test_"
KERNELS, UNIT = "tests/kernels/test_mamba3_", "tests/unit/model/"

LONG = (
    f"{ACCEPTANCE}damaged_home.py::test_a_stack_starts_again_over_damaged_files_and_loses_no_result",
    f"{ACCEPTANCE}declared_metrics.py",
    f"{ACCEPTANCE}demo.py",
    f"{ACCEPTANCE}own_code.py::test_a_program_without_marks_is_judged_by_the_time_of_its_process",
    f"{ACCEPTANCE}own_code.py::test_a_pull_request_is_measured_by_its_commits_and_every_receipt_names_its_content",
    f"{ACCEPTANCE}own_code.py::test_a_token_without_the_scope_and_a_node_that_accepts_no_code_run_nothing",
    f"{ACCEPTANCE}own_recipe.py",
    f"{ACCEPTANCE}report_in_browser.py::test_nothing_overflows_or_overlaps",
    f"{ACCEPTANCE}restore.py::test_a_restored_home_says_the_same_shows_the_same_and_works_on",
    f"{ACCEPTANCE}secrets.py",
    f"{ACCEPTANCE}sentinels.py",
    f"{ACCEPTANCE}several_nodes.py",
    f"{ACCEPTANCE}stack.py::test_up_joins_a_running_stack",
    f"{INTEGRATION}arm_outcome.py",
    f"{INTEGRATION}check.py::test_a_program_that",
    f"{INTEGRATION}check.py::test_a_program_without_marks_can_only_be_timed_whole",
    f"{INTEGRATION}ci_page.py::test_a_pull_request_that_changes_nothing_passes_and_is_told",
    f"{INTEGRATION}exec.py::test_arms_that_are_late_again_have_it_as_their_result",
    f"{INTEGRATION}exec.py::test_import_follows_to_verdict_report_and_mlflow",
    f"{INTEGRATION}exec.py::test_load_by_others_reruns_the_block_and_is_no_result",
    f"{INTEGRATION}exec_code.py::test_an_altered_or_missing_archive_stops_a_run_before_it_begins",
    f"{INTEGRATION}frozen_broker.py::test_wake_ups_go_on_when_the_broker_does",
    f"{INTEGRATION}interleavings.py",
    f"{INTEGRATION}leader.py::test_another_process_takes_over_and_mlflow_equals_the_database",
    f"{INTEGRATION}mlflow_accounts.py",
    f"{INTEGRATION}mlflow_sink.py::test_killed_after_any_call_the_next_projection_finishes_the_same_state",
    f"{INTEGRATION}mlflow_sink.py::test_reviewers_see_ablations_alone_each_with_its_answer",
    f"{INTEGRATION}planted.py::test_a_planted_change_of_numerics_is_caught_at_the_first_step",
    f"{INTEGRATION}planted.py::test_a_planted_stall_is_said_and_decides_nothing",
    f"{INTEGRATION}readiness.py::test_frozen_parts_and_many_strangers_hold_nobody_up",
    f"{INTEGRATION}readiness.py::test_strangers_share_the_work_that_they_ask_for",
    f"{INTEGRATION}rolling_restart.py",
    f"{INTEGRATION}schemathesis.py::test_every_operation_answers_as_its_document_says",
    f"{INTEGRATION}secrets.py::test_a_running_service_whose_servers_refuse_says_nothing_secret",
    f"{INTEGRATION}secrets.py::test_an_address_that_does_not_work_is_reported_without_its_password",
    f"{INTEGRATION}secured_servers.py::test_a_database_that_was_killed_comes_back_and_nothing_is_lost",
    f"{INTEGRATION}slices.py::test_load_by_others_during_the_slices_spoils_the_block_and_is_named",
    f"{INTEGRATION}stopping.py::test_a_bench_that_is_told_to_stop_ends_its_servers",
    f"{INTEGRATION}sub_path.py::test_a_page_is_live_in_a_browser_below_the_path",
    f"{INTEGRATION}sub_path.py::test_every_link_of_every_page_leads_below_the_path[keeps",
    f"{INTEGRATION}torchrun.py::test_a_rank_that_fails_at_any_step_is_a_failure_of_the_program",
    f"{INTEGRATION}web_in_browser.py::test_no_page_has_a_barrier_or_overflows_or_is_heavy",
    f"{INTEGRATION}worker_blocks.py::test_where_compile_time_decides_every_trial_compiles_from_nothing",
    "tests/kernels/test_compile_first.py::test_kernels_are_compiled_once_and_only_tests_that_need_a_bad_one_fail",
    "tests/kernels/test_compile_first.py::test_nothing_is_compiled_for_tests_that_cannot_be_collected",
    "tests/kernels/test_kernel_page.py::test_command_line_of_the_page_runs_a_problem",
    "tests/kernels/test_kernel_page.py::test_example_of_the_page_runs_every_kernel",
    f"{KERNELS}cuda_budgets.py::test_a_sample_costs_what_is_stored_for_the_same_inputs",
    f"{KERNELS}cuda_budgets.py::test_code_shows_the_requested_gates",
    f"{KERNELS}cuda_budgets.py::test_flipped_gate_changes_the_machine_code",
    f"{KERNELS}cuda_budgets.py::test_fresh_process_loads_compiled_kernels_and_another_length_needs_no_more",
    f"{KERNELS}cuda_budgets.py::test_kernels_stay_within_their_budgets",
    f"{KERNELS}cuda_budgets.py::test_offsets_beyond_two_to_the_31_have_64_bits",
    f"{KERNELS}cuda_budgets.py::test_two_blocks_of_the_lifted_walk_fit_a_processor_or_one_with_two_groups",
    f"{KERNELS}cuda_eager.py",
    f"{KERNELS}cuda_merged.py",
    f"{KERNELS}cuda_on_cpu.py::test_interpreted_kernels_match_the_reference",
    f"{KERNELS}cuda_op.py::test_compile_leaves_sizes_open_without_failing",
    f"{KERNELS}cuda_remat.py::test_making_states_again_changes_no_bit",
    f"{KERNELS}cuda_sizes.py::test_a_program_knows_neither_batch_nor_length",
    f"{KERNELS}cuda_states.py::test_interpreted_kernels_take_and_give_states_as_the_reference_does",
    f"{KERNELS}cuda_states.py::test_pieces_of_a_row_equal_the_whole",
    f"{KERNELS}cuda_time_gradients.py::test_lanes_share_out_the_angles",
    f"{KERNELS}cuda_time_gradients.py::test_sums_stop_where_documents_end",
    f"{KERNELS}fuzz.py::test_problem_is_right_in_the_interpreter",
    f"{KERNELS}fuzz_criterion.py::test_honest_rounding_is_right_on_every_problem",
    "tests/kernels/test_psiv_cache.py::test_peak_memory_differs_by_the_cached_bytes",
    f"{UNIT}parallel/test_ranked_training.py::test_ranks_train_as_one_process_does",
    f"{UNIT}test_train.py::test_train_compiled_follows_the_eager_curve_and_tells_its_compilation",
    f"{UNIT}test_train.py::test_train_gives_the_same_bits_in_fresh_processes",
)
"""How their names begin."""
EXCEPT = (
    f"{ACCEPTANCE}report_in_browser.py::test_nothing_overflows_or_overlaps[390",
    f"{INTEGRATION}torchrun.py::test_a_rank_that_fails_at_any_step_is_a_failure_of_the_program[0]",
    f"{KERNELS}cuda_eager.py::test_both_ways_give_equal_bits[default]",
    f"{KERNELS}cuda_on_cpu.py::test_interpreted_kernels_match_the_reference[documents_at_edges]",
    f"{KERNELS}cuda_on_cpu.py::test_interpreted_kernels_match_the_reference[reference]",
    f"{UNIT}parallel/test_ranked_training.py::test_ranks_train_as_one_process_does[3]",
    f"{UNIT}parallel/test_ranked_training.py::test_ranks_train_as_one_process_does[6]",
)
"""Those of them that `make test` runs too."""


SQLITE, POSTGRESQL = "[sqlite", "[postgresql"


def is_long(nodeid: str, every: Collection[str] = ()) -> bool:
    """Return whether `make test` leaves a test out: it is listed, or its twin on PostgreSQL is among `every` test.

    Whole stacks run on SQLite, so `make test` has both databases.
    """
    twin = nodeid.replace(SQLITE, POSTGRESQL)
    return (nodeid.startswith(LONG) and not nodeid.startswith(EXCEPT)) or (twin != nodeid and twin in every)
