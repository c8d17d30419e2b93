"""What to make sure of before, during and after training, answered from a run directory where it can be."""

from gpt_guard.cli.checklists.items import PHASES, Item, ItemAnswer, Phase, checklists
from gpt_guard.cli.checklists.questions import answers
from gpt_guard.cli.checklists.run_dir import RunDir, open_run

__all__ = ["PHASES", "Item", "ItemAnswer", "Phase", "RunDir", "answers", "checklists", "open_run"]
