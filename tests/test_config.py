"""Settings: jaxtp's spelling, DeepSpeed's spelling, sizes, and the command line."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import tyro
from test_surface import check_golden

from jaxtp.config.batch_sizes import resolve
from jaxtp.config.deepspeed import TABLE
from jaxtp.config.files import changed, load, parse
from jaxtp.config.settings import Batch, Config, Mesh, Pipeline, Zero, settings
from jaxtp.errors import BadConfig, BadMesh, BadStages, SizeMismatch

# The file of DeepSpeed's and AutoTP's users, key by key.
EXAMPLE = """
{ "model": "llama3-8b", "train_batch_size": 1024, "gradient_accumulation_steps": 4,
  "tensor_parallel": { "enabled": true, "tp_size": 8, "strategy": "AUTO",
    "communication": { "gradient_fusion": true, "overlap": "AGGRESSIVE",
                       "fusion_threshold": "1GB" } },
  "pipeline_parallel": { "pp_size": 2 }, "data_parallel_size": 4,
  "zero_optimization": { "stage": 3, "partition_activations": true,
                         "offload_optimizer": { "device": "cpu" } },
  "bf16": { "enabled": true }, "optimizer": { "type": "AdamW", "params": { "lr": 6e-5 } } }
"""


def test_example_file_is_read_key_by_key():
    config, lines = parse(EXAMPLE)
    assert (config.model, config.batch) == ("llama3-8b", Batch(size=1024, accumulation=4))
    assert config.mesh == Mesh(tp=8, pp=2, dp=4)
    assert config.zero == Zero(stage=3, partition_activations=True, offload_optimizer="cpu")
    assert config.communication.overlap == "aggressive"
    assert config.communication.gradient_fusion == 2**30
    assert config.precision.compute == "bfloat16"
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("adamw", 6e-5)
    # What DeepSpeed does in silence is said.
    assert (config.optimizer.clip, config.optimizer.schedule) == (0, "constant")
    keys = [line.key for line in lines]
    assert len(keys) == len(set(keys)) == 18
    assert str(lines[0]) == "train_batch_size: mapped; --batch.size"
    assert sum(line.action == "default" for line in lines) == 2

    # ZeRO shards over what DeepSpeed calls data-parallel devices.
    resolved = resolve(config, 64)
    assert resolved.mesh == Mesh(tp=8, pp=2, dp=1, fsdp=4)
    assert resolved.batch == Batch(size=1024, micro_size=64, accumulation=4)
    # What accumulates follows each other through the stages.
    assert resolved.pipeline == Pipeline(micro_batches=4)


def test_both_spellings_and_both_formats_meet():
    toml = '[mesh]\ntp = 4\n[batch]\nsize = 16\n[optimizer]\nname = "lion"\noptions = {b1 = 0.9}\n'
    native = json.dumps(
        {
            "mesh": {"tp": 4},
            "batch": {"size": 16},
            "optimizer": {"name": "lion", "options": {"b1": 0.9}},
        }
    )
    assert parse(toml, "toml") == parse(native)
    config, lines = parse('{"seq_len": 64, "optimizer": {"type": "Lion", "params": {"lr": 1}}}')
    assert (config.seq_len, config.optimizer.name, config.optimizer.learning_rate) == (
        64,
        "lion",
        1,
    )
    assert [line.action for line in lines] == ["mapped", "mapped", "default", "default", "default"]


def test_files_are_read_by_their_ending(tmp_path):
    (tmp_path / "a.toml").write_text("steps = 3")
    (tmp_path / "a.json").write_text('{"steps": 3}')
    assert load(tmp_path / "a.toml") == load(tmp_path / "a.json")
    assert load(tmp_path / "a.json")[0].steps == 3
    with pytest.raises(BadConfig, match=r"TP020 at .*missing.json: cannot read"):
        load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"mesh": {"tpp": 4}}',
            r"at mesh\.tpp: unknown key\n  fix: did you mean mesh\.tp\?",
        ),
        ('{"train_batch_sise": 4}', "TP020 at train_batch_sise: unknown key\n.*train_batch_size"),
        ('{"zero_optimization": {"stag": 1}}', r"mean zero_optimization\.stage"),
        ('{"xyz": 1}', "TP020 at xyz: unknown key\n  fix: known: attention, batch"),
        ('{"mesh": {"tp": "4"}}', r"TP020 at mesh\.tp: Input should be a valid integer; got \"4\""),
        ('{"mesh": {"tp": true}}', r"TP020 at mesh\.tp: Input should be a valid integer"),
        ('{"mesh": {"tp": 0}}', r"TP020 at mesh\.tp: is 0\n  fix: at least 1"),
        ('{"mesh": {"dp": -2}}', r"TP020 at mesh\.dp: is -2"),
        (
            '{"zero_optimization": {"stage": 4}}',
            r"at zero_optimization\.stage: .* 2 or 3",
        ),
        ('{"train_batch_size": true}', "TP020 at train_batch_size: True is not int"),
        ('{"optimizer": {"options": {"b2": [1]}}}', r"TP020 at optimizer\.options: "),
        (
            '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}',
            "at fp16.enabled: wants .* but bf",
        ),
        ('{"mesh": {"tp": 2}, "tensor_parallel": {"tp_size": 4}}', "wants mesh.tp=4, but mesh.tp"),
        ('{"tensor_parallel": {"communication": {"fusion_threshold": "1 XB"}}}', "XB"),
        ('{"tensor_parallel": {"communication": {"overlap": "MAX"}}}', "'off', 'auto' or 'aggr"),
        ('{"sparse_gradients": true}', "sparse_gradients: has no meaning here\n  fix: JAX grad"),
        ('{"pipeline": {"partition_method": "best"}}', r"pipeline\.partition_method: unknown key"),
        ('{"load_balance": {"strategy": "RANDOM"}}', "TP020 at load_balance: .*'compute_first'"),
        ('{"load_balance": {"kind": "MEMORY_FIRST"}}', "TP020 at load_balance.*: unknown key"),
        ('{"optimizer": {"clip": NaN}}', "TP020: NaN is not JSON"),
        ('{"steps": 1, "steps": 2}', "TP020 at steps: the key is given twice"),
        ("[1]", "a list is not settings"),
        ("{", "TP020 at line 1 column 2: not JSON"),
    ],
)
def test_what_cannot_be_read_says_where_and_what_would_work(text, message):
    with pytest.raises(BadConfig, match=message):
        parse(text)


def test_all_mistakes_come_at_once():
    with pytest.raises(BadConfig) as caught:
        parse('{"mesh": {"tpp": 4}, "batch": {"size": 2.5}, "optimizer": {"options": {"b": []}}}')
    assert all(name in str(caught.value) for name in ("mesh.tpp", "batch.size", "optimizer.opt"))
    assert str(caught.value).count("TP020") == 3


def test_deepspeeds_experts_and_shared_sequences_are_axes():
    moe = '"moe": {"enabled": true, "ep_size": 4, "capacity_factor": 2.0, "drop_tokens": true}'
    config, _ = parse(f'{{"train_batch_size": 8, "sequence_parallel_size": 2, {moe}}}')
    assert (config.mesh.ep, config.mesh.cp) == (4, 2)
    assert (config.experts.capacity_factor, config.experts.drop_tokens) == (2.0, True)


def test_a_refused_deepspeed_file_shows_every_key():
    mapped = '"train_batch_size": 8, "bf16": {"enabled": true}, "dump_state": false'
    zero = '"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}'
    with pytest.raises(BadConfig) as caught:
        parse(f'{{{mapped}, {zero}, "amp": {{"enabled": true}}, "steps_per_print": "9", "xyz": 1}}')
    said, _, keys = str(caught.value).partition("\n  the DeepSpeed keys of the file:\n")
    assert said.count("TP020") == said.count("fix: ") == 4
    assert [line.split(";")[0].strip() for line in keys.splitlines()] == [
        "train_batch_size: mapped",
        "bf16.enabled: mapped",
        "dump_state: replaced",
        "zero_optimization.stage: mapped",
        "zero_optimization.zero_hpz_partition_size: refused",
        "amp: refused",
        "steps_per_print: refused",
        "xyz: refused",
    ]
    # A value that only the setting's own check refuses.
    with pytest.raises(BadConfig, match=r"(?s)fix: .*train_batch_size: mapped; --batch\.size"):
        parse('{"train_batch_size": 8, "zero_optimization": {"stage": 4}}')
    # Refused in jaxtp's own spelling: there is no DeepSpeed key to show.
    with pytest.raises(BadConfig, match=r"mean mesh\.tp\?$"):
        parse('{"mesh": {"tpp": 4}}')


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"gradient_clipping": 0.5}, {"clip": 0.5}),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, {"learning_rate": 3e-4}),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9], "eps": 1e-6}}},
            {"options": {"b1": 0.8, "b2": 0.9, "eps": 1e-6}},
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7}}},
            {"schedule": "linear", "warmup_steps": 7, "end_share": 0},
        ),
    ],
)
def test_optimizer_keys(section, expected):
    config, _ = parse(json.dumps(section))
    assert {name: getattr(config.optimizer, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"load_balance": {"enabled": True, "strategy": "MEMORY_FIRST"}}, "memory_first"),
        ({"load_balance": {"enabled": True}}, "compute_first"),
        ({"load_balance": {"enabled": False, "strategy": "MEMORY_FIRST"}}, "even"),
        ({"pipeline": {"load_balance": "memory_first"}}, "memory_first"),
        ({"pipeline": {"stages": 2, "partition": "best"}, "allow_heterogeneous": True}, "even"),
    ],
)
def test_stages_in_both_spellings(section, expected):
    config, lines = parse(json.dumps(section))
    assert config.pipeline.load_balance == expected
    assert config.pipeline.allow_heterogeneous == ("allow_heterogeneous" in section)
    assert config.mesh.pp == (2 if "stages" in section.get("pipeline", {}) else 1)
    assert ("load_balance" in section) == ("load_balance" in [line.key for line in lines])


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"sparse_gradients": False}, "sparse_gradients"),
        ({"fp16": {"enabled": False, "loss_scale": 0}}, "fp16"),
        ({"zero_optimization": {"offload_param": {"device": "none"}}}, "zero_optimization.off"),
        ({"zero_optimization": {"overlap_comm": True}}, "zero_optimization.overlap_comm"),
        ({"wall_clock_breakdown": False}, "wall_clock_breakdown"),
    ],
)
def test_keys_that_are_off_or_replaced_leave_one_line(section, key):
    config, lines = parse(json.dumps(section))
    assert config == Config()
    assert [line.action for line in lines if line.key.startswith(key)] == ["replaced"]


def test_every_row_of_the_table_leads_to_settings_that_exist():
    samples = {int: 1, float: 1.0, bool: True, str: "adam", list: [1, 2], dict: {}}
    names = set(settings())
    for key, row in TABLE.items():
        assert row.text, key
        if row.action == "mapped":
            assert row.kinds[0] in samples, key
            for setting in row.convert(samples[row.kinds[0]]):
                assert setting in names or setting.startswith("optimizer.options."), key


@pytest.mark.parametrize(
    ("mesh", "num_devices", "expected"),
    [
        (Mesh(tp=4), 8, Mesh(tp=4, dp=2)),
        (Mesh(tp=2, dp=1, fsdp=-1), 8, Mesh(tp=2, dp=1, fsdp=4)),
        (Mesh(tp=2, dp=2, fsdp=2), 8, Mesh(tp=2, dp=2, fsdp=2)),
    ],
)
def test_open_axis_takes_what_is_left(mesh, num_devices, expected):
    assert resolve(Config(mesh=mesh), num_devices).mesh == expected


def test_stage_follows_the_mesh():
    assert resolve(Config(), 8).zero.stage == 0
    assert resolve(Config(mesh=Mesh(fsdp=8)), 8).zero.stage == 3
    sharded = resolve(Config(mesh=Mesh(tp=4), zero=Zero(stage=1)), 8)
    assert (sharded.mesh, sharded.zero.stage) == (Mesh(tp=4, dp=1, fsdp=2), 1)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (Config(mesh=Mesh(tp=3)), BadMesh, r"tp=3 .* = 3 devices, there are 8\n  fix: tp=4"),
        (Config(mesh=Mesh(tp=4, dp=3)), BadMesh, r"= 12 devices, there are 8\n  fix: dp=2"),
        (Config(mesh=Mesh(tp=8, pp=2)), BadMesh, r"= 16 .* there are 8\n  fix: .*pp=1 or tp=4"),
        (Config(mesh=Mesh(dp=-1, fsdp=-1)), BadConfig, "dp and fsdp are both -1"),
        (
            Config(batch=Batch(size=12)),
            SizeMismatch,
            r"12 does not divide by accumulation 1 x 8 .*\n  fix: batch.size=8, batch.size=16",
        ),
        (
            Config(batch=Batch(size=64, accumulation=3)),
            SizeMismatch,
            r"batch.size=48, batch.size=72, or batch.accumulation=2",
        ),
        (
            Config(batch=Batch(size=16, micro_size=3)),
            SizeMismatch,
            r"3 x accumulation 1 x 8 data-parallel devices = 24, but size is 16\n.*micro_size=2",
        ),
        (Config(batch=Batch()), BadConfig, "neither size nor micro_size"),
        (
            Config(mesh=Mesh(tp=8), seq_len=100, zero=Zero(partition_activations=True)),
            SizeMismatch,
            "shards 100 tokens 8 ways\n  fix: seq_len of 96, 104",
        ),
        (Config(steps=0), BadConfig, "TP020 at steps: is 0"),
        (
            Config(mesh=Mesh(pp=4), batch=Batch(size=24, accumulation=3)),
            BadStages,
            r"3 micro-batches for 4 stages in one round.*\n  fix: micro_batches of 4",
        ),
        (
            Config(mesh=Mesh(pp=4), pipeline=Pipeline(rounds=2, micro_batches=6)),
            BadStages,
            r"6 micro-batches for 4 stages in 2 rounds; .* multiple.*\n.* of 4, 8",
        ),
        (
            Config(mesh=Mesh(pp=2), batch=Batch(size=12)),
            SizeMismatch,
            r"12 does not divide by accumulation 2 x 4 data.*\n  fix: batch.size=8, batch.size=16",
        ),
        (
            Config(
                mesh=Mesh(pp=2),
                batch=Batch(size=64, accumulation=4),
                pipeline=Pipeline(micro_batches=8),
            ),
            BadConfig,
            r"at pipeline.micro_batches: 8 micro-batches, but batch.accumulation is 4",
        ),
        (
            Config(pipeline=Pipeline(rounds=2)),
            BadConfig,
            "TP020 at pipeline: there are no stages\n  fix: mesh.pp of 2",
        ),
    ],
)
def test_sizes_are_checked_with_numbers_that_would_work(config, error, message):
    with pytest.raises(error, match=message):
        resolve(config, 8)


def test_batch_follows_from_micro_batches():
    config = Config(batch=Batch(micro_size=2, accumulation=3), mesh=Mesh(tp=2))
    assert resolve(config, 8).batch == Batch(size=24, micro_size=2, accumulation=3)
    assert resolve(resolve(config, 8), 8) == resolve(config, 8)
    staged = Config(mesh=Mesh(pp=4), batch=Batch(micro_size=1))
    assert resolve(staged, 8).batch == Batch(size=8, micro_size=1, accumulation=4)
    assert resolve(resolve(staged, 8), 8) == resolve(staged, 8)


def test_every_setting_is_a_flag_with_help(capsys):
    config = tyro.cli(Config, args=["--mesh.tp", "4", "--optimizer.options", "b1", "0.8"])
    assert config.mesh.tp == 4
    assert config.optimizer.options == {"b1": 0.8}
    with pytest.raises(SystemExit):
        tyro.cli(Config, args=["--help"])
    text = capsys.readouterr().out
    for name in settings():
        assert f"--{name.replace('_', '-')}" in text, name


def test_every_setting_is_explained_and_there_are_few():
    names = list(settings())
    assert len(names) <= 72
    kinds = {type(getattr(Config(), f.name)) for f in dataclasses.fields(Config)}
    assert all(kind.__doc__ for kind in kinds)
    check_golden("settings.txt", "\n".join((*names, "")))


def test_config_of_the_quickstart_is_such_a_file():
    config, lines = load(Path(__file__).parent.parent / "jaxtp" / "cli" / "quickstart.toml")
    assert lines == ()
    assert resolve(config, 8).mesh == Mesh(tp=4, dp=2)


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.json", '{"seq_len": 64,\n "steps" 3}', "a.json, line 2 column 10: not JSON"),
        ("a.toml", "seq_len = 64\nsteps = = 3", "a.toml, line 2 column 9: not TOML"),
        ("a.toml", "[mesh", "a.toml, line 1 column 6: not TOML"),
        ("a.yaml", "mesh:\n  tp: 4\n dp: 2", "a.yaml, line 3 column 2: not YAML"),
        ("a.yml", "- 3", "a.yml: a list is not settings"),
        ("a.yaml", "seq_len: 3\nseq_len: 4", "seq_len: the key is given twice"),
    ],
)
def test_syntax_errors_name_file_and_line(tmp_path, name, text, where):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadConfig, match=re.escape(where)):
        load(tmp_path / name)


def test_yaml_says_the_same(tmp_path):
    (tmp_path / "a.yaml").write_text("mesh: {tp: 4}\noptimizer:\n  learning_rate: 1e-4\n")
    (tmp_path / "a.json").write_text('{"mesh": {"tp": 4}, "optimizer": {"learning_rate": 1e-4}}')
    assert load(tmp_path / "a.yaml") == load(tmp_path / "a.json")


def test_changes_are_checked_like_files():
    config = changed(Config(), {"mesh.tp": 4, "remat": "full", "optimizer.options": {"b2": 0.9}})
    assert (config.mesh.tp, config.remat, config.optimizer.options) == (4, "full", {"b2": 0.9})
    with pytest.raises(BadConfig, match=r"at remat: is \"ful\".*\n.*did you mean full"):
        changed(config, {"remat": "ful"})
    with pytest.raises(BadConfig, match=r"at mesh.tpp: unknown key\n.*did you mean mesh.tp\?"):
        changed(config, {"mesh.tpp": 4})
    with pytest.raises(BadConfig, match=r"at steps: is 0"):
        changed(config, {"steps": 0})
