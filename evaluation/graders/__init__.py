"""Graders by kind; `kvstitch.evaluation.grading.GRADERS` names them all."""
