"""How single runs become quoted numbers: the choice of learning rates, means over seeds, tables."""

from __future__ import annotations

from typing import Any

from forecasting_tables import Row, best_lr, by_lr, format_markdown, format_relative


def _record(loss: str, lr: float, seed: int, val_mse: float, test_mse: float, horizon: int = 96) -> dict[str, Any]:
    names = {"dataset": "ETTh1", "horizon": horizon, "backbone": "dlinear", "loss": loss, "lr": lr, "seed": seed}
    return names | {
        "val_mse": val_mse,
        "val_mae": 1.0,
        "test_mse": test_mse,
        "test_mae": 1.0,
        "num_epochs": 1,
        "seconds": 1,
    }


def test_learning_rate_is_chosen_on_validation_over_all_seeds_not_on_test() -> None:
    records = [
        *(_record("mse", 1e-3, seed, val_mse, 0.1) for seed, val_mse in ((1, 0.5), (2, 0.9))),
        *(_record("mse", 1e-4, seed, val_mse, 0.4) for seed, val_mse in ((1, 0.6), (2, 0.6))),
    ]
    (row,) = best_lr(by_lr(records))
    assert (row.lr, row.mean("test_mse")) == (1e-4, 0.4)


def test_markdown_marks_the_lowest_and_averages_only_complete_columns() -> None:
    def rows(loss: str, errors: dict[int, float]) -> list[Row]:
        return by_lr([_record(loss, 1e-3, 1, 1.0, error, horizon) for horizon, error in errors.items()])

    text = format_markdown({"MSE": rows("mse", {96: 0.4, 192: 0.5}), "MAE": rows("mae", {96: 0.3})})
    assert text.splitlines() == [
        "### dlinear, ETTh1",
        "",
        "| horizon | MSE | MAE |",
        "|---:|:--|:--|",
        "| 96 | 0.4000 / **1.0000** (lr 0.001) | **0.3000** / **1.0000** (lr 0.001) |",
        "| 192 | **0.5000** / **1.0000** (lr 0.001) |  |",
        "| mean | **0.4500** / **1.0000** |  |",
    ]


def test_relative_errors_count_each_data_set_once_whatever_its_number_of_horizons() -> None:
    def rows(errors: dict[tuple[str, int], float]) -> list[Row]:
        records = [
            _record("", 1e-3, 1, 1.0, error, horizon) | {"dataset": name} for (name, horizon), error in errors.items()
        ]
        return by_lr(records)

    text = format_relative(
        {
            "MSE": rows({("a", 96): 0.4, ("a", 192): 0.5, ("b", 96): 2.0, ("c", 96): 1.0}),
            "MAE": rows({("a", 96): 0.1, ("a", 192): 0.5, ("b", 96): 1.0}),  # ratios 1/4 and 1, 1/2; c is incomplete
        }
    )
    assert text.splitlines() == [
        "| backbone | data sets | MSE | MAE |",
        "|:--|--:|:--|:--|",
        "| dlinear | 2 | 1.0000 / 1.0000 | 0.5000 / 1.0000 |",
    ]
