"""What the store builds from configs is what an executor reads off the loaded model: the digest is the contract."""

from pathlib import Path

from adapter_store.bases import find_base
from executor.config import ExecutorSettings
from executor.service import load_model

BASE = Path(__file__).parents[2] / "models/tiny_flux/base"


def test_the_layout_of_a_folder_is_the_one_that_an_executor_registers():
    settings = ExecutorSettings(
        base_model=str(BASE),
        resolutions=((64, 64),),
        compile="off",
        max_sequence_length=12,
        threads=1,
        batch_sizes=(1,),
    )
    model = load_model(settings)
    model.engine.close()
    assert find_base(str(BASE), "F32", lambda _: BASE) == model.layout
