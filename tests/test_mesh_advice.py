"""What a search says beside its table."""

import re

import pytest

from jaxtp.train.mesh_advice import advice
from jaxtp.train.mesh_search import search


def lines(**settings):
    result = search("llama3-8b", batch=64, compile_best=0, **settings)
    first = result.rows[0].candidate
    return result, advice(result.ranking, result.pricing, result.target, first)


def test_each_axis_has_its_links_and_tp_a_reason_to_stay_inside_nvlink():
    _, said = lines(target="h100:2x8", fixed={"mesh.tp": 8, "mesh.fsdp": 2})
    assert said[0] == "tp=8: inside an NVLink domain of 8 GPUs"
    assert said[1] == "fsdp=2: over the network, 25 GB/s a GPU sustained"
    assert said[2].startswith("tp stays inside NVLink: a layer waits for 4 all-reduces of ")
    inside, across = (float(found) for found in re.findall(r"([\d.]+) ms", said[2]))
    assert across > inside


def test_a_slower_network_is_priced_only_where_there_is_one():
    result, said = lines(target="h100:2x8")
    (slower,) = [line for line in said if "network of 100 Gbit/s" in line]
    assert float(slower.split("take ")[1].split(" s")[0]) >= result.rows[0].candidate.seconds
    _, alone = lines(target="h100:1x8")
    assert not any("Gbit/s" in line for line in alone)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"target": "h100:1x8", "fixed": {"mesh.tp": 8, "batch.micro_size": 1}}, "tp messages"),
        ({"target": "h100:1x8", "fixed": {"mesh.pp": 8, "batch.accumulation": 8}}, "stages"),
    ],
)
def test_what_stands_out_has_a_remedy(settings, remedy):
    _, said = lines(**settings)
    assert "to try first" in said[-1]
    assert remedy in said[-1]
