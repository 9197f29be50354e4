"""How good and how fast a model pair answers, by method: measured on problems that can be graded."""
