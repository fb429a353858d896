"""Tests that are too long for `make test`: `make nightly` runs them and stores the result (nightly.py).

`make test` keeps a test of every subject: some rows of a table, one of two databases, one of several whole stacks.
"""

from collections.abc import Collection

INTEGRATION, ACCEPTANCE = "tests/integration/test_", "tests/acceptance/test_"
UNIT = "tests/unit/"

LONG = (
    f"{ACCEPTANCE}ask.py",
    f"{ACCEPTANCE}bisect.py",
    f"{ACCEPTANCE}damaged_home.py::test_damaged_files_are_refused_with_their_remedies_which_lose_no_result",
    f"{ACCEPTANCE}declared_metrics.py",
    f"{ACCEPTANCE}demo.py",
    f"{ACCEPTANCE}documentation.py::test_commands_of_a_page_work_in_their_order",
    f"{ACCEPTANCE}mcp.py",
    f"{ACCEPTANCE}nightly.py",
    f"{ACCEPTANCE}own_code.py::test_a_program_without_marks_is_judged_by_the_time_of_its_process",
    f"{ACCEPTANCE}own_code.py::test_a_pull_request_is_measured_by_its_commits_and_every_receipt_names_its_content",
    f"{ACCEPTANCE}own_code.py::test_python_asks_the_running_stack_and_gets_the_answer_that_the_commands_give",
    f"{ACCEPTANCE}own_code.py::test_a_token_without_the_scope_and_a_node_that_accepts_no_code_run_nothing",
    f"{ACCEPTANCE}own_code.py::test_an_archive_that_leaves_its_folder_runs_nowhere_and_says_why",
    f"{ACCEPTANCE}own_recipe.py",
    f"{ACCEPTANCE}pull_request.py",
    f"{ACCEPTANCE}release.py::test_the_wheel_runs_the_demo_in_an_empty_environment",
    f"{ACCEPTANCE}report_in_browser.py::test_nothing_overflows_or_overlaps",
    f"{ACCEPTANCE}restore.py::test_a_restored_home_says_the_same_shows_the_same_and_works_on",
    f"{ACCEPTANCE}secrets.py",
    f"{ACCEPTANCE}sentinels.py",
    f"{ACCEPTANCE}stack.py::test_killed_parts_start_again",
    f"{ACCEPTANCE}stack.py::test_up_joins_a_running_stack",
    f"{INTEGRATION}access_walk.py",
    f"{INTEGRATION}arm_outcome.py",
    f"{INTEGRATION}cheats.py::test_a_cheat_",
    f"{INTEGRATION}check.py::test_a_check_that_is_ended_leaves_nothing[drawn",
    f"{INTEGRATION}check.py::test_a_program_that",
    f"{INTEGRATION}check.py::test_a_program_without_marks_can_only_be_timed_whole",
    f"{INTEGRATION}code.py::test_a_process_that_is_killed_during_uploads_leaves_whole_archives_only",
    f"{INTEGRATION}code.py::test_the_largest_archive_is_taken_and_a_larger_one_is_not",
    f"{INTEGRATION}comparing.py::test_a_baseline_that_fails_is_named_and_an_interrupt_ends_every_trial",
    f"{INTEGRATION}comparing.py::test_without_a_service_the_trials_run_here_and_leave_nothing",
    f"{INTEGRATION}device_lock.py::test_second_worker_of_a_state_folder_is_refused_and_one_of_another_folder_is_not",
    f"{INTEGRATION}device_lock.py::test_trainer_waits_until_the_other_trainer_is_gone",
    f"{INTEGRATION}exec.py::test_arms_that_are_late_again_have_it_as_their_result",
    f"{INTEGRATION}exec.py::test_exec_imports_nothing_that_an_air_gapped_node_lacks",
    f"{INTEGRATION}exec.py::test_import_follows_to_verdict_report_and_mlflow",
    f"{INTEGRATION}exec.py::test_load_by_others_reruns_the_block_once_and_then_it_counts",
    f"{INTEGRATION}exec.py::test_stop_ends_the_trials_and_keeps_what_is_done",
    f"{INTEGRATION}exec_code.py",
    f"{INTEGRATION}first_submission.py",
    f"{INTEGRATION}frozen_broker.py",
    f"{INTEGRATION}interleavings.py",
    f"{INTEGRATION}leader.py::test_another_process_takes_over_and_mlflow_equals_the_database",
    f"{INTEGRATION}list_cost.py::test_a_list_asks_no_question_for_each_row",
    f"{INTEGRATION}looks.py::test_any_order_of_work_faults_looks_and_cancels_ends_with_books_that_balance",
    f"{INTEGRATION}many_streams.py",
    f"{INTEGRATION}mlflow_accounts.py",
    f"{INTEGRATION}mlflow_sink.py::test_killed_after_any_call_the_next_projection_finishes_the_same_state",
    f"{INTEGRATION}mlflow_sink.py::test_reviewers_see_ablations_alone_each_with_its_answer",
    f"{INTEGRATION}old_python.py::test_archives_are_packed_and_hostile_ones_refused",
    f"{INTEGRATION}outbox.py::test_background_processes_judge_once_and_stop_on_sigterm",
    f"{INTEGRATION}outbox_fairness.py::test_a_projection_that_takes_long_lets_others_go_first_and_goes_on",
    f"{INTEGRATION}planted.py::test_a_planted_change_of_numerics_is_caught_at_the_first_step",
    f"{INTEGRATION}planted.py::test_a_planted_stall_is_said_and_decides_nothing",
    f"{INTEGRATION}postgres.py::test_ablation_of_many_trials_is_stored_listed_and_cancelled",
    f"{INTEGRATION}pull_request.py::test_a_busy_forge_is_asked_again_at_every_request",
    f"{INTEGRATION}reach_table.py",
    f"{INTEGRATION}readiness.py::test_frozen_parts_and_many_strangers_hold_nobody_up",
    f"{INTEGRATION}readiness.py::test_strangers_share_the_work_that_they_ask_for",
    f"{INTEGRATION}scheduler_model.py::test_any_interleaving_gives_what_the_model_says",
    f"{INTEGRATION}schemathesis.py::test_every_operation_answers_as_its_document_says",
    f"{INTEGRATION}secrets.py::test_a_running_service_whose_servers_refuse_says_nothing_secret",
    f"{INTEGRATION}secrets.py::test_a_secret_that_no_header_can_carry_is_named_and_not_shown",
    f"{INTEGRATION}secrets.py::test_an_address_that_does_not_work_is_reported_without_its_password",
    f"{INTEGRATION}secured_servers.py::test_a_database_that_was_killed_comes_back_and_nothing_is_lost",
    f"{INTEGRATION}secured_servers.py::test_what_is_not_allowed_is_refused_and_said_without_the_password",
    f"{INTEGRATION}sentinels.py::test_no_sentinel_where_it_would_say_nothing",
    f"{INTEGRATION}slices.py::test_load_by_others_during_the_slices_spoils_the_block_and_is_named",
    f"{INTEGRATION}slices.py::test_random_schedules_run_in_the_order_of_the_oracle",
    f"{INTEGRATION}sub_path.py",
    f"{INTEGRATION}torchrun.py::test_a_rank_that_fails_at_any_step_is_a_failure_of_the_program",
    f"{INTEGRATION}torchrun.py::test_kill_9_of_the_worker_leaves_no_rank_and_no_lock",
    f"{INTEGRATION}web_in_browser.py::test_no_page_has_a_barrier_or_overflows_or_is_heavy",
    f"{INTEGRATION}web_in_browser.py::test_an_operator_is_asked_before_anything_happens[sqlite-False]",
    f"{INTEGRATION}worker_blocks.py::test_where_compile_time_decides_every_trial_compiles_from_nothing",
    f"{INTEGRATION}worker_drain.py::test_a_damaged_file_in_the_spool_is_put_aside",
    f"{INTEGRATION}worker_drain.py::test_a_finished_block_survives_the_service_and_the_worker",
    f"{INTEGRATION}worker_drain.py::test_a_second_signal_or_the_limit_gives_the_block_back",
    f"{INTEGRATION}worker_frozen.py::test_a_lost_guardian_is_replaced_while_the_trial_runs[19]",
    f"{INTEGRATION}worker_life.py::test_a_replaced_key_goes_on_and_a_revoked_one_ends_its_worker",
    f"{INTEGRATION}worker_lanes.py::test_a_worker_tries_once_and_remembers",
    f"{INTEGRATION}worker_stay.py::test_a_block_that_would_take_longer_than_the_drain_time_is_given_back_at_once",
    f"{INTEGRATION}worker_stay.py::test_a_signal_to_every_process_of_the_job_preempts_the_block_and_blames_nobody[SIGUSR1]",
    f"{INTEGRATION}worker_stay.py::test_a_worker_without_a_service_ends_idle_and_one_whose_time_has_passed_at_once",
    f"{INTEGRATION}worker_stay.py::test_an_early_signal_lets_the_block_finish_and_the_next_worker_repeats_nothing",
    f"{INTEGRATION}worker_stay.py::test_the_end_of_its_time_gives_a_running_block_back",
    f"{INTEGRATION}worker_stay.py::test_the_last_block_is_not_lost_while_the_service_is_away",
    f"{INTEGRATION}worker_trouble.py::test_a_trial_that_fills_the_disk_is_the_nodes_trouble",
    f"{INTEGRATION}worker_trouble.py::test_without_a_broker_one_line_says_that_it_polls",
    "tests/kernels/",
    "tests/simulation/",
    f"{UNIT}experiments/analysis/test_exact.py::test_random_values_are_called_by_the_definition",
    f"{UNIT}experiments/analysis/test_losses.py::test_a_loss_is_judged_over_seeds_like_the_oracle",
    f"{UNIT}experiments/records/test_bundle_files.py::test_an_archive_that_grows_is_refused_before_it_has_grown",
    f"{UNIT}experiments/records/test_forgeries.py::test_the_published_table_is_what_the_code_catches",
    f"{UNIT}experiments/reporting/test_too_few_repeats.py::test_repeats_are_said_to_differ_exactly_where_two_valid_ones_do",
    f"{UNIT}experiments/system/test_output.py::test_every_shell_shows_every_text",
    f"{UNIT}model/parallel/test_compiled_blocks.py::test_gradients_of_compiled_blocks_are_those_of_other_blocks_and_repeats_are_equal_to_the_bit[AMA",
    f"{UNIT}model/parallel/test_compiled_blocks.py::test_gradients_of_compiled_blocks_are_those_of_other_blocks_and_repeats_are_equal_to_the_bit[EAE",
    f"{UNIT}model/parallel/test_compiled_blocks.py::test_gradients_of_compiled_blocks_are_those_of_other_blocks_and_repeats_are_equal_to_the_bit[EMA",
    f"{UNIT}model/parallel/test_compiled_blocks.py::test_gradients_of_compiled_blocks_are_those_of_other_blocks_and_repeats_are_equal_to_the_bit[MAE",
    f"{UNIT}model/parallel/test_expert.py::test_gradients_norm_and_load_equal_one_process_and_repeats_are_equal_to_the_bit[4]",
    f"{UNIT}model/parallel/test_ranked_training.py::test_every_gate_of_the_mesh_says_that_it_ran[context_parallel=4]",
    f"{UNIT}model/parallel/test_ranked_training.py::test_every_gate_of_the_mesh_says_that_it_ran[devices=4]",
    f"{UNIT}model/parallel/test_ranked_training.py::test_every_gate_of_the_mesh_says_that_it_ran[expert_parallel=4]",
    f"{UNIT}model/parallel/test_ranked_training.py::test_every_gate_of_the_mesh_says_that_it_ran[tensor_parallel=4]",
    f"{UNIT}model/parallel/test_ranked_training.py::test_ranks_train_as_one_process_does",
    f"{UNIT}model/parallel/test_tensor.py::test_forward_loss_norm_and_every_gradient_equal_one_device[4]",
    f"{UNIT}model/parallel/test_tensor.py::test_rounded_dtypes_are_close_and_whole_parameters_stay_equal_on_all_ranks[4-",
    f"{UNIT}model/parallel/test_tensor.py::test_several_steps_of_the_optimiser_equal_one_device[4]",
    f"{UNIT}model/test_train.py::test_every_gate_value_that_a_cpu_can_run_says_that_it_ran[adamw_update=compiled]",
    f"{UNIT}model/test_train.py::test_train_compiled_follows_the_eager_curve_and_tells_its_compilation",
    f"{UNIT}model/test_train.py::test_train_gives_the_same_bits_in_fresh_processes",
    f"{UNIT}workers/processes/test_ranks.py::test_ranks_that_disagree_or_are_missing_are_named",
)
"""How their names begin."""
EXCEPT = (
    f"{ACCEPTANCE}report_in_browser.py::test_nothing_overflows_or_overlaps[390",
    f"{INTEGRATION}pull_request.py::test_a_busy_forge_is_asked_again_at_every_request[sqlite-github-429",
    f"{INTEGRATION}reach_table.py::test_the_page_has_the_table",
    f"{INTEGRATION}torchrun.py::test_a_rank_that_fails_at_any_step_is_a_failure_of_the_program[0]",
    f"{UNIT}model/parallel/test_ranked_training.py::test_ranks_train_as_one_process_does[3]",
    f"{UNIT}model/parallel/test_ranked_training.py::test_ranks_train_as_one_process_does[13]",
    "tests/kernels/test_mamba3_mimo",
    "tests/kernels/test_oracle.py",
    "tests/kernels/test_psiv_cache.py::test_output_and_gradients_are_bit_identical",
)
"""Those of them that `make test` runs too."""


DRAWS = 10
"""Of a test that is drawn by seeds from 0 on, `make test` runs so many."""
SQLITE, POSTGRESQL = "[sqlite", "[postgresql"


def is_long_file(path: str) -> bool:
    """Return whether `make test` leaves out every test of a file, so that it need not import the file."""
    return path.startswith(LONG) and not any(name.startswith(path) or path.startswith(name) for name in EXCEPT)


def is_long(nodeid: str, every: Collection[str] = (), seed: object = None) -> bool:
    """Return whether `make test` leaves a test out.

    It is listed, it is drawn by a `seed` beyond the first, or its twin on PostgreSQL is among `every` test. Whole
    stacks run on SQLite, so `make test` has both databases.
    """
    twin = nodeid.replace(SQLITE, POSTGRESQL)
    is_listed = nodeid.startswith(LONG) and not nodeid.startswith(EXCEPT)
    return is_listed or (isinstance(seed, int) and seed >= DRAWS) or (twin != nodeid and twin in every)
