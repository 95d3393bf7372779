"""Which rows of the large tables run by default; `--every-row` runs all, as the gate does once.

A table of models x meshes costs seconds of compilation a row. The rows that stay cover every model
and every mesh of their table; the others combine what these show apart. A row that is named here
and does not exist ends the run, so that a renamed one cannot fall out of both suites.
"""

DEFAULT_ROWS: dict[str, tuple[str, ...]] = {
    "test_models_train_as_on_one_device": (
        "linen-(8, 1)", "linen_12_heads-(1, 8)", "linen_scan-(4, 2)", "llama-(2, 4)", "nnx-(1, 8)",
    ),
    "test_loss_and_gradients_stay_the_same": (
        "few-key-heads-tp8", "fused-dp2-tp4-sequence", "many-key-heads-dp2-tp4-sequence",
    ),
    "test_models_give_the_numbers_of_one_device": ("gpt-tp8-packed",),
    "test_any_mesh_and_any_context_will_do": (
        "linen_12_heads-AxisType.Auto-AxisType.Explicit",
        "linen_12_heads-AxisType.Explicit-None",
        "nnx-AxisType.Explicit-AxisType.Auto",
    ),
    "test_constraints_say_where_things_lie_and_not_what_they_are": (
        "llama-dp2-tp2x2-sp", "gpt2-tp8-sp",
    ),
    "test_init_sharded_gives_the_numbers_of_one_device": ("linen_scan", "nnx"),
    "test_the_gpu_program_moves_the_floor": ("4-tp", "8-sp"),
    "test_stages_give_the_numbers_of_one_layer_after_the_other": (
        "7 layers over 4", "2 rounds of 6 layers", "zero 3",
    ),
    "test_any_branches_give_the_numbers_of_one_after_the_other": ("kinds1-1-5", "kinds3-2-4"),
    "test_the_gpu_program_moves_the_floor_and_what_the_reason_says": ("by_unpacking-tokens0",),
    "test_every_way_gives_the_same_numbers": ("by_slices-tokens1-True", "grouped-tokens4-False"),
    "test_it_composes_with_what_jax_offers": ("few key heads",),
    "test_gradients_by_jax_by_nnx_and_by_row_agree": ("llama",),
    "test_optimizer_state_lies_where_the_stage_wants_it": ("0", "2"),
}  # fmt: skip
"""Test function -> ids of the rows that run by default."""


def split(rows: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The (function, row) pairs that do not run by default.

    Args:
        rows: Every collected test function that has rows -> their ids.

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
