"""Which split of a machine to generate on."""

import pytest

from jaxtp.cli.commands import main
from jaxtp.errors import BadTarget, DoesNotFit
from jaxtp.generation.mesh_search import search_generation
from jaxtp.generation.workload import Workload


def test_a_large_model_takes_all_gpus_and_a_small_one_replicas():
    large = search_generation(Workload(model="llama3-70b"), "h100:1x8", compile_best=0)
    assert (large.best.workload.tp, large.best.dp) == (8, 1)
    assert [row.fits for row in large.rows] == [True, True, True, False]
    assert "does not fit by 5" in str(large.rows[-1])
    small = search_generation(Workload(model="llama3.2-1b", batch=512), "h100:1x8", compile_best=0)
    assert small.best.dp > 1
    assert all(a.seconds <= b.seconds for a, b in zip(small.rows, small.rows[1:], strict=False))


def test_what_fits_nowhere_and_rows_that_do_not_divide_are_refused():
    nowhere = search_generation(Workload(model="llama3-405b"), "h100:1x8", compile_best=0)
    with pytest.raises(DoesNotFit, match=r"fits on no split of h100:1x8"):
        _ = nowhere.best
    three = search_generation(Workload(model="llama-tiny", batch=3), "h100:1x8", compile_best=0)
    assert [row.dp for row in three.rows] == [1]
    with pytest.raises(BadTarget, match="no tp divides 3 devices and 8 heads"):
        search_generation(Workload(model="llama-tiny", batch=4), "h100:1x3", compile_best=0)


def test_the_best_split_is_compiled(capsys):
    command = ["search", "llama-tiny", "--generate", "--target", "h100:1x2", "--batch", "2"]
    main([*command, "--seq", "512", "--compiled", "1"])
    first = capsys.readouterr().out.splitlines()[4]
    assert " C " in first
    assert "x the floor" in first
    with pytest.raises(SystemExit):
        main([*command, "--fix", "mesh.tp=2"])
    assert "over tp and dp alone" in capsys.readouterr().err
