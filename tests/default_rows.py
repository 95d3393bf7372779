"""Which rows of the large tables run by default; `--every-row` runs all, as the gate does once.

A table of models x meshes costs seconds of compilation a row. The rows that stay cover every model
and every mesh of their table; the others combine what these show apart. A row that is named here
and does not exist ends the run, so that a renamed one cannot fall out of both suites.
"""

DEFAULT_ROWS: dict[str, tuple[str, ...]] = {
    "test_logits_equal_those_of_transformers": (
        "llama-2", "gemma3_text-4", "qwen3_moe-4", "gpt_oss-4", "deepseek_v2-2", "gpt2-4",
    ),
    "test_saved_files_are_those_that_transformers_was_checked_with": (
        "llama", "qwen3_moe", "gpt_oss", "deepseek_v2", "gpt2",
    ),
    "test_code_of_a_page_runs_and_prints_what_it_says": (
        "README", "design", "experts", "reading_a_plan", "reading_a_preflight", "several_processes",
    ),
    "test_what_mixes_the_batch_runs_on_all_of_it": (
        "Centred", "Numbered", "Scaled", "Turned", "Shifted",
    ),
    "test_a_token_sends_two_messages_a_layer_and_copies_nothing": (
        "8B, one row", "8B, two replicas of one row", "experts",
    ),
    "test_every_optimizer_keeps_places_and_memory_and_compiles_once": (
        "sm3", "adafactor", "multi_transform", "multi_steps", "apply_if_finite",
    ),
    "test_models_train_as_on_one_device": (
        "linen_12_heads-(1, 8)", "linen_scan-(4, 2)", "nnx-(1, 8)",
    ),
    "test_loss_and_gradients_stay_the_same": (
        "few-key-heads-tp8", "fused-dp2-tp4-sequence",
    ),
    "test_loss_gradients_and_updates_are_those_of_the_plain_loop": (),
    "test_compiled_for_gpus_two_all_to_alls_or_none_and_no_gather": ("{'ep': 4, 'tp': 2}",),
    "test_layers_gathered_ahead_have_the_gradients_of_one_device": (
        "one layer, all run again",
    ),
    "test_peft_folders_in_and_out": ("llama", "gpt2"),
    "test_training_begins_with_the_weights_of_a_folder": ("4",),
    "test_models_give_the_numbers_of_one_device": ("gpt-tp8-packed",),
    "test_any_mesh_and_any_context_will_do": (
        "linen_12_heads-AxisType.Auto-AxisType.Explicit",
        "linen_12_heads-AxisType.Explicit-None",
        "nnx-AxisType.Explicit-AxisType.Auto",
    ),
    "test_constraints_say_where_things_lie_and_not_what_they_are": (
        "llama-dp2-tp2x2-sp",
    ),
    "test_a_strangers_model_has_the_numbers_of_one_device": ("packed-cp8",),
    "test_init_sharded_gives_the_numbers_of_one_device": ("linen_scan", "nnx"),
    "test_the_gpu_program_moves_the_floor": ("8-sp",),
    "test_so_does_a_function_whose_tokens_devices_share_as_well": ("gathered", "bfloat16"),
    "test_stages_give_the_numbers_of_one_layer_after_the_other": (
        "7 layers over 4", "2 rounds of 6 layers", "rounds, gathered once",
    ),
    "test_the_gpu_program_moves_the_floor_and_what_the_reason_says": ("by_unpacking-tokens0",),
    "test_every_way_gives_the_same_numbers": ("by_slices-tokens1-True", "grouped-tokens4-False"),
    "test_experts_and_shared_sequences_on_one_mesh": ("False",),
    "test_layers_with_dropout_drop_what_one_device_drops": ("dots",),
    "test_placed_parameters_and_an_ambient_explicit_mesh": ("False",),
    "test_it_composes_with_what_jax_offers": ("few key heads",),
    "test_gradients_by_jax_by_nnx_and_by_row_agree": ("llama",),
    "test_optimizer_state_lies_where_the_stage_wants_it": ("0", "2"),
    "test_layers_that_differ_keep_their_kind_in_stages": ("gemma3_text",),
    "test_greedy_tokens_are_those_of_transformers": (
        "qwen3-tp8", "gpt_oss-tp8", "llama-dp2-tp4",
    ),
    "test_sixteen_steps_are_those_of_the_plain_function": (
        "fewer kv heads", "scanned", "mamba", "nnx",
    ),
    "test_the_gpu_program_sends_two_messages_a_layer": (
        "fewer kv heads", "gpt2", "mamba", "linen",
    ),
    "test_damaged_weights_are_named_and_leave_nothing": ("missing", "another shape", "NaN"),
    # Long: what they show is shown in small by others, of the same file or of the legs.
    "test_no_flipped_bit_of_what_describes_a_checkpoint_goes_unnoticed": (),
    "test_gpu_benchmark_can_be_rehearsed": (),
    "test_stages_of_two_kinds_train_as_one_device": (),
    "test_the_step_is_shorter_and_no_bigger_than_the_default": (),
    "test_each_layer_is_gathered_once_each_way_in_the_type_of_products": (),
    "test_scanned_with_a_loss_inside": (),
    "test_heads_that_do_not_divide_still_agree": (),
    "test_the_best_split_is_compiled": (),
    "test_weights_of_one_more_layer_and_gradients_of_one_are_alive": (),
    "test_a_preset_moves_the_floor_and_nothing_else": (),
    "test_a_bf16_program_is_held_to_the_digits_it_has": (),
    "test_remat_policies_trade_memory_and_keep_gradients": (),
    "test_loss_scale_changes_no_number": (),
    "test_two_pieces_stay_two_messages_on_gpus": (),
    "test_adapters_add_no_collective_and_little_to_each": (),
    "test_the_compiled_program_runs_as_many": (),
    "test_sequence_parallelism_moves_a_quarter_more_in_blocks_and_needs_no_permutes": (),
    "test_micro_batches_share_one_reduction": (),
    "test_nearly_all_communication_hides_at_the_real_depth": (),
    "test_quickstart_fails_when_the_loss_is_not_finite": (),
    "test_the_command_compiles_what_a_config_file_says": (),
    "test_adapters_answer_alike_beside_their_kernels_and_merged": (),
    "test_updates_of_layers_gathered_ahead_are_those_of_one_device": (),
    "test_updates_along_shared_sequences_are_those_of_one_device": (),
    "test_gradients_of_replicas_are_summed_in_the_type_that_is_asked_for": (),
    "test_candidates_come_from_the_parts_of_the_vocabulary": (),
    "test_fixed_loss_scale_stays": (),
    "test_aggressive_stages_gather_and_reduce_each_weight_once_a_step": (),
    "test_the_first_meshes_are_compiled_and_their_memory_is_a_fact": (),
    "test_the_carried_program_is_the_direct_one": (),
    "test_stage_2_scatters_gradients_and_gathers_once": (),
    "test_the_benchmark_runs": (),
    "test_kinds_of_attention_and_of_layers_train_as_on_one_device": (),
    "test_a_folder_is_quantised_as_it_is_read": (),
    "test_a_token_reads_integers_once_and_writes_no_kernel": (),
    "test_quickstart_trains_reports_and_saves": (),
    "test_loss_and_gradients_are_those_of_one_device": (),
    "test_the_compiled_program_moves_what_a_pipeline_must_and_nothing_else": (),
    "test_halves_and_gathers_of_a_scanned_model": (),
    "test_the_report_adds_up": (),
    "test_only_adapters_are_trained_on_any_mesh": (),
    "test_generation_over_latents_counts_the_adapter_of_what_is_made_of_them": (),
    "test_long_messages_travel_in_two_pieces": (),
    "test_a_first_mesh_is_compiled_and_its_memory_is_a_fact": (),
    "test_unrolled_with_the_loss_outside": (),
    "test_the_same_key_draws_the_same_tokens_on_every_mesh": (),
    "test_two_processes_read_their_shards_and_save_one_folder": (),
    "test_offloaded_state_stays_on_the_host_and_changes_no_number": (),
    "test_files_of_prompts_become_files_of_answers": (),
    "test_any_branches_give_the_numbers_of_one_after_the_other": (),
    "test_parameters_sharded_over_the_batch_axes_are_gathered_once_or_warned_of": (),
    "test_layers_without_experts_are_in_front_of_the_stages": (),
}  # fmt: skip
"""Test function -> ids of the rows that run by default; () for none, or a test without rows."""


def split(rows: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The (function, row) pairs that do not run by default.

    Args:
        rows: Every collected test function -> the ids of its rows; {""} where it is no table.

    Raises:
        LookupError: for a default row that its test does not have.
    """
    for function in DEFAULT_ROWS.keys() & rows.keys():
        missing = set(DEFAULT_ROWS[function]) - rows[function]
        if missing:
            raise LookupError(f"default_rows.py: {function} has no row {sorted(missing)}")
    return {
        (function, row)
        for function, found in rows.items()
        if function in DEFAULT_ROWS
        for row in found - set(DEFAULT_ROWS[function])
    }
