"""Mesh files and counts: what is read, and what is refused, with what would be allowed."""

from pathlib import Path

import pytest

from jaxpaged.config import ParallelConfig
from jaxpaged.errors import ConfigError
from jaxpaged.parallel.mesh_config import TABLE, MeshShape, ModelCounts, check_mesh, read_mesh

CONFIGS = Path(__file__).parents[2] / "configs" / "meshes"
DENSE, MIXTURE = ModelCounts(heads=12, experts=1), ModelCounts(heads=12, experts=8)


def mesh_file(folder: Path, text: str) -> ParallelConfig:
    path = folder / "mesh.yaml"
    path.write_text(text)
    return ParallelConfig(mesh=str(path))


def test_the_option_alone_is_a_mesh() -> None:
    assert read_mesh(ParallelConfig()) == MeshShape()
    assert read_mesh(ParallelConfig(tensor_parallel_size=4)) == MeshShape(tensor=4)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_meshes_that_come_along_can_be_read(path: Path) -> None:
    """Their names say what they are."""
    mesh = read_mesh(ParallelConfig(mesh=str(path)))
    words = path.stem.split("-")
    named = {axis: int(count) for axis, count in zip(words[::2], words[1::2], strict=True)}
    assert {axis: getattr(mesh, axis) for axis in ("data", "tensor", "expert")} == {"data": 1, "tensor": 1, "expert": 1} | named


def test_a_file_names_axes_and_what_lies_on_them(tmp_path: Path) -> None:
    given = "axes: {data: 2, tensor: 4}\ntable: {ffw: tensor, experts: expert}\n"
    mesh = read_mesh(mesh_file(tmp_path, given))
    assert mesh == MeshShape(data=2, tensor=4, table={"ffw": "tensor", "experts": "expert"})
    assert (mesh.devices_per_replica, mesh.num_devices) == (4, 8)
    assert read_mesh(mesh_file(tmp_path, "axes: {tensor: 2}")).table == TABLE


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("axis: {tensor: 2}", "unknown key 'axis'; the nearest is axes"),
        ("axes: {tenser: 2}", "unknown key 'tenser'; the nearest is tensor"),
        ("axes: {tensor: two}", "axes.tensor must be an integer from 1 to 4096, not 'two'"),
        ("axes: {tensor: 0}", "axes.tensor must be an integer from 1 to 4096, not 0"),
        ("axes: {tensor: true}", "axes.tensor must be an integer from 1 to 4096, not True"),
        ("axes: [tensor]", "axes must be a mapping"),
        ("table: {ffw: expert}", "table.ffw is 'expert', and ffw may lie on tensor only"),
        ("table: {embed: tensor}", "unknown key 'embed'"),
        ("table: {heads: tensor}", "both heads and kv_heads, or neither"),
        ("axes: {tensor: 2, tensor: 4}", "the key tensor is given twice"),
        ("- 1", "must hold a mapping"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_mesh(mesh_file(tmp_path, text))
    assert sentence in refused.value.message


def test_a_missing_file_and_a_contradiction_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_mesh(ParallelConfig(mesh=str(tmp_path / "none.yaml")))
    file = mesh_file(tmp_path, "axes: {tensor: 4}").mesh
    assert read_mesh(ParallelConfig(mesh=file, tensor_parallel_size=4)).tensor == 4
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 contradicts .*, which says tensor 4"):
        read_mesh(ParallelConfig(mesh=file, tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("mesh", "model", "num_devices", "sentence"),
    [
        (MeshShape(tensor=5), DENSE, 8, "tensor_parallel_size 5 does not divide the model's 12 heads; allowed: 1, 2, 3, 4, 6, 12"),
        (MeshShape(tensor=8), DENSE, 8, "does not divide"),
        (
            MeshShape(tensor=12),
            DENSE,
            8,
            "tensor_parallel_size 12 needs 12 devices and JAX has 8 devices; allowed for tensor_parallel_size",
        ),
        (MeshShape(tensor=12), DENSE, 8, ": 1, 2, 3, 4, 6"),
        (MeshShape(tensor=2), DENSE, 1, "needs 2 devices and JAX has 1 device; allowed for tensor_parallel_size: 1"),
        (MeshShape(expert=2), DENSE, 8, "the mesh axis expert is 2, and the model is no mixture of experts; allowed: 1"),
        (MeshShape(expert=3), MIXTURE, 8, "the mesh axis expert 3 does not divide the model's 8 experts; allowed: 1, 2, 4, 8"),
        (MeshShape(tensor=2, expert=8), MIXTURE, 8, "allowed for the mesh axis expert: 1, 2, 4"),
        (
            MeshShape(data=9),
            DENSE,
            8,
            "the mesh axis data 9 needs 9 devices and JAX has 8 devices; allowed for the mesh axis data: 1, 2, 3",
        ),
        (MeshShape(data=4, tensor=4, expert=4), MIXTURE, 8, "the other axes alone need more"),
    ],
)
def test_impossible_counts_are_refused_with_those_allowed(mesh: MeshShape, model: ModelCounts, num_devices: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_mesh(mesh, model, num_devices)
    assert sentence in refused.value.message


def test_what_is_allowed_is_allowed() -> None:
    """Heads that lie whole on every device need not be divided."""
    for size in (1, 2, 3, 4, 6, 12):
        check_mesh(MeshShape(tensor=size), DENSE, 12)
    for size in (1, 2, 4, 8):
        check_mesh(MeshShape(expert=size), MIXTURE, 8)
    check_mesh(MeshShape(tensor=5, table={"ffw": "tensor"}), DENSE, 5)
