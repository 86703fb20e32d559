"""MoE modules and the task interface between models and the engine."""
