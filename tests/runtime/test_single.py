"""One process is a mesh of one."""

from rein.protocols import Mesh
from rein.runtime.single import SingleMesh


def test_a_sum_over_one_process_is_the_values_themselves() -> None:
    mesh: Mesh = SingleMesh()
    assert mesh.sum([1.0, -2.5]) == [1.0, -2.5]
    assert (mesh.rank, mesh.world_size) == (0, 1)
