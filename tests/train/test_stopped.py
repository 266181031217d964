"""A run that lost a rank is tried again; one that was stopped by rule isn't."""

import pytest

from sparkgpt.config import TrainConfig
from sparkgpt.errors import RankLost, UserError
from sparkgpt.train.__main__ import stops_recorded


@pytest.mark.parametrize("error, retried", [(RankLost, True), (UserError, False)])
def test_lost_rank_leaves_its_run_to_be_tried_again(error, retried, tmp_path):
    (tmp_path / "run-s0").mkdir()

    def attempt(number):
        return stops_recorded(
            TrainConfig(
                train_path="x",
                out_dir=str(tmp_path),
                run_name="run-s0",
                publish="y",
                attempt=number,
            )  # fmt: skip
        )

    with pytest.raises(error), attempt(1):
        raise error("gone", exit_code=1)
    if retried:
        with attempt(2):
            return
    with pytest.raises(UserError, match="not tried again: gone"), attempt(2):
        pass
