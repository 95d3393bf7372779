"""Training text, batches and the loop."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxtp.errors import BadData, TrainingDiverged
from jaxtp.train.data import (
    Batches,
    bigram_entropy,
    fixed_windows,
    is_validation,
    read_corpus,
    standard_library,
    unigram_entropy,
)
from jaxtp.train.loop import Hooks, fit


def write_files(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}")


def test_corpus_is_split_by_file_and_by_path_alone(tmp_path):
    names = [f"package{i}/module.py" for i in range(40)]
    write_files(tmp_path, names)
    before = read_corpus(tmp_path, validation_share=0.3)
    kept = [name for name in names if is_validation(name, 0.3)]
    assert 0 < len(kept) < len(names)
    assert before.validation.tobytes() == b"\0".join(
        f"text of {name}".encode() for name in sorted(kept)
    )
    assert before.num_files == (len(names) - len(kept), len(kept))

    # Other files do not move any; installed packages and tests do not count.
    write_files(tmp_path, ["new.py", "site-packages/a.py", "test/b.py", "notes.txt"])
    after = read_corpus(tmp_path, validation_share=0.3)
    assert sum(after.num_files) == len(names) + 1
    side = after.validation if is_validation("new.py", 0.3) else after.train
    assert b"text of new.py" in side.tobytes()


def test_corpus_without_two_sides_is_refused(tmp_path):
    write_files(tmp_path, ["one.py"])
    with pytest.raises(BadData, match=r"TP130 at .*'\*\.py' gives"):
        read_corpus(tmp_path)


def test_standard_library_is_enough_text():
    corpus = standard_library()
    assert corpus.train.size > 5_000_000
    assert corpus.validation.size > 300_000


def test_batches_depend_on_seed_and_step_alone():
    text = np.arange(1000) % 251
    one, other = Batches(text, 4, 16, seed=1), Batches(text, 4, 16, seed=1)
    other[3]
    np.testing.assert_array_equal(one[7], other[7])
    assert (one[7] != one[8]).any()
    assert (one[7] != Batches(text, 4, 16, seed=2)[7]).any()
    assert one[0].shape == (4, 17)
    # Windows are consecutive pieces of the text.
    assert ((one[0][:, 1:] - one[0][:, :-1]) % 251 == 1).all()


def test_windows_reach_both_ends_of_the_text():
    text = np.arange(100)
    windows = fixed_windows(text, 3, 10)
    assert (windows[0, 0], windows[-1, -1]) == (0, 99)
    only = np.arange(11)
    np.testing.assert_array_equal(Batches(only, 1, 10)[5], only[None])


def test_too_short_text_is_refused():
    with pytest.raises(BadData, match="TP130: the text has 10 tokens, one window needs 11"):
        Batches(np.arange(10), 1, 10)[0]
    with pytest.raises(BadData, match="TP130"):
        fixed_windows(np.arange(10), 1, 10)


def test_entropies_by_hand():
    # "ab" repeated: bytes are worth one bit each, and the next byte is certain once one is known.
    train = np.frombuffer(b"ab" * 100_000, np.uint8)
    windows = fixed_windows(train, 4, 32)
    assert unigram_entropy(train, windows) == pytest.approx(np.log(2), abs=2e-3)
    assert bigram_entropy(train, windows) == pytest.approx(0, abs=1e-4)
    # A byte that training never saw costs much and not infinitely much.
    unseen = np.full((1, 2), ord("z"), np.int32)
    assert unigram_entropy(train, unseen) == pytest.approx(np.log(200_256))
    assert np.isfinite(bigram_entropy(train, unseen))


@jax.jit
def halve(state, batch):
    """A step that halves its state, and diverges when it meets token 9."""
    loss = jnp.where((batch == 9).any(), jnp.nan, state)
    return state / 2, {"loss": loss, "grad_norm": state, "lr": jnp.float32(0.1)}


def batches(step):
    return jnp.full((2, 5), step)


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_loop_writes_one_line_a_step_and_evaluates(tmp_path):
    screen = io.StringIO()
    state = fit(
        halve,
        jnp.float32(8),
        batches,
        steps=range(5),
        folder=tmp_path / "run",
        hooks=Hooks(
            evaluate=lambda state: 10 * float(state),
            eval_every=2,
            measure=lambda seconds: {"mfu": 0.25 if seconds > 0 else 0, "memory_gb": 1.5},
        ),
        console=Console(file=screen, width=200),
    )
    assert float(state) == 0.25
    assert "mfu 25.0%  1.5 GB" in screen.getvalue()
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5]
    assert [m["loss"] for m in metrics] == [8, 4, 2, 1, 0.5]
    assert [m.get("validation_loss") for m in metrics] == [None, 20, None, 5, 2.5]
    for m in metrics:
        assert m["lr"] == pytest.approx(0.1)
        assert m["tokens_per_s"] * m["step_seconds"] == pytest.approx(2 * 4)
    assert "step     4 of 5  loss 1.0000" in screen.getvalue()
    assert "validation loss 5.0000" in screen.getvalue()


def test_loop_stops_at_the_first_loss_that_is_not_finite(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"TP131 .*loss is nan at step 10; it was 1\.0000"):
        fit(
            halve,
            jnp.float32(256),
            batches,
            steps=range(20),
            folder=tmp_path,
            hooks=Hooks(evaluate=float),
            console=Console(file=io.StringIO()),
        )
    metrics = read_metrics(tmp_path)
    assert len(metrics) == 10
    assert metrics[-1]["loss"] is None
    assert metrics[-1]["grad_norm"] == 0.5


class Device:
    """Computes nothing, and writes down what it is asked."""

    def __init__(self):
        self.events = []

    def step(self, state, batch):
        self.events.append(f"start {state + 1}")
        return state + 1, {"loss": Number(self, state + 1)}


class Number:
    def __init__(self, device, step):
        self.device, self.step = device, step

    def __float__(self):
        self.device.events.append(f"wait {self.step}")
        return 1.0


def run_on(device, folder, num_steps, **hooks):
    fit(
        device.step,
        0,
        lambda number: jnp.zeros((2, 5)),
        steps=range(num_steps),
        folder=folder,
        hooks=Hooks(**hooks),
        console=Console(file=io.StringIO()),
    )


def test_the_loop_waits_for_a_step_only_when_the_next_one_runs(tmp_path):
    device = Device()
    run_on(device, tmp_path, 4, eval_every=100)
    assert device.events == [
        *("start 1", "start 2", "wait 1", "start 3", "wait 2", "start 4", "wait 3", "wait 4")
    ]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_evaluations_and_saves_wait(tmp_path):
    device, saved = Device(), []
    run_on(
        device,
        tmp_path,
        3,
        evaluate=lambda state: device.events.append(f"evaluate {state}") or 2.0,
        eval_every=2,
        save=lambda number, state: saved.append(number),
        save_every=3,
    )
    assert device.events == [
        *("start 1", "start 2", "wait 1", "wait 2", "evaluate 2"),
        *("start 3", "wait 3", "evaluate 3"),
    ]
    assert saved == [3]


def test_a_profile_sees_whole_steps(tmp_path):
    device = Device()
    run_on(device, tmp_path, 2, blocking=True)
    assert device.events == ["start 1", "wait 1", "start 2", "wait 2"]
