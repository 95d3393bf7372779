"""Device kinds, targets, and the time of one collective."""

import dataclasses

import pytest

from jaxtp.errors import BadTarget, BadTopology
from jaxtp.hardware.gpus import KINDS, LAUNCH_SECONDS, DeviceKind, Target, kind_of
from jaxtp.hardware.links import BLACKWELL, HOPPER, MIB, table_seconds, wire_bytes


@pytest.mark.parametrize(
    ("text", "topology", "devices"),
    [
        ("h100:1x8", "1x1x8", 8),
        ("a100-40:2x4", "1x2x4", 8),
        ("gb200:4x18x4", "4x18x4", 288),
        ("h200:32x8", "1x32x8", 256),
    ],
)
def test_target_text(text, topology, devices):
    target = Target.parse(text)
    assert (target.topology, target.num_devices) == (topology, devices)
    assert str(target) == text
    assert target.device is KINDS[text.split(":")[0]]


@pytest.mark.parametrize(
    ("text", "error", "needle"),
    [
        ("h100", BadTarget, "HOSTSxGPUS"),
        ("h100:8", BadTarget, "h100:1x8"),
        ("h100:1x1x1x8", BadTarget, "HOSTSxGPUS"),
        ("h100:1xeight", BadTarget, "HOSTSxGPUS"),
        ("h100:0x8", BadTarget, "at least 1"),
        ("h1000:1x8", BadTarget, "a100-40, a100-80, h100, h200, b200, gb200, b300, gb300"),
        ("local:1x8", BadTarget, "no GPU"),
        ("h100:1x16", BadTopology, "8 over NVLink"),
    ],
)
def test_bad_target(text, error, needle):
    with pytest.raises(error, match=needle) as caught:
        Target.parse(text)
    assert caught.value.fix


def test_description_file_round_trip(tmp_path):
    own = dataclasses.replace(KINDS["h100"], name="mine", memory_bytes=90_000_000_000)
    file = tmp_path / "mine.json"
    file.write_text(own.to_json())
    target = Target.parse(f"{file}:1x8")
    assert target.device == own
    assert target.device.to_json() == own.to_json()


@pytest.mark.parametrize(
    "text",
    ["not json", "[]", "{}", '{"tables": {}}', '{"tables": {"all-reduce": {"x": []}}}'],
)
def test_bad_description(text, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(BadTopology, match="TP012"):
        Target.parse(f"{file}:1x8")


def test_impossible_numbers():
    with pytest.raises(BadTopology, match="hbm_bandwidth is -1"):
        dataclasses.replace(KINDS["h100"], hbm_bandwidth=-1)
    with pytest.raises(BadTopology, match="memory_bytes is nan"):
        DeviceKind.from_json(
            KINDS["h100"].to_json().replace('"memory_bytes": 84942979072', '"memory_bytes": NaN')
        )


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
    ],
)
def test_kind_of_a_live_device(device_kind, name):
    assert kind_of(device_kind).name == name


def test_kind_of_an_unknown_device():
    with pytest.raises(BadTopology, match="NVIDIA T4"):
        kind_of("NVIDIA T4")


def test_ring_formula():
    assert wire_bytes("all-reduce", 1000, 4) == 1500
    assert wire_bytes("all-gather", 1000, 4) == wire_bytes("reduce-scatter", 1000, 4) == 750
    assert wire_bytes("all-to-all", 1000, 4) == 750
    assert wire_bytes("collective-permute", 1000, 8) == 1000
    assert wire_bytes("all-reduce", 1000, 1) == 0


@pytest.mark.parametrize(("mib", "milliseconds"), [(64, 0.379), (128, 0.688)])
def test_published_all_reduce_times(mib, milliseconds):
    """OVERLAP.md 1 states both for 8 H100s: the second lies between two listed sizes."""
    seconds = table_seconds(HOPPER, "all-reduce", mib * MIB, 8)
    assert seconds * 1e3 == pytest.approx(milliseconds, abs=5e-4)


@pytest.mark.parametrize("tables", [HOPPER, BLACKWELL, KINDS["gb200"].tables])
def test_more_bytes_never_take_less_time(tables):
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        for size in tables[kind]:
            # Below 16 MiB the measured numbers themselves are noisy.
            times = [table_seconds(tables, kind, MIB * 2**power, size) for power in range(4, 12)]
            assert times == sorted(times), (kind, size)
            assert table_seconds(tables, kind, 1, size) == table_seconds(tables, kind, 9, size)


def test_unlisted_group_size_takes_the_next_larger():
    three = table_seconds(HOPPER, "all-gather", MIB, 3)
    assert three == table_seconds(HOPPER, "all-gather", MIB, 4)
    assert table_seconds(KINDS["gb200"].tables, "all-gather", MIB, 72) == table_seconds(
        KINDS["gb200"].tables, "all-gather", MIB, 64
    )


def test_collectives_across_hosts_take_the_nic():
    target = Target.parse("h100:4x8")
    inside = target.collective_seconds("all-reduce", 64 * MIB, [range(8), range(8, 16)])
    assert inside == table_seconds(HOPPER, "all-reduce", 64 * MIB, 8)
    # One member per host: every byte of the ring leaves through one NIC.
    dp = target.collective_seconds("all-reduce", 64 * MIB, [range(i, 32, 8) for i in range(8)])
    # Two levels of a tree over four hosts start up; half of the NIC's bandwidth is sustained.
    assert dp == pytest.approx(2 * LAUNCH_SECONDS + 1.5 * 64 * MIB / (0.5 * 50e9))
    # Eight members per host share the same bytes over eight NICs.
    whole = target.collective_seconds("all-reduce", 64 * MIB, [range(32)])
    assert whole == pytest.approx(2 * LAUNCH_SECONDS + 1.5 * 8 * MIB / (0.5 * 50e9))
    permute = target.collective_seconds("collective-permute", 64 * MIB, [(0, 8), (1, 2)])
    assert permute == pytest.approx(LAUNCH_SECONDS + 64 * MIB / (0.5 * 50e9))


def test_a_rack_joins_its_hosts_by_nvlink():
    target = Target.parse("gb200:2x18x4")
    assert target.domain(71) == 0
    assert target.domain(72) == 1
    assert target.host(7) == 1
    across_hosts = target.collective_seconds("all-reduce", 64 * MIB, [range(8)])
    assert across_hosts == table_seconds(BLACKWELL, "all-reduce", 64 * MIB, 8)
    hopper = Target.parse("h100:2x4")
    assert hopper.domain(3) != hopper.domain(4)


def test_an_a100_link_is_two_thirds_of_an_h100():
    groups = [range(8)]
    slow = Target.parse("a100-80:1x8").collective_seconds("all-gather", MIB, groups)
    fast = Target.parse("h100:1x8").collective_seconds("all-gather", MIB, groups)
    assert slow / fast == pytest.approx(1.5)


def test_the_model_rate_is_the_one_overlap_is_measured_at():
    assert KINDS["h100"].matmul_flops == pytest.approx(700e12)
