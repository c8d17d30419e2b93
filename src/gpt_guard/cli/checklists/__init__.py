"""What to make sure of before, during and after training, answered from a run directory where it can be."""

from gpt_guard.cli.checklists.answers import answers
from gpt_guard.cli.checklists.lists import PHASES, Answer, Item, Phase, checklists
from gpt_guard.cli.checklists.run_dir import RunDir, open_run

__all__ = ["PHASES", "Answer", "Item", "Phase", "RunDir", "answers", "checklists", "open_run"]
