"""Tests that are too long for `make test`: `make nightly` runs them and stores the result (nightly.py).

`make test` keeps a test of every subject: some rows of a table, one of two stores, one of several whole stacks.
"""

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
    f"{ACCEPTANCE}restore.py::test_a_restored_home_says_the_same_shows_the_same_and_works_on",
    f"{ACCEPTANCE}sentinels.py",
    f"{ACCEPTANCE}several_nodes.py::test_a_cancelled_trial_ends_on_every_node",
    f"{ACCEPTANCE}several_nodes.py::test_a_lost_part_breaks_the_block_which_runs_again",
    f"{ACCEPTANCE}stack.py::test_up_joins_a_running_stack",
    f"{INTEGRATION}access_table.py::test_only_those_of_the_table_may[sqlite",
    f"{INTEGRATION}access_walk.py::test_random_walks_do_what_the_model_says[sqlite",
    f"{INTEGRATION}arm_outcome.py",
    f"{INTEGRATION}check.py::test_a_program_that_ignores_its_seed_and_reports_no_tokens_is_found",
    f"{INTEGRATION}check.py::test_a_program_without_marks_can_only_be_timed_whole",
    f"{INTEGRATION}code.py::test_a_process_that_is_killed_during_uploads_leaves_whole_archives_only[sqlite",
    f"{INTEGRATION}exec.py::test_import_follows_to_verdict_report_and_mlflow",
    f"{INTEGRATION}exec.py::test_load_by_others_reruns_the_block_and_is_no_result",
    f"{INTEGRATION}exec_code.py::test_an_altered_or_missing_archive_stops_a_run_before_it_begins",
    f"{INTEGRATION}frozen_broker.py::test_frozen_broker_delays_neither_answers_nor_expired_leases[sqlite",
    f"{INTEGRATION}frozen_broker.py::test_wake_ups_go_on_when_the_broker_does",
    f"{INTEGRATION}interleavings.py",
    f"{INTEGRATION}leader.py::test_another_process_takes_over_and_mlflow_equals_the_database",
    f"{INTEGRATION}lifecycle_machine.py::test_any_history_of_workers_people_and_time_leaves_true_books[sqlite",
    f"{INTEGRATION}list_cost.py::test_a_list_asks_no_question_for_each_row[sqlite",
    f"{INTEGRATION}looks.py::test_any_order_of_work_faults_looks_and_cancels_ends_with_books_that_balance[sqlite",
    f"{INTEGRATION}mlflow_accounts.py",
    f"{INTEGRATION}planted.py::test_a_planted_change_of_numerics_is_caught_at_the_first_step",
    f"{INTEGRATION}readiness.py::test_frozen_parts_and_many_strangers_hold_nobody_up",
    f"{INTEGRATION}readiness.py::test_strangers_share_the_work_that_they_ask_for",
    f"{INTEGRATION}rolling_restart.py::test_what_was_answered_is_stored_once_whatever_process_was_restarted[sqlite",
    f"{INTEGRATION}scheduler_model.py::test_any_interleaving_gives_what_the_model_says[sqlite",
    f"{INTEGRATION}schemathesis.py::test_every_operation_answers_as_its_document_says[sqlite",
    f"{INTEGRATION}secrets.py::test_a_running_service_whose_servers_refuse_says_nothing_secret",
    f"{INTEGRATION}secrets.py::test_an_address_that_does_not_work_is_reported_without_its_password",
    f"{INTEGRATION}slices.py::test_load_by_others_during_the_slices_spoils_the_block_and_is_named",
    f"{INTEGRATION}sub_path.py::test_every_link_of_every_page_leads_below_the_path[keeps",
    f"{INTEGRATION}sub_path.py::test_a_page_is_live_in_a_browser_below_the_path[keeps",
    f"{INTEGRATION}torchrun.py::test_a_rank_that_fails_at_any_step_is_a_failure_of_the_program",
    f"{INTEGRATION}worker_blocks.py::test_where_compile_time_decides_every_trial_compiles_from_nothing",
    "tests/kernels/test_compile_first.py::test_kernels_are_compiled_once_and_only_tests_that_need_a_bad_one_fail",
    "tests/kernels/test_compile_first.py::test_nothing_is_compiled_for_tests_that_cannot_be_collected",
    "tests/kernels/test_kernel_page.py::test_command_line_of_the_page_runs_a_problem",
    "tests/kernels/test_kernel_page.py::test_example_of_the_page_runs_every_kernel",
    "tests/kernels/test_psiv_cache.py::test_peak_memory_differs_by_the_cached_bytes",
    f"{KERNELS}cuda_budgets.py::test_offsets_beyond_two_to_the_31_have_64_bits",
    f"{KERNELS}cuda_eager.py::test_a_compiled_call_takes_the_operators_and_gives_equal_bits",
    f"{KERNELS}cuda_eager.py::test_a_scan_is_made_again_by_activation_checkpointing",
    f"{KERNELS}cuda_eager.py::test_all_that_is_kept_goes_through_the_hooks_of_saved_tensors",
    f"{KERNELS}cuda_eager.py::test_an_eager_call_equals_the_scan_without_autograd",
    f"{KERNELS}cuda_eager.py::test_both_ways_give_equal_bits",
    f"{KERNELS}cuda_eager.py::test_both_ways_take_the_gradient_of_one_result_alone",
    f"{KERNELS}cuda_merged.py",
    f"{KERNELS}cuda_on_cpu.py::test_interpreted_kernels_match_the_reference",
    f"{KERNELS}cuda_remat.py::test_making_states_again_changes_no_bit",
    f"{KERNELS}cuda_sizes.py::test_a_program_knows_neither_batch_nor_length",
    f"{KERNELS}cuda_states.py::test_interpreted_kernels_take_and_give_states_as_the_reference_does",
    f"{KERNELS}cuda_states.py::test_pieces_of_a_row_equal_the_whole",
    f"{KERNELS}cuda_time_gradients.py::test_lanes_share_out_the_angles",
    f"{KERNELS}cuda_time_gradients.py::test_sums_stop_where_documents_end",
    f"{KERNELS}fuzz.py::test_problem_is_right_in_the_interpreter",
    f"{KERNELS}fuzz_criterion.py::test_honest_rounding_is_right_on_every_problem",
    f"{UNIT}parallel/test_ranked_training.py::test_ranks_train_as_one_process_does",
    f"{UNIT}test_train.py::test_train_compiled_follows_the_eager_curve_and_tells_its_compilation",
)
"""How their names begin."""
EXCEPT = (
    f"{INTEGRATION}torchrun.py::test_a_rank_that_fails_at_any_step_is_a_failure_of_the_program[0]",
    f"{KERNELS}cuda_eager.py::test_both_ways_give_equal_bits[default]",
    f"{KERNELS}cuda_on_cpu.py::test_interpreted_kernels_match_the_reference[documents_at_edges]",
    f"{KERNELS}cuda_on_cpu.py::test_interpreted_kernels_match_the_reference[psiv_cache=true]",
    f"{KERNELS}cuda_on_cpu.py::test_interpreted_kernels_match_the_reference[reference]",
    f"{KERNELS}cuda_remat.py::test_making_states_again_changes_no_bit[2]",
    f"{KERNELS}cuda_states.py::test_pieces_of_a_row_equal_the_whole[0]",
    f"{UNIT}parallel/test_ranked_training.py::test_ranks_train_as_one_process_does[3]",
    f"{UNIT}parallel/test_ranked_training.py::test_ranks_train_as_one_process_does[6]",
)
"""Those of them that `make test` runs too."""


def is_long(nodeid: str) -> bool:
    """Return whether `make test` leaves a test out."""
    return nodeid.startswith(LONG) and not nodeid.startswith(EXCEPT)
